"""The catalogue holds the pinned names; groups of metrics are computed over finite values only."""

from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.metrics import (
    BOOKKEEPING,
    CATALOGUE,
    SECTIONS,
    Population,
    UnknownMetricError,
    bias_metrics,
    find,
    length_metrics,
    reward_metrics,
    summarise,
)
from rollout_workers.trajectory import RewardResult, Status

PINNED = [
    "reward/mean",
    "reward/<component>/mean",
    "reward/<component>/std",
    "reward/unscored_ratio",
    "reward/errored_ratio",
    "reward/timed_out_ratio",
    "group/zero_variance_ratio",
    "group/all_right",
    "group/all_wrong",
    "group/filtered",
    "group/failed",
    "group/stale",
    "staleness/stale_ratio",
    "staleness/stale_token_ratio",
    "staleness/mean",
    "staleness/max",
    "staleness/in_flight_mean",
    "staleness/in_queue_mean",
    "actor/entropy",
    "actor/ppo_kl",
    "actor/kl_ref",
    "actor/clip_ratio",
    "actor/grad_norm",
    "actor/lr",
    "actor/loss",
    "mismatch/kl",
    "mismatch/ess",
    "mismatch/ratio_mean",
    "mismatch/ratio_max",
    "response_length/mean",
    "response_length/max",
    "response_length/truncated_ratio",
    "bias/trained_to_dispatched_length",
    "bias/trained_to_dispatched_pass_rate",
    "weights/pause_s",
    "weights/total_s",
    "weights/probe_gap",
    "time_s/batch",
    "time_s/collect",
    "time_s/learn",
    "time_s/publish",
    "time_s/eval",
    "time_s/checkpoint",
    "time_s/generate",
    "time_s/score",
    "perf/generated_tokens_per_s",
    "perf/trained_tokens_per_s",
    "perf/answers_per_s",
    "eval/pass_at_1",
    "eval/<set>/pass_at_1",
    "eval/<set>/pass_at_1_low",
    "eval/<set>/pass_at_1_high",
    "eval/<set>/pass_at_k",
    "eval/<set>/maj_at_k",
    "optimizer_step",
]


@pytest.mark.parametrize("name", PINNED)
def test_pinned_name_is_in_the_catalogue(name: str) -> None:
    assert name in {metric.name for metric in CATALOGUE}


def test_every_name_is_defined_once_with_a_meaning_and_a_section() -> None:
    names = [metric.name for metric in (*BOOKKEEPING, *CATALOGUE)]
    assert len(names) == len(set(names))
    assert all(metric.meaning and metric.unit for metric in (*BOOKKEEPING, *CATALOGUE))
    assert {metric.name.split("/")[0] for metric in CATALOGUE if "/" in metric.name} == set(SECTIONS)


@pytest.mark.parametrize("metric", CATALOGUE, ids=lambda metric: metric.name)
def test_a_name_finds_its_own_entry(metric) -> None:
    concrete = metric.name
    for placeholder in ("<component>", "<metric>", "<set>", "<replica>"):
        concrete = concrete.replace(placeholder, "x1")
    assert find(concrete) == metric


def test_a_placeholder_is_one_part_of_the_path_and_at_the_end_the_rest() -> None:
    assert find("reward_metric/judge/tokens").name == "reward_metric/<metric>"
    with pytest.raises(UnknownMetricError):
        find("reward/a/b/mean")


def test_a_users_metric_may_have_any_name() -> None:
    assert find("reward_metric/two\nlines/of it").name == "reward_metric/<metric>"


def test_an_unknown_name_is_refused_with_near_names() -> None:
    with pytest.raises(UnknownMetricError, match=r"'reward/maen'.*reward/mean"):
        find("reward/maen")


def test_d09_a_mean_is_over_the_finite_values() -> None:
    summary = summarise([0.5, None, math.nan, 0.8, 0.6, 0.7])
    assert summary is not None
    assert summary.count == 4
    assert summary.mean == pytest.approx(0.65)
    assert summarise([None, math.nan, math.inf]) is None


@given(
    st.lists(st.floats(-1e6, 1e6), min_size=1),
    st.lists(st.sampled_from([None, math.nan, -math.inf])),
    st.randoms(),
)
def test_what_is_not_finite_changes_nothing(finite, rest, random) -> None:
    mixed = [*finite, *rest]
    random.shuffle(mixed)
    summary = summarise(mixed)
    assert summary is not None
    assert summary.count == len(finite)
    assert summary.max == max(finite)
    assert summary.mean == pytest.approx(statistics.fmean(finite), abs=1e-6)
    assert summary.std == pytest.approx(statistics.pstdev(finite), abs=1e-4)


def test_reward_metrics_keep_failures_apart_from_zeros() -> None:
    results = [
        RewardResult(1.0, components={"right": 1.0, "format": None}, metrics={"judge/tokens": 10}),
        RewardResult(0.0, components={"right": 0.0, "format": 0.5}, metrics={"judge/tokens": math.nan}),
        RewardResult(None, Status.ERRORED, components={"right": None}),
        RewardResult(None, Status.TIMED_OUT),
        RewardResult(None, Status.UNSCORED),
    ]
    metrics = reward_metrics(results)
    assert metrics == {
        "reward/mean": 0.5,
        "reward/std": 0.5,
        "reward/format/mean": 0.5,
        "reward/format/std": 0.0,
        "reward/right/mean": 0.5,
        "reward/right/std": 0.5,
        "reward/unscored_ratio": 0.2,
        "reward/errored_ratio": 0.2,
        "reward/timed_out_ratio": 0.2,
        "reward/unparseable_answer_ratio": 0.0,
        "reward_metric/judge/tokens": 10.0,
    }
    for name in metrics:
        find(name)


def test_f24_a_batch_of_errors_has_no_mean_reward() -> None:
    metrics = reward_metrics([RewardResult(None, Status.ERRORED)] * 3)
    assert "reward/mean" not in metrics
    assert metrics["reward/errored_ratio"] == 1.0
    assert reward_metrics([]) == {}


def test_length_metrics() -> None:
    assert length_metrics([2, 4, 6], [False, False, True]) == {
        "response_length/mean": 4.0,
        "response_length/max": 6,
        "response_length/truncated_ratio": pytest.approx(1 / 3),
    }
    assert length_metrics([], []) == {}
    with pytest.raises(ValueError, match="2 lengths and 1"):
        length_metrics([1, 2], [True])


def test_bias_is_one_when_all_that_was_scored_is_consumed() -> None:
    short, long = Population(8, 80, 8.0), Population(8, 240, 2.0)
    assert bias_metrics(short + long, short + long) == {
        "bias/trained_to_dispatched_length": 1.0,
        "bias/trained_to_dispatched_pass_rate": 1.0,
    }
    left_behind = bias_metrics(short, short + long)
    assert left_behind["bias/trained_to_dispatched_length"] == 0.5
    assert left_behind["bias/trained_to_dispatched_pass_rate"] == 1.6
    assert bias_metrics(Population(), Population()) == {}
    assert "bias/trained_to_dispatched_pass_rate" not in bias_metrics(Population(1, 5, 0), Population(1, 5, 0))
