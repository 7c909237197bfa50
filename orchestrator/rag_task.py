"""Generator of rows for answering from given notes alone: a small stand-in for retrieval-augmented generation.

Contract: that of `orchestrator.tasks`. Columns: `answer`, the one number that the notes give for the question, or null where
they give none, and `numbers`, all numbers that the notes hold.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from orchestrator.tasks import check_split, held_out

PLACES = (
    "library", "pool", "bakery", "museum", "station", "market", "school", "garden", "theatre", "harbour", "bank", "cinema",
    "gym", "café", "zoo", "castle",
)  # fmt: skip
FACTS = {
    "The {place} opens at {number}.": "When does the {place} open?",
    "The {place} has {number} rooms.": "How many rooms does the {place} have?",
    "The {place} is {number} km away.": "How far away is the {place}?",
    "A ticket for the {place} costs {number} euros.": "How much is a ticket for the {place}?",
}
INSTRUCTION = (
    "Notes:\n{notes}\n\nQuestion: {question}\nAnswer briefly, from the notes only. If the notes do not say it, answer: not in "
    "the notes."
)


def notes(
    *, split: str = "train", size: int = 256, seed: int = 0, facts: int = 3, unanswerable_share: float = 0.2
) -> Iterator[dict[str, Any]]:
    """`size` questions with `facts` notes each, of which one answers it, or, for about `unanswerable_share`, none does.

    The numbers of one question's notes differ. Which split a question belongs to is decided by its place and its kind.
    Raises ValueError for another split than train and eval, and for fewer than 1 or more than 16 facts.
    """
    check_split(split)
    if not 1 <= facts <= len(PLACES):
        raise ValueError(f"facts={facts}: expected 1 to {len(PLACES)}")
    draw = random.Random(seed)
    found = 0
    while found < size:
        chosen = draw.sample(PLACES, facts)
        kinds = [draw.choice(list(FACTS)) for _ in chosen]
        numbers = draw.sample(range(2, 60), facts)
        lines = [k.format(place=p, number=n) for k, p, n in zip(kinds, chosen, numbers, strict=True)]
        answerable = draw.random() >= unanswerable_share
        place, kind = chosen[0], kinds[0]
        if not answerable:
            kind = draw.choice([other for other in FACTS if other != kind])
        if held_out([place, kind]) != (split == "eval"):
            continue
        found += 1
        draw.shuffle(lines)
        text = INSTRUCTION.format(
            notes="\n".join(f"- {line}" for line in lines), question=FACTS[kind].format(place=place)
        )
        yield {
            "id": f"{seed}-{found}",
            "prompt": [{"role": "user", "content": text}],
            "answer": str(numbers[0]) if answerable else None,
            "numbers": [str(number) for number in numbers],
        }
