"""Length shaping: what an answer's length adds to its reward.

Contract. Pure functions of lengths in sampled tokens. `soft_overlong` is a reward function as it stands
(`reward.functions.length.path=reward_workers.shaping.soft_overlong`); the others need a verdict, and are
called from a reward function that has one. A length term must not be `reward.primary`: it differs inside
groups that are all wrong.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from rollout_workers.trajectory import Trajectory


def soft_overlong(trajectory: Trajectory, *, max_tokens: int, cache_tokens: int) -> float:
    """Reward function: `soft_overlong_penalty` of the number of tokens the policy sampled."""
    return soft_overlong_penalty(trajectory.response_length, max_tokens=max_tokens, cache_tokens=cache_tokens)


def soft_overlong_penalty(length: int, *, max_tokens: int, cache_tokens: int) -> float:
    """0 up to max_tokens - cache_tokens, falling to -1 at max_tokens, -1 beyond. DAPO, arXiv:2503.14476,
    eq. 13.

    Raises ValueError unless 0 < cache_tokens <= max_tokens.
    """
    if not 0 < cache_tokens <= max_tokens:
        raise ValueError(f"need 0 < cache_tokens <= max_tokens, got {cache_tokens} and {max_tokens}")
    return -min(max(length - (max_tokens - cache_tokens), 0) / cache_tokens, 1.0)


def cosine_length(
    length: int,
    *,
    correct: bool,
    max_tokens: int,
    correct_range: tuple[float, float] = (0.5, 1.0),
    wrong_range: tuple[float, float] = (-0.5, -1.0),
) -> float:
    """From the second bound of the range (length 0) to the first (max_tokens), along half a cosine: short
    right answers earn most, short wrong ones lose most. arXiv:2502.03373.
    """
    end, start = correct_range if correct else wrong_range
    return end + 0.5 * (start - end) * (1 + math.cos(math.pi * min(length / max_tokens, 1.0)))


def kimi_length(lengths: Sequence[int], correct: Sequence[bool]) -> list[float]:
    """Rewards of one group's lengths: lam = 0.5 - (len - min) / (max - min); right answers get lam, wrong
    ones min(0, lam); all 0 if every length is the same. Kimi k1.5, arXiv:2501.12599.
    """
    if len(lengths) != len(correct):
        raise ValueError(f"{len(lengths)} lengths and {len(correct)} verdicts must be equally many")
    shortest, spread = min(lengths), max(lengths) - min(lengths)
    if spread == 0:
        return [0.0] * len(lengths)
    shares = [0.5 - (length - shortest) / spread for length in lengths]
    return [share if right else min(0.0, share) for share, right in zip(shares, correct, strict=True)]
