"""Length shaping: corner lengths, and the one shaping that is a reward function as it stands."""

from __future__ import annotations

import numpy as np
import pytest

from reward_workers import shaping
from rollout_workers.trajectory import Trajectory, VersionSpan


def test_soft_overlong_counts_the_tokens_the_policy_sampled() -> None:
    mask = np.array([False] * 30 + [True] * 90)
    trajectory = Trajectory(
        group_id="g",
        index=0,
        prompt_id="p",
        messages=(),
        token_ids=np.zeros(120, dtype=np.int32),
        response_mask=mask,
        behaviour_logprobs=np.zeros(120, dtype=np.float32),
        version_spans=(VersionSpan(30, 120, 0),),
        finish_reason="stop",
    )
    assert shaping.soft_overlong(trajectory, max_tokens=100, cache_tokens=20) == -0.5


@pytest.mark.parametrize("cache_tokens", [0, 101])
def test_soft_overlong_refuses_a_cache_outside_the_budget(cache_tokens: int) -> None:
    with pytest.raises(ValueError, match="need 0 < cache_tokens <= max_tokens"):
        shaping.soft_overlong_penalty(5, max_tokens=100, cache_tokens=cache_tokens)


def test_cosine_stays_at_its_end_beyond_the_budget() -> None:
    assert shaping.cosine_length(500, correct=True, max_tokens=100) == pytest.approx(0.5)
    assert shaping.cosine_length(500, correct=False, max_tokens=100) == pytest.approx(-0.5)


def test_kimi_gives_nothing_for_equal_lengths() -> None:
    assert shaping.kimi_length([7, 7], [True, False]) == [0.0, 0.0]
    with pytest.raises(ValueError, match="2 lengths and 1 verdicts"):
        shaping.kimi_length([7, 8], [True])
