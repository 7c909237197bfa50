"""Generators of rows: the default task, ticket triage, and one for the random tiny model.

Contract: a generator takes keyword arguments (`data.<kind>.<name>.options`) and yields rows as a data file
would hold them: `prompt`, an `id`, and the columns its reward reads. The same arguments give the same rows,
and the rows of `split="train"` and `split="eval"` have no question in common, whatever the seeds and sizes.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
from collections.abc import Iterator, Sequence
from typing import Any

HELD_OUT_SHARE = 5  # one question in so many belongs to the eval split
DRAWS_WITHOUT_NEW = 1000  # after so many draws that bring no new question, there are no more


def arithmetic(
    *,
    split: str = "train",
    size: int = 1000,
    seed: int = 0,
    operators: Sequence[str] = ("+",),
    min_terms: int = 2,
    max_terms: int = 2,
    min_digits: int = 1,
    max_digits: int = 1,
    instruction: str = "Calculate {expression}. Answer briefly.",
) -> Iterator[dict[str, Any]]:
    """Up to `size` different sums from reasoning-gym's `basic_arithmetic`, with `answer` and the name of
    the `dataset`.

    All terms of one sum are drawn from 0 to 10 ** digits. There are fewer rows where the difficulty allows
    fewer questions: with two terms of one digit, about a hundred. Which split a question belongs to is
    decided by a hash of its terms, so that `3 + 4` is not held out while `4 + 3` is trained on.

    Raises ValueError for a split other than train and eval, and for operators other than + and -: the data
    set works others out from left to right.
    """
    from reasoning_gym.arithmetic.basic_arithmetic import BasicArithmeticDataset, BasicArithmeticDatasetConfig

    check_split(split)
    if not operators or not set(operators) <= {"+", "-"}:
        raise ValueError(f"operators={list(operators)}: expected some of + and -")
    questions = BasicArithmeticDataset(
        BasicArithmeticDatasetConfig(
            min_terms=min_terms,
            max_terms=max_terms,
            min_digits=min_digits,
            max_digits=max_digits,
            operators=list(operators),
            allow_parentheses=False,
            allow_negation=False,
            seed=seed,
            size=1,  # question i is made from seed + i, for any i
        )
    )
    seen: set[str] = set()
    index, last_new = 0, 0
    while len(seen) < size and index - last_new < DRAWS_WITHOUT_NEW:
        question = questions[index]
        index += 1
        expression = question["metadata"]["expression"]
        if expression in seen or held_out(sorted(expression.split())) != (split == "eval"):
            continue
        seen.add(expression)
        last_new = index
        yield {
            "id": expression,
            "prompt": [{"role": "user", "content": instruction.format(expression=expression)}],
            "answer": question["answer"],
            "dataset": question["metadata"]["source_dataset"],
        }


SUBJECTS = (
    "rain",
    "snow",
    "the sea",
    "a river",
    "the wind",
    "a house",
    "bread",
    "music",
    "the moon",
    "a stone",
)
QUALITIES = ("short", "long", "plain", "odd", "calm", "bright", "slow", "new")


def synthetic(*, split: str = "train", size: int = 512, seed: int = 0) -> Iterator[dict[str, Any]]:
    """`size` different short requests, for rewards that only look at how an answer is written.

    Raises ValueError for a split other than train and eval.
    """
    check_split(split)
    draw = random.Random(seed)
    number, found = 0, 0
    while found < size:
        number += 1
        subject, quality = draw.choice(SUBJECTS), draw.choice(QUALITIES)
        if held_out([str(number)]) == (split == "eval"):
            found += 1
            yield {"id": number, "prompt": f"Write {quality} line {number} about {subject}."}


TICKETS = {  # acceptable labels: tickets, with their blanks' fillings
    ("billing",): (
        ("I was charged twice for {}.", "The invoice for {} is wrong.", "Please refund my payment for {}."),
        ("my subscription", "the last month", "one order", "the yearly plan", "two licenses", "the trial"),
        ("My credit card was charged too much {}.", "I want my money back from the payment {}."),
        ("yesterday", "again", "this week", "in March", "on Friday", "last month"),
    ),
    ("technical",): (
        ("The app crashes when I open {}.", "I get an error message in {}.", "There is a bug in {}."),
        ("the settings", "the search page", "a large file", "the calendar", "the editor", "the photo gallery"),
        ("The screen stays black {}.", "The software freezes {}."),
        ("after the update", "at every start", "on my tablet", "since Monday", "when I scroll", "in dark mode"),
    ),
    ("shipping",): (
        ("My package with {} has not arrived.", "The courier lost {}.", "The delivery of {} is late."),
        ("the shoes", "a lamp", "two books", "the keyboard", "a winter coat", "the spare parts"),
        ("My parcel was delivered {}.", "The tracking says that my parcel is {}."),
        (
            "to the wrong house",
            "in a broken box",
            "to my neighbour",
            "in another city",
            "at the depot",
            "on its way back",
        ),
    ),
    ("account",): (
        ("I forgot the password of {}.", "I cannot log in to {}.", "Please delete {}."),
        ("my profile", "my user account", "my old login", "the family profile", "my second login", "my work profile"),
        ("I want to change my {}.", "My login does not accept my {}."),
        ("username", "email address", "password", "profile name", "phone number", "recovery code"),
    ),
    ("billing", "shipping"): (
        ("I paid for {} that never arrived, and want a refund.", "Why was I charged for the delivery of {}?"),
        ("a parcel", "a chair", "three shirts", "the camera"),
    ),
    ("technical", "account"): (
        ("The app crashes when I log in with {}.", "An error appears when I change {}."),
        ("my password", "my username", "my email address", "a new profile"),
    ),
}
TRIAGE_EXAMPLES = (
    ("The invoice has an extra charge.", "billing"),
    ("The app shows an error.", "technical"),
    ("Where is my package?", "shipping"),
    ("I cannot log in.", "account"),
)


def triage(
    *,
    split: str = "train",
    size: int = 1000,
    seed: int = 0,
    instruction: str = "Sort support tickets into billing, technical, shipping or account.",
) -> Iterator[dict[str, Any]]:
    """Up to `size` different support tickets to be sorted, with the `labels` acceptable for each.

    136 in all, a fifth of them held out; one in nine has two labels. The prompt shows an answered ticket of each
    category, in an order of its own: even a small model takes the form of the answer from them.

    Raises ValueError for a split other than train and eval.
    """
    check_split(split)
    tickets = [
        (blank.format(filling), labels)
        for labels, parts in TICKETS.items()
        for blanks, fillings in zip(parts[::2], parts[1::2], strict=True)
        for blank, filling in itertools.product(blanks, fillings)
    ]
    draw = random.Random(seed)
    draw.shuffle(tickets)
    chosen = [ticket for ticket in tickets if held_out([ticket[0]]) == (split == "eval")]
    for ticket, labels in chosen[:size]:
        prompt = [{"role": "system", "content": instruction}]
        for example, label in draw.sample(TRIAGE_EXAMPLES, len(TRIAGE_EXAMPLES)):  # a small model leans to the last one
            prompt += [
                {"role": "user", "content": example},
                {"role": "assistant", "content": json.dumps({"category": label})},
            ]
        yield {
            "id": ticket,
            "prompt": [*prompt, {"role": "user", "content": ticket}],
            "labels": list(labels),
        }


def check_split(split: str) -> None:
    if split not in ("train", "eval"):
        raise ValueError(f"split={split}: expected train or eval")


def held_out(parts: Sequence[str]) -> bool:
    digest = hashlib.blake2b(" ".join(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % HELD_OUT_SHARE == 0
