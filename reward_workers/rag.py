"""The checker of answers from given notes: right only if it says what the notes say and nothing else.

It judges by the row's gold, without an eye on wording, and so apart from any judge that rewards answers in training.
"""

from __future__ import annotations

import re

NUMBER = re.compile(r"\d+")
NOT_THERE = re.compile(
    r"not (?:in|mentioned|stated|given|say)|n't (?:in|mention|say|state)|no (?:information|answer)", re.IGNORECASE
)


def grounded(completion: str, answer: str | None) -> float:
    """1 if every number in the completion is the answer and there is one; without an answer (None), if there is no number
    and the completion says that it is not in the notes. Else 0.
    """
    numbers = {str(int(number)) for number in NUMBER.findall(completion)}
    if answer is None:
        return float(not numbers and bool(NOT_THERE.search(completion)))
    return float(numbers == {answer})
