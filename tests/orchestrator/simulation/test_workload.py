"""Workloads: do samples have the distribution that the parameters promise?"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from orchestrator.simulation.workload import EmpiricalWorkload, SyntheticWorkload


def sample(groups: int = 20000, answers: int = 4, **changes: Any) -> tuple[np.ndarray, np.ndarray]:
    values: dict[str, Any] = {"prompt_tokens": 5, "median_tokens": 1000, "spread": 0.7, "max_tokens": 10**6}
    return SyntheticWorkload(**(values | changes)).sample(np.random.default_rng(0), groups, answers)


class TestSyntheticWorkload:
    def test_lengths_are_lognormal(self) -> None:
        lengths, rewards = sample()
        assert lengths.shape == rewards.shape == (20000, 4)
        assert lengths.dtype == np.int64
        assert np.median(lengths) == pytest.approx(1000, rel=0.02)
        assert lengths.mean() == pytest.approx(1000 * math.exp(0.7**2 / 2), rel=0.02)
        assert np.log(lengths).std() == pytest.approx(0.7, rel=0.02)

    @pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
    def test_answers_of_a_group_are_alike_by_the_prompts_share(self, share: float) -> None:
        lengths, _ = sample(prompt_share=share, spread=1.0)
        logs = np.log(lengths)
        assert np.corrcoef(logs[:, 0], logs[:, 1])[0, 1] == pytest.approx(share, abs=0.02)

    def test_lengths_stay_within_the_limits(self) -> None:
        lengths, _ = sample(spread=3.0, max_tokens=2000, median_tokens=10)
        assert (lengths.min(), lengths.max()) == (1, 2000)

    def test_wrong_answers_may_be_longer(self) -> None:
        lengths, rewards = sample(wrong_length_factor=2.0)
        assert np.median(lengths[rewards == 0]) == pytest.approx(2 * np.median(lengths[rewards == 1]), rel=0.03)

    @pytest.mark.parametrize(("alpha", "beta"), [(1.0, 1.0), (0.5, 2.0)])
    def test_pass_rates_are_beta(self, alpha: float, beta: float) -> None:
        _, rewards = sample(pass_alpha=alpha, pass_beta=beta)
        mean = alpha / (alpha + beta)
        assert rewards.mean() == pytest.approx(mean, rel=0.02)
        # All n wrong: product of (beta + i) / (alpha + beta + i) over i < n (Beta-binomial).
        wrong = math.prod((beta + i) / (alpha + beta + i) for i in range(4))
        assert (rewards.sum(axis=1) == 0).mean() == pytest.approx(wrong, rel=0.05)

    def test_failures_have_no_reward(self) -> None:
        lengths, rewards = sample(failed_ratio=0.1)
        assert np.isnan(rewards).mean() == pytest.approx(0.1, rel=0.05)
        assert lengths.min() >= 1

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("prompt_tokens", -1),
            ("median_tokens", 0),
            ("spread", math.nan),
            ("max_tokens", 0),
            ("prompt_share", 1.1),
            ("failed_ratio", -0.1),
            ("wrong_length_factor", 0.0),
            ("pass_alpha", 0.0),
            ("pass_beta", math.inf),
        ],
    )
    def test_impossible_values_are_refused(self, field: str, value: float) -> None:
        with pytest.raises(ValueError, match=field):
            sample(**{field: value})


class TestEmpiricalWorkload:
    groups = (([1, 2, 3], [1.0, 0.0, 1.0]), ([10, 20], [0.0, math.nan]))

    def test_draws_whole_groups(self) -> None:
        lengths, rewards = EmpiricalWorkload(7, self.groups[:1] * 2).sample(np.random.default_rng(0), 50, 3)
        assert (lengths == [1, 2, 3]).all()
        assert (rewards == [1.0, 0.0, 1.0]).all()

    def test_draws_groups_equally_often(self) -> None:
        lengths, _ = EmpiricalWorkload(7, self.groups).sample(np.random.default_rng(0), 20000, 2)
        assert (lengths[:, 0] >= 10).mean() == pytest.approx(0.5, abs=0.02)

    def test_a_group_of_another_size_is_drawn_from_its_own_answers(self) -> None:
        lengths, rewards = EmpiricalWorkload(7, self.groups).sample(np.random.default_rng(0), 20000, 3)
        drawn = lengths[lengths[:, 0] >= 10]
        assert set(drawn.flat) == {10, 20}
        assert (drawn == 10).mean() == pytest.approx(0.5, abs=0.02)
        assert (np.isnan(rewards) == (lengths == 20)).all()
        assert {tuple(row) for row in lengths[lengths[:, 0] < 10]} == {(1, 2, 3)}

    @pytest.mark.parametrize(
        "groups",
        [[], [([], [])], [([1, 2], [1.0])], [([-1, 2], [1.0, 0.0])]],
        ids=["none", "empty", "uneven", "negative"],
    )
    def test_impossible_groups_are_refused(self, groups: Any) -> None:
        with pytest.raises(ValueError, match=r"group|groups"):
            EmpiricalWorkload(7, groups)
