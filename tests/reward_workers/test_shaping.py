"""Shaping: corner lengths of the formulas, and each as a reward function of a configuration.

The formulas against the oracles: tests/learner/test_oracles.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_workers import shaping
from reward_workers.reward import RewardFunction, RewardFunctionError, RewardResult, RewardSet, Status
from reward_workers.worker import RewardWorker
from rollout_workers.trajectory import Trajectory, VersionSpan


def trajectory(
    ids: Sequence[int], mask: Sequence[bool] | None = None, messages: Any = (), index: int = 0, turns: int = 1
) -> Trajectory:
    sampled = np.ones(len(ids), dtype=bool) if mask is None else np.array(mask)
    spans, start = [], 0
    for place in range(1, len(sampled) + 1):
        if place == len(sampled) or sampled[place] != sampled[start]:
            spans += [VersionSpan(start, place, 0)] if sampled[start] else []
            start = place
    return Trajectory(
        group_id="g",
        index=index,
        prompt_id="p",
        messages=messages,
        token_ids=np.array(ids, dtype=np.int32),
        response_mask=sampled,
        behaviour_logprobs=np.zeros(len(ids), dtype=np.float32),
        version_spans=tuple(spans),
        finish_reason="stop",
        turns=turns,
    )


def refused(function: Any, **options: Any) -> str:
    """Why a configuration with these options does not start."""
    with pytest.raises(RewardFunctionError) as error:
        RewardFunction("length", function, options=options, needs=None).check_row({})
    return str(error.value)


class TestSoftOverlong:
    def test_counts_the_tokens_the_policy_sampled(self) -> None:
        answer = trajectory([0] * 120, [False] * 30 + [True] * 90)
        assert shaping.soft_overlong(answer, max_tokens=100, cache_tokens=20) == -0.5

    @pytest.mark.parametrize("cache_tokens", [0, 101])
    def test_refuses_a_cache_outside_the_budget(self, cache_tokens: int) -> None:
        with pytest.raises(ValueError, match="need 0 < cache_tokens <= max_tokens"):
            shaping.soft_overlong_penalty(5, max_tokens=100, cache_tokens=cache_tokens)
        assert "need 0 < cache_tokens" in refused(shaping.soft_overlong, max_tokens=100, cache_tokens=cache_tokens)


class TestCosine:
    def test_stays_at_its_end_beyond_the_budget(self) -> None:
        assert shaping.cosine_length(500, correct=True, max_tokens=100) == pytest.approx(0.5)
        assert shaping.cosine_length(500, correct=False, max_tokens=100) == pytest.approx(-0.5)

    def test_right_is_what_the_needed_function_says(self) -> None:
        def reward(value: float | None, length: int, **options: Any) -> float | None:
            status = Status.UNSCORED if value is None else Status.SCORED
            return shaping.cosine(trajectory([0] * length), RewardResult(value, status), max_tokens=100, **options)

        assert reward(1.0, 0) == 1.0
        assert reward(1.0, 100) == pytest.approx(0.5)
        assert reward(0.9, 0) == -1.0
        assert reward(0.9, 0, threshold=0.5) == 1.0
        assert reward(1.0, 50, correct_range=[0.0, 0.2]) == pytest.approx(0.1)
        assert reward(None, 50) is None

    def test_options_that_cannot_be(self) -> None:
        assert "max_tokens > 0" in refused(shaping.cosine, max_tokens=0)
        assert "a range is" in refused(shaping.cosine, max_tokens=9, wrong_range=[1.0])


class TestKimi:
    def test_nothing_for_equal_lengths(self) -> None:
        assert shaping.kimi_length([7, 7], [True, False]) == [0.0, 0.0]
        assert shaping.kimi_length([], []) == []
        with pytest.raises(ValueError, match="2 lengths and 1 verdicts"):
            shaping.kimi_length([7, 8], [True])

    def test_members_without_a_verdict_count_for_nobody(self) -> None:
        members = [trajectory([0] * length) for length in (100, 9000, 200, 300)]
        verdicts = [RewardResult(1.0), RewardResult(None, Status.ERRORED), RewardResult(0.0), RewardResult(1.0)]
        assert shaping.kimi(members, verdicts) == [0.5, None, 0.0, -0.5]
        assert shaping.kimi(members, verdicts, threshold=0.0) == [0.5, None, 0.0, -0.5]


class TestRepetition:
    @pytest.mark.parametrize(
        ("ids", "share"),
        [([1, 2, 3, 4], 0.0), ([7] * 11, 0.9), ([1, 2, 1, 2, 1, 2], 3 / 5), ([1], 0.0), ([], 0.0)],
    )
    def test_share_of_repeated_pairs(self, ids: list[int], share: float) -> None:
        assert shaping.repetition(trajectory(ids), ngram_tokens=2) == pytest.approx(-share)

    def test_only_what_the_policy_sampled_in_one_piece(self) -> None:
        ids, mask = [5, 6, 9, 9, 9, 9, 5, 6, 9], [True] * 2 + [False] * 4 + [True] * 3
        assert shaping.repetition(trajectory(ids, mask), ngram_tokens=2) == pytest.approx(-1 / 3)  # 56 | 56 69

    def test_n_grams_have_a_length(self) -> None:
        assert "need ngram_tokens > 0" in refused(shaping.repetition, ngram_tokens=0)

    @given(st.lists(st.integers(0, 3), max_size=40), st.integers(1, 5))
    def test_between_nothing_and_all(self, ids: list[int], ngram_tokens: int) -> None:
        share = shaping.repeated_share([ids], ngram_tokens)
        assert 0 <= share < 1
        distinct = {tuple(ids[i : i + ngram_tokens]) for i in range(len(ids) - ngram_tokens + 1)}
        assert share == 0 or share == pytest.approx(1 - len(distinct) / (len(ids) - ngram_tokens + 1))


class TestCosts:
    CALL: dict = {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}, {"id": "2"}]}  # noqa: RUF012
    PROMPT = ({"role": "user", "content": "?"},)

    def test_tool_calls_beyond_the_free_ones(self) -> None:
        answers = [{"role": "tool", "content": "x"}] * 3
        asked = trajectory([], messages=(*self.PROMPT, self.CALL))
        answered = trajectory([], messages=(*self.PROMPT, {"role": "assistant", "content": "<call>"}, *answers))
        assert shaping.tool_cost(asked, each=0.1) == pytest.approx(-0.2)
        assert shaping.tool_cost(asked, each=0.1, free=1) == pytest.approx(-0.1)
        assert shaping.tool_cost(asked, each=0.1, free=5) == 0.0
        assert shaping.tool_cost(answered, each=0.1) == pytest.approx(-0.3)
        assert shaping.tool_cost(answered, each=10) == -1.0
        assert shaping.tool_cost(trajectory([], messages=self.PROMPT), each=10) == 0.0

    def test_turns_beyond_the_free_ones(self) -> None:
        assert shaping.turn_cost(trajectory([], turns=1), each=0.1) == 0.0
        assert shaping.turn_cost(trajectory([], turns=4), each=0.1) == pytest.approx(-0.3)
        assert shaping.turn_cost(trajectory([], turns=4), each=0.1, free=3, most=0.05) == -0.05

    def test_prices_are_no_gifts(self) -> None:
        assert "at least 0" in refused(shaping.tool_cost, each=-0.1)
        assert "at least 0" in refused(shaping.turn_cost, each=0.1, most=-1)


class TestOverCharacters:
    def test_beyond_the_limit(self) -> None:
        lengths = (0, 200, 201, 300, 400, 9000)
        penalties = [shaping.over_characters("x" * length, max_characters=200) for length in lengths]
        assert penalties == [0.0, 0.0, -0.005, -0.5, -1.0, -1.0]

    def test_a_limit_is_above_nothing(self) -> None:
        assert "max_characters > 0" in refused(shaping.over_characters, max_characters=0)


def test_all_of_them_in_one_run() -> None:
    def right(completion: str) -> float:
        return float(completion == "x")

    def shaped(name: str, needs: str | None = None, **options: Any) -> RewardFunction:
        return RewardFunction(name, f"reward_workers.shaping.{name}", 0.1, options, needs=needs)

    rewards = RewardSet(
        [
            RewardFunction("right", right),
            shaped("soft_overlong", max_tokens=4, cache_tokens=2),
            shaped("cosine", needs="right", max_tokens=4),
            shaped("kimi", needs="right"),
            shaped("repetition", ngram_tokens=1),
            shaped("tool_cost", each=0.1),
            shaped("turn_cost", each=0.1),
            shaped("over_characters", max_characters=1),
        ]
    )
    rewards.check_row({})
    members = [
        trajectory(
            ids, messages=[{"role": "user", "content": "?"}, {"role": "assistant", "content": text}], index=index
        )
        for index, (ids, text) in enumerate([([1, 2], "x"), ([1, 1, 1, 1], "yy")])
    ]
    with RewardWorker(rewards, retries=0) as worker:
        first, second = worker.score_group(members, {})
    assert dict(first.components) == pytest.approx(
        {
            "right": 1.0,
            "soft_overlong": 0.0,
            "cosine": 0.75,
            "kimi": 0.5,
            "repetition": 0.0,
            "tool_cost": 0.0,
            "turn_cost": 0.0,
            "over_characters": 0.0,
        }
    )
    assert dict(second.components) == pytest.approx(
        {
            "right": 0.0,
            "soft_overlong": -1.0,
            "cosine": -0.5,
            "kimi": -0.5,
            "repetition": -0.75,
            "tool_cost": 0.0,
            "turn_cost": 0.0,
            "over_characters": -1.0,
        }
    )
