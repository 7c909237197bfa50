"""The checker of answers from given notes: right only if it says what the notes say and nothing else.

It judges by the row's gold, without an eye on wording, and so apart from any judge that rewards answers in training.
"""

from __future__ import annotations

import re

from reward_workers.function import gold_written_by
from reward_workers.strict_json import after_thought

NUMBER = re.compile(r"\d+")
NOT_THERE = re.compile(
    r"(?:not|n't) (?:in (?:\w+ )?notes|mention|stat|given|say)|no (?:information|answer)", re.IGNORECASE
)


def write_grounded(answer: str | None) -> str:
    """The answer alone, or that there is none."""
    return "Not in the notes." if answer is None else answer


@gold_written_by(write_grounded)
def grounded(completion: str, answer: str | None) -> float:
    """1 if every number in the completion is the answer and there is one; without an answer (None), if there is no number
    and the completion says that it is not in the notes. Else 0. Thoughts don't count, and one that is not finished leaves no
    answer.
    """
    text = after_thought(completion) or ""
    numbers = {str(int(number)) for number in NUMBER.findall(text)}
    if answer is None:
        return float(not numbers and bool(NOT_THERE.search(text)))
    return float(numbers == {answer})
