"""Advice: the recommended setting is the one that an exhaustive search would find, with no more staleness than it needs."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest

from orchestrator.checks import validate_simulation
from orchestrator.compose import load
from orchestrator.config import Config, ConfigError
from orchestrator.simulation.advice import NEARLY, advise
from orchestrator.simulation.hardware import Layout
from orchestrator.simulation.scenario import Scenario
from orchestrator.simulation.types import Timing, Workload
from orchestrator.simulation.workload import EmpiricalWorkload

pytestmark = pytest.mark.thorough

SIZES = ("sampling.groups_per_batch=24", "sampling.answers_per_group=2")


@dataclass(frozen=True)
class Even:
    """All answers alike: generation of a batch is work_s on one engine, learning learn_s on one GPU."""

    work_s: float
    learn_s: float
    turn_s: float = 0.0

    def workload(self, answers_per_group: int) -> Workload:
        return EmpiricalWorkload(0, [([10] * answers_per_group, [1.0, 0.0])])

    def timing(self, layout: Layout) -> Timing:
        return Timing(
            decode_base_s=1e-9,
            decode_per_answer_s=self.work_s / (24 * 2 * 10),
            max_concurrent_answers=2,
            learn_s_per_token=0.0,
            learn_base_s=self.learn_s / layout.learner_gpus + (self.turn_s if layout.shared else 0.0),
            engine_speed_while_learning=0.0 if layout.shared else 1.0,
        )


def configured(*overrides: str) -> Config:
    return load(["experiment=simulation", *SIZES, *overrides], validate_simulation)


def own(rollout: int, learner: int, width: int = 1) -> Scenario:
    return Scenario(Layout(rollout, learner, width, shared=False), 1)


def test_gpus_are_split_by_the_work() -> None:
    # 8 GPUs, three times as much generation as learning: 6 + 2.
    advice = advise(configured(), Even(work_s=300, learn_s=100, turn_s=1e3), own(4, 4), most_staleness=2)
    best = advice.reports[0]
    assert (best.name, best.gpus, best.staleness) == ("recommended", "6 + 2", 1)
    assert best.summary["mean_step_s"] == pytest.approx(50, rel=0.05)
    assert "Use 6 GPUs for rollout and 2 for the learner with staleness.max=1" in advice.sentence
    assert "placement=split rollout.replicas=6 learner.ranks=2 staleness.max=1" in advice.sentence


def test_where_nothing_is_lost_by_turns_they_are_recommended() -> None:
    # Even answers leave no tail: all GPUs are busy all the time, without any staleness.
    advice = advise(configured(), Even(work_s=300, learn_s=100), own(4, 4), most_staleness=2)
    best = advice.reports[0]
    assert (best.gpus, best.staleness) == ("8 in turns", 0)
    assert "take turns on all 8 GPUs" in advice.sentence
    assert "placement=shared" in advice.sentence


def test_no_more_staleness_than_is_needed() -> None:
    advice = advise(configured(), Even(work_s=200, learn_s=200, turn_s=1e3), own(2, 2), most_staleness=8)
    best, *others = advice.reports
    shortest = min(report.summary["mean_step_s"] for report in advice.reports)
    assert best.summary["mean_step_s"] <= (1 + NEARLY) * shortest
    for report in others:
        near = report.summary["mean_step_s"] <= (1 + NEARLY) * shortest
        assert report.staleness >= best.staleness or not near


def test_others_follow_by_their_speed_and_all_are_compared_with_the_best_synchronous_one() -> None:
    advice = advise(configured(), Even(work_s=300, learn_s=100, turn_s=1e3), own(4, 4), most_staleness=1)
    times = [report.summary["mean_step_s"] for report in advice.reports[1:]]
    assert times == sorted(times)
    synchronous = min(report.summary["mean_step_s"] for report in advice.reports if report.staleness == 0)
    for report in advice.reports:
        assert report.speedup == pytest.approx(synchronous / report.summary["mean_step_s"])


def test_wide_engines_come_out_whole_and_do_not_take_turns() -> None:
    advice = advise(configured(), Even(work_s=300, learn_s=100), own(8, 8, width=4), most_staleness=1)
    for report in advice.reports:
        rollout, learner = map(int, report.gpus.split(" + "))
        assert rollout % 4 == 0
        assert rollout + learner == 16
    assert "rollout.tensor_parallel_size=4" in advice.sentence


def test_without_splits_only_the_staleness_is_searched() -> None:
    tried: list[Scenario] = []
    advice = advise(
        configured(), Even(work_s=300, learn_s=100), own(3, 5), most_staleness=2, splits=False, tried=tried.append
    )
    assert {scenario.layout for scenario in tried} == {own(3, 5).layout}
    assert sorted(report.staleness for report in advice.reports) == [0, 1, 2]


def test_too_few_gpus() -> None:
    with pytest.raises(ConfigError, match=r"simulate\.advise=true: 5 GPUs are no engine of 8 and a learner"):
        advise(configured(), Even(1, 1), own(0, 5, width=8))


def test_a_bound_between_the_usual_ones_is_tried() -> None:
    advice = advise(configured(), Even(work_s=300, learn_s=100), own(4, 4), most_staleness=3, splits=False)
    assert sorted(report.staleness for report in advice.reports) == [0, 1, 2, 3]
    assert all(math.isfinite(report.summary["mean_step_s"]) for report in advice.reports)


def test_data_that_fill_no_batch() -> None:
    equal = EmpiricalWorkload(0, [([10, 10], [1.0, 1.0])])

    class Hopeless(Even):
        def workload(self, answers_per_group: int) -> Workload:
            return equal

    with pytest.raises(ConfigError, match=r"no setting could fill its batches.*all right"):
        advise(configured("sampling.filter=true"), Hopeless(300, 100), own(4, 4), most_staleness=1)
