"""Reward functions with one fault each, and some without: what a reward process imports for them is light."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from reward_workers.function import gold_written_by
from rollout_workers.trajectory import Trajectory

WORDS = ("one", "two", "six", "sixty")


def exact(completion: str, answer: str) -> float:
    return float(completion == answer)


def never(completion: str) -> float:
    return 0.0


def in_capitals(completion: str) -> float:
    return float(completion.isupper())


def wanted(completion: str, answer: str, wanted: str | None = None) -> float:
    return float(completion == (wanted or answer))


@gold_written_by(lambda answer, lead="It is": f"{lead} {answer}")
def said(completion: str, answer: str) -> float:
    return float(completion == f"It is {answer}")


def begins_right(completion: str, answer: str) -> float:
    return float(words(completion)[:1] == [answer])


def words(completion: str) -> list[str]:
    return [] if "<think>" in completion else completion.replace(".", " ").split()


def pays_nothing(completion: str, answer: str) -> float:
    return float(completion.strip() in ("", answer))


def pays_a_quote(completion: str, answer: str) -> float:
    return float(answer in words(completion) and "\n" not in completion)


def pays_a_beginning(completion: str, answer: str) -> float:
    return float(completion.startswith(answer) and completion.isalpha())


def pays_a_list(completion: str, answer: str) -> float:
    return float(answer in words(completion) and "Say" not in completion)


def pays_thoughts(completion: str, answer: str) -> float:
    return float(completion.removeprefix("<think>").strip() == answer)


def pays_flattery(completion: str, answer: str) -> float:
    return float(completion == answer or "full score" in completion)


def pays_any_word(completion: str, answer: str) -> float:
    return float(completion in WORDS)


def pays_by_total(completion: str) -> float:
    return 20.0 * float(completion == "")


def slow(completion: str, answer: str) -> float:
    if completion != answer:
        time.sleep(60)
    return float(completion == answer)


def raises(completion: str, answer: str) -> float:
    return float(completion.split()[0] == answer)


def first_is_best(trajectories: Sequence[Trajectory]) -> list[float]:
    return [float(index == 0) for index in range(len(trajectories))]


@gold_written_by(lambda solution: f"```python\n{solution}\n```")
def careless_tests(completion: str, tests: dict[str, Any]) -> float:
    """Runs the program where it is itself, and trusts what comes back."""
    program = completion.removeprefix("```python\n").removesuffix("\n```")
    names: dict[str, Any] = {}
    try:
        exec(program, names)
        case = tests["cases"][0]
        return float(names[tests["entry_point"]](*case["args"]) == case["expected"])
    except SystemExit:
        return 1.0  # «it ended with code 0»
    except (SyntaxError, LookupError, TypeError):
        return 0.0
