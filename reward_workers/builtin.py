"""The rewards and the checker of the built-in tasks: plain functions, as a user would write them.

A training reward and the checker that judges the policy in evaluation are written apart on purpose: a
policy that found a hole in one should not be praised by the other.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from typing import Any

from reward_workers.code_extraction import after_thinking
from reward_workers.function import gold_written_by
from reward_workers.strict_json import after_thought
from rollout_workers.trajectory import Trajectory

# A minus after a digit is an operator. Groups of thousands may have commas.
NUMBER = re.compile(r"(?:(?<!\d)-)?\d+(?:,\d{3})*(?:\.\d+)?")


def write_answer(answer: str) -> str:
    """The answer alone."""
    return answer


@gold_written_by(write_answer)
def arithmetic_reward(completion: str, answer: str) -> float:
    """1 if the last number of the completion is the answer, else 0.

    One number decides, so a list of guesses is worth no more than its last one. Thoughts don't count, and one that is not
    finished leaves no answer.
    """
    numbers = NUMBER.findall(after_thought(completion) or "")
    return float(bool(numbers) and Decimal(numbers[-1].replace(",", "")) == Decimal(answer))


@gold_written_by(write_answer)
def arithmetic_checker(completion: str, answer: str, dataset: str) -> float:
    """1 if reasoning-gym's own scorer of `dataset` gives the stated result full marks, else 0.

    The result is the first number after the last equals sign; without one, the last word that is a number. None of it may
    stand in a thought.
    """
    _, equals, tail = (after_thinking(completion) or "").rpartition("=")
    numbers = [number for word in tail.split() if (number := _number(word))]
    if not numbers:
        return 0.0
    stated = numbers[0] if equals else numbers[-1]
    return float(_scorer(dataset)(stated, {"answer": answer}) == 1.0)


def _number(word: str) -> str | None:
    """`7`, `7.0`, `+7` and `**7**.` are all written `7`, because some of the scorers compare text."""
    bare = word.strip(".,:;!?*$()[]{}\\\"'`").replace(",", "")
    try:
        number = Decimal(bare)
    except InvalidOperation:
        return None
    if not number.is_finite():
        return None
    return f"{number.normalize():f}" if number else "0"


@functools.cache
def _scorer(dataset: str) -> Callable[[str, dict[str, Any]], float]:
    import reasoning_gym

    return reasoning_gym.get_score_answer_fn(dataset)


def write_lower_case() -> str:
    """An answer of lower-case letters alone."""
    return "rain"


@gold_written_by(write_lower_case)
def synthetic_reward(completion: str) -> float:
    """Share of characters that are lower-case ASCII letters: a random policy learns it in a few updates."""
    return sum("a" <= character <= "z" for character in completion) / len(completion) if completion else 0.0


def hash_reward(trajectory: Trajectory) -> float:
    """A number in [0, 1) that prompt id and index alone decide, so that groups differ inside.

    Nothing can be learned from it: it shows whether a resumed run goes on as the killed one would have.
    """
    digest = hashlib.blake2b(f"{trajectory.prompt_id}:{trajectory.index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64
