"""Staleness arithmetic. Ids such as f33 refer to the reported-bug cases."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.staleness import AdaptiveBound, StalenessPolicy, batch_staleness, in_flight, in_queue, staleness

SPANS = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 50)), min_size=1, max_size=5)


def test_capacity_is_one_batch_and_one_more_per_version_of_lag() -> None:
    assert StalenessPolicy(0, 8).capacity == 8
    assert StalenessPolicy(2, 8).capacity == 24
    assert StalenessPolicy(1, 8).room(untrained=13) == 3
    assert StalenessPolicy(1, 8).room(untrained=20) == 0


def test_f33_no_exact_version_match_is_needed() -> None:
    policy = StalenessPolicy(max_staleness=2, groups_per_batch=1)
    assert policy.oldest_trainable(5) == 3


def test_staleness_of_a_trajectory_that_spans_versions() -> None:
    assert staleness(7, [3, 4, 5]) == 4
    assert in_flight([3, 4, 5]) == 2
    assert in_queue(7, [3, 4, 5]) == 2


def test_a_version_the_learner_has_not_reached_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"version 6.*learner is at 5"):
        staleness(5, [4, 6])
    with pytest.raises(ValueError, match=r"version 6.*learner is at 5"):
        batch_staleness(5, [[(6, 10)]])


def test_a_span_of_no_tokens_has_no_staleness() -> None:
    for spans in ([(3, 0)], [(2, 1), (3, 0)]):
        with pytest.raises(ValueError, match="no tokens"):
            batch_staleness(3, [spans])


def test_nothing_sampled_has_no_staleness() -> None:
    with pytest.raises(ValueError, match="without sampled tokens"):
        staleness(5, [])
    with pytest.raises(ValueError, match="without trajectories"):
        batch_staleness(5, [])


@pytest.mark.parametrize(("maximum", "groups", "key"), [(-1, 8, "staleness.max"), (0, 0, "groups_per_batch")])
def test_impossible_policies_are_refused(maximum: int, groups: int, key: str) -> None:
    with pytest.raises(ValueError, match=key):
        StalenessPolicy(maximum, groups)


def test_batch_summary_by_hand() -> None:
    summary = batch_staleness(5, [[(5, 10)], [(4, 6), (5, 4)], [(3, 20)]])
    assert (summary.trajectories, summary.tokens) == (3, 40)
    assert summary.metrics() == pytest.approx(
        {
            "staleness/stale_ratio": 2 / 3,
            "staleness/stale_token_ratio": 26 / 40,
            "staleness/mean": 1.0,
            "staleness/max": 2.0,
            "staleness/in_flight_mean": 1 / 3,
            "staleness/in_queue_mean": 2 / 3,
            "staleness/share/0": 1 / 3,
            "staleness/share/1": 1 / 3,
            "staleness/share/2": 1 / 3,
        }
    )
    assert summary.histogram == {0: 1, 1: 1, 2: 1}


@given(learner_version=st.integers(9, 12), trajectories=st.lists(SPANS, min_size=1, max_size=6))
def test_summary_agrees_with_the_definition(learner_version: int, trajectories: list[list[tuple[int, int]]]) -> None:
    summary = batch_staleness(learner_version, trajectories)
    lags = [staleness(learner_version, [version for version, _ in spans]) for spans in trajectories]
    assert summary.max == max(lags)
    assert summary.mean == pytest.approx(sum(lags) / len(lags))
    assert summary.mean == pytest.approx(summary.in_flight_mean + summary.in_queue_mean)
    assert summary.stale_ratio == pytest.approx(sum(lag > 0 for lag in lags) / len(lags))
    assert sum(summary.histogram.values()) == len(lags)
    assert set(lags) == set(summary.histogram)
    assert 0 <= summary.stale_token_ratio <= 1


@given(
    maximum=st.integers(0, 5),
    learner_version=st.integers(0, 20),
    lag=st.integers(0, 20),
    untrained=st.integers(0, 99),
)
def test_the_bound_and_its_expiry_agree(maximum: int, learner_version: int, lag: int, untrained: int) -> None:
    policy = StalenessPolicy(maximum, groups_per_batch=4)
    oldest = learner_version - lag
    assert (oldest >= policy.oldest_trainable(learner_version)) == (lag <= maximum)
    assert policy.oldest_trainable(policy.expires(oldest) - 1) <= oldest
    assert policy.oldest_trainable(policy.expires(oldest)) > oldest
    assert 0 <= policy.room(untrained) <= policy.capacity


# The adaptive bound


def adaptive(max_staleness: int = 8, patience: int = 2) -> AdaptiveBound:
    return AdaptiveBound(max_staleness, min_ess=0.5, max_kl=0.1, patience=patience)


def test_the_bound_halves_on_bad_batches_and_grows_by_one_after_good_ones() -> None:
    bound = adaptive()
    assert [bound.observe(ess, kl) for ess, kl in ((0.4, 0.0), (0.9, 0.2))] == [4, 2]
    assert [bound.observe(0.5, 0.1) for _ in range(5)] == [2, 3, 3, 4, 4]
    bound.observe(0.1, 0.0)  # a bad batch also ends the row of good ones
    assert [bound.observe(0.9, 0.0) for _ in range(2)] == [2, 3]


def test_a_figure_that_is_not_finite_tightens() -> None:
    assert adaptive().observe(math.nan, 0.0) == 4
    assert adaptive().observe(1.0, math.inf) == 4


def test_the_bound_goes_on_from_its_state() -> None:
    bound = adaptive()
    for ess in (0.1, 0.9):
        bound.observe(ess, 0.0)
    state = json.loads(json.dumps(bound.state()))
    again, smaller = adaptive(), adaptive(max_staleness=3)
    again.restore(state)
    smaller.restore(state)
    assert (again.versions, smaller.versions) == (4, 3)
    assert again.observe(0.9, 0.0) == 5


@given(figures=st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1))), max_staleness=st.integers(0, 9))
def test_the_bound_stays_within_its_limits(figures: list[tuple[float, float]], max_staleness: int) -> None:
    bound = adaptive(max_staleness)
    assert all(0 <= bound.observe(ess, kl) <= max_staleness for ess, kl in figures)
