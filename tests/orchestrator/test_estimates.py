"""Estimates: their corner values, and that they tell the truth on average."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator import estimates


@given(st.integers(1, 8).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_draws_with_a_right_answer(numbers: tuple[int, int, int]) -> None:
    samples, correct, k = numbers
    draws = list(itertools.combinations([True] * correct + [False] * (samples - correct), k))
    assert estimates.pass_at_k(samples, correct, k) == pytest.approx(sum(map(any, draws)) / len(draws))


@pytest.mark.parametrize(("samples", "correct", "k"), [(4, 2, 5), (4, 5, 1), (4, 2, 0)])
def test_pass_at_k_refuses_impossible_counts(samples: int, correct: int, k: int) -> None:
    with pytest.raises(ValueError, match="need 1 <= k <= samples"):
        estimates.pass_at_k(samples, correct, k)


@pytest.mark.parametrize(
    ("answers", "k", "expected"),
    [
        (["7", "7", "8"], 3, 1.0),
        (["8", "8", "7"], 3, 0.0),
        (["7", "8"], 2, 0.5),  # a tie, as if drawn by lot
        ([None, None, "7"], 3, 1.0),  # no answer does not vote
        ([None, None], 2, 0.0),
        (["7", "7", "8", "8", "7"], 2, 0.5),  # two blocks of two; the rest is left out
        (["7", "8", "8"], 1, 1 / 3),
    ],
)
def test_majority(answers: list[str | None], k: int, expected: float) -> None:
    right = [answer == "7" for answer in answers]
    assert estimates.majority_at_k(answers, right, k) == pytest.approx(expected)


def test_majority_refuses_more_votes_than_answers() -> None:
    with pytest.raises(ValueError, match="need 1 <= k <= answers"):
        estimates.majority_at_k(["7"], [True], 2)


def test_wilson_interval_values() -> None:
    assert estimates.wilson_interval(0, 10) == pytest.approx((0.0, 0.277533), abs=1e-6)
    assert estimates.wilson_interval(10, 10) == pytest.approx((0.722467, 1.0), abs=1e-6)
    for bound in estimates.wilson_interval(45, 100):  # by its definition: z standard errors of the bound away
        assert abs(0.45 - bound) == pytest.approx(1.959964 * math.sqrt(bound * (1 - bound) / 100), rel=1e-6)
    assert estimates.wilson_interval(0, 0) == (0.0, 1.0)
    with pytest.raises(ValueError, match="got 3 of 2"):
        estimates.wilson_interval(3, 2)


@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_interval_holds_the_rate_and_stays_in_bounds(counts: tuple[int, int]) -> None:
    low, high = estimates.wilson_interval(*counts)
    assert 0 <= low <= counts[0] / counts[1] <= high <= 1


def test_nothing_known_is_not_zero() -> None:
    assert estimates.mean_and_count([None, math.nan]) == (None, 0)
    assert math.isnan(estimates.Confusion.of([False], [False]).precision)


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [([0.3, 0.3], False), ([0.3, 0.3 + 1e-9], False), ([0.3, 0.4], True), ([1.0], False)],
)
def test_rewards_differ_by_a_tolerance(rewards: list[float], expected: bool) -> None:
    assert estimates.rewards_differ(rewards) is expected


def test_divergence_never_seen() -> None:
    assert estimates.divergence_onset([0.1, 0.2, 0.3], [0.1, 0.1, 0.2]) is None


def test_an_unknown_model_family_is_refused() -> None:
    with pytest.raises(ValueError, match="no fit for model family 'mamba'"):
        estimates.suggested_learning_rate(2048, family="mamba", lora=True)
