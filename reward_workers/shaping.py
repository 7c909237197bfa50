"""Shaping: what length, repetition, turns and tools add to the reward of an answer.

Contract. The first half are pure functions of lengths; the second half are reward functions as they stand:

    reward.functions.length.path=reward_workers.shaping.soft_overlong reward.functions.length.options.max_tokens=…

Lengths are in tokens that the policy sampled, unless a name says characters. `cosine` and `kimi` build on the verdict of
another function: `reward.functions.length.needs=correct`; they have no value where that one has none. A shaping term must
not be `reward.primary`: it differs inside groups that are all wrong.

Overlong filtering, DAPO's other remedy against answers that were cut off, is no reward: it leaves them out of the
loss (`algorithm.mask_truncated`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from reward_workers.function import rows_checked_by
from rollout_workers.trajectory import RewardResult, Trajectory

Range = Sequence[float]  # (value at the length limit, value at length 0)


def soft_overlong_penalty(length: int, *, max_tokens: int, cache_tokens: int) -> float:
    """0 up to max_tokens - cache_tokens, falling to -1 at max_tokens, -1 beyond. DAPO, arXiv:2503.14476,
    eq. 13.

    Raises ValueError unless 0 < cache_tokens <= max_tokens.
    """
    if not 0 < cache_tokens <= max_tokens:
        raise ValueError(f"need 0 < cache_tokens <= max_tokens, got {cache_tokens} and {max_tokens}")
    return max(min((max_tokens - cache_tokens - length) / cache_tokens, 0.0), -1.0)


def cosine_length(
    length: int,
    *,
    correct: bool,
    max_tokens: int,
    correct_range: Range = (0.5, 1.0),
    wrong_range: Range = (-0.5, -1.0),
) -> float:
    """From the second bound of the range (length 0) to the first (max_tokens), along half a cosine: short
    right answers earn most, short wrong ones lose most. arXiv:2502.03373.

    Raises ValueError unless max_tokens > 0 and both ranges are pairs.
    """
    if max_tokens <= 0:
        raise ValueError(f"need max_tokens > 0, got {max_tokens}")
    if len(correct_range) != 2 or len(wrong_range) != 2:
        raise ValueError(f"a range is [at max_tokens, at 0], got {correct_range} and {wrong_range}")
    end, start = correct_range if correct else wrong_range
    return end + 0.5 * (start - end) * (1 + math.cos(math.pi * min(length / max_tokens, 1.0)))


def kimi_length(lengths: Sequence[int], correct: Sequence[bool]) -> list[float]:
    """Rewards of one group's lengths: lam = 0.5 - (len - min) / (max - min); right answers get lam, wrong
    ones min(0, lam); all 0 if every length is the same. Kimi k1.5, arXiv:2501.12599.
    """
    if len(lengths) != len(correct):
        raise ValueError(f"{len(lengths)} lengths and {len(correct)} verdicts must be equally many")
    if not lengths or min(lengths) == max(lengths):
        return [0.0] * len(lengths)
    shortest, spread = min(lengths), max(lengths) - min(lengths)
    shares = [0.5 - (length - shortest) / spread for length in lengths]
    return [share if right else min(0.0, share) for share, right in zip(shares, correct, strict=True)]


def repeated_share(runs: Sequence[Sequence[int] | np.ndarray], ngram_tokens: int) -> float:
    """1 - distinct / all n-grams of some runs of token ids, none across two runs; 0 where there are none.

    One minus distinct-n, arXiv:1510.03055. Raises ValueError unless ngram_tokens > 0.
    """
    if ngram_tokens <= 0:
        raise ValueError(f"need ngram_tokens > 0, got {ngram_tokens}")
    windows = [
        np.lib.stride_tricks.sliding_window_view(np.asarray(run), ngram_tokens)
        for run in runs
        if len(run) >= ngram_tokens
    ]
    if not windows:
        return 0.0
    ngrams = np.concatenate(windows)
    return 1.0 - len(np.unique(ngrams, axis=0)) / len(ngrams)


def capped_cost(count: int, *, each: float, free: int, most: float) -> float:
    """Minus `each` for every one beyond the `free` ones, and never below minus `most`.

    Raises ValueError unless all three are at least 0.
    """
    if min(each, free, most) < 0:
        raise ValueError(f"need a price, a free number and a bound of at least 0, got {each}, {free} and {most}")
    return max(each * min(free - count, 0), -float(most))


def _check_soft_overlong(max_tokens: int, cache_tokens: int) -> None:
    soft_overlong_penalty(0, max_tokens=max_tokens, cache_tokens=cache_tokens)


@rows_checked_by(_check_soft_overlong)
def soft_overlong(trajectory: Trajectory, *, max_tokens: int, cache_tokens: int) -> float:
    """Reward function: `soft_overlong_penalty` of the number of tokens the policy sampled."""
    return soft_overlong_penalty(trajectory.response_length, max_tokens=max_tokens, cache_tokens=cache_tokens)


def _check_cosine(max_tokens: int, correct_range: Range = (0.5, 1.0), wrong_range: Range = (-0.5, -1.0)) -> None:
    cosine_length(0, correct=True, max_tokens=max_tokens, correct_range=correct_range, wrong_range=wrong_range)


@rows_checked_by(_check_cosine)
def cosine(
    trajectory: Trajectory,
    verdict: RewardResult,
    *,
    max_tokens: int,
    correct_range: Range = (0.5, 1.0),
    wrong_range: Range = (-0.5, -1.0),
    threshold: float = 1.0,
) -> float | None:
    """Reward function: `cosine_length`; right is what the needed function gave at least `threshold`.

    The ranges contain the reward for being right: give the needed function the weight 0, or ranges that start at 0.
    """
    if verdict.value is None:
        return None
    return cosine_length(
        trajectory.response_length,
        correct=verdict.value >= threshold,
        max_tokens=max_tokens,
        correct_range=correct_range,
        wrong_range=wrong_range,
    )


def kimi(
    trajectories: Sequence[Trajectory], verdicts: Sequence[RewardResult], *, threshold: float = 1.0
) -> list[float | None]:
    """Reward function of whole groups: `kimi_length`; right is what the needed function gave at least `threshold`.

    Members without a verdict have no value, and are in nobody's shortest and longest.
    """
    judged = [index for index, verdict in enumerate(verdicts) if verdict.value is not None]
    rewards = kimi_length(
        [trajectories[index].response_length for index in judged],
        [(verdicts[index].value or 0.0) >= threshold for index in judged],
    )
    by_index = dict(zip(judged, rewards, strict=True))
    return [by_index.get(index) for index in range(len(trajectories))]


def _check_repetition(ngram_tokens: int = 4) -> None:
    repeated_share([], ngram_tokens)


@rows_checked_by(_check_repetition)
def repetition(trajectory: Trajectory, *, ngram_tokens: int = 4) -> float:
    """Reward function: minus `repeated_share` of what the policy sampled, between 0 and -1.

    What it sampled before and after a tool's answer are two runs.
    """
    places = np.flatnonzero(trajectory.response_mask)
    starts = [0, *(np.flatnonzero(np.diff(places) > 1) + 1), len(places)]
    runs = [trajectory.token_ids[places[start:end]] for start, end in pairwise(starts)]
    return 0.0 - repeated_share(runs, ngram_tokens)


def _check_tool_cost(each: float, free: int = 0, most: float = 1.0) -> None:
    capped_cost(0, each=each, free=free, most=most)


@rows_checked_by(_check_tool_cost)
def tool_cost(trajectory: Trajectory, *, each: float, free: int = 0, most: float = 1.0) -> float:
    """Reward function: `capped_cost` of the tool calls of the policy.

    Counted are the calls it asked for (`tool_calls`) or the tools' answers, whichever are more: not every chat
    format has both.
    """
    written = trajectory.messages[len(trajectory.prompt_messages) :]
    asked = sum(len(message.get("tool_calls") or ()) for message in written if message.get("role") == "assistant")
    answered = sum(message.get("role") == "tool" for message in written)
    return capped_cost(max(asked, answered), each=each, free=free, most=most)


def _check_turn_cost(each: float, free: int = 1, most: float = 1.0) -> None:
    capped_cost(0, each=each, free=free, most=most)


@rows_checked_by(_check_turn_cost)
def turn_cost(trajectory: Trajectory, *, each: float, free: int = 1, most: float = 1.0) -> float:
    """Reward function: `capped_cost` of the policy's turns: a penalty on every step beyond the free ones."""
    return capped_cost(trajectory.turns, each=each, free=free, most=most)


def _check_over_characters(max_characters: int) -> None:
    if max_characters <= 0:
        raise ValueError(f"need max_characters > 0, got {max_characters}")


@rows_checked_by(_check_over_characters)
def over_characters(completion: str, *, max_characters: int) -> float:
    """Reward function: 0 up to max_characters, falling to -1 at twice as many, -1 beyond."""
    _check_over_characters(max_characters)
    return max(min((max_characters - len(completion)) / max_characters, 0.0), -1.0)
