"""Simulated runs: closed forms, what always holds, and that the queue is driven by its protocol."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.sampling_queue import SamplingQueue
from orchestrator.sampling_types import Batch, Commands, Member, OfferAgain, OnLate, OnStarved, QueueSettings
from orchestrator.simulation import simulator
from orchestrator.simulation.simulator import simulate
from orchestrator.simulation.types import SimulationResult, SimulationSettings, Timing
from orchestrator.simulation.workload import EmpiricalWorkload, SyntheticWorkload

GROUPS, ANSWERS = 4, 2
ALIKE = EmpiricalWorkload(prompt_tokens=10, groups=[([100, 100], [1.0, 0.0])])  # every answer has 100 tokens


def make(
    *,
    steps: int = 12,
    staleness: int = 0,
    engines: int = GROUPS,
    workload: Any = ALIKE,
    seed: int = 0,
    queue: dict[str, Any] | None = None,
    **timing: Any,
) -> SimulationSettings:
    """By default an engine takes 10 s for a batch's groups, however many it has, and the learner 10 s."""
    queue_values = {
        "groups_per_batch": GROUPS,
        "answers_per_group": ANSWERS,
        "filter": True,
        "max_staleness": staleness,
    }
    timing_values = {
        "decode_base_s": 0.1,
        "decode_per_answer_s": 0.0,
        "max_concurrent_answers": 64,
        "learn_base_s": 10.0,
        "learn_s_per_token": 0.0,
    }
    return SimulationSettings(
        QueueSettings(**(queue_values | (queue or {}))),
        Timing(**(timing_values | timing)),
        workload,
        engines,
        steps,
        seed,
    )


def varied(**changes: Any) -> SyntheticWorkload:
    values: dict[str, Any] = {"prompt_tokens": 5, "median_tokens": 40, "spread": 1.0, "max_tokens": 400}
    return SyntheticWorkload(**(values | changes))


def assert_mean_step(result: SimulationResult, expected: float) -> None:
    assert result.mean_step_s == pytest.approx(expected)


class TestClosedForms:
    def test_a_synchronous_step_is_the_sum_of_its_parts(self) -> None:
        result = simulate(
            make(
                decode_per_answer_s=0.02,
                prefill_s_per_token=0.3,
                score_s=2.0,
                learn_base_s=1.0,
                learn_s_per_token=0.01,
                publish_s=4.0,
                pause_s=1.5,
                between_s=0.5,
            )
        )
        generate = 10 * 0.3 + 100 * (0.1 + 2 * 0.02)
        learn = 1.0 + 0.01 * GROUPS * ANSWERS * 110
        steps = result.steps
        assert steps.learn_s == pytest.approx(learn)
        assert steps.publish_s == pytest.approx(4.0)
        assert steps.collect_s[0] == pytest.approx(generate + 2.0)
        # The next prompts are dispatched when the version is acknowledged, not when the loop is ready for their batch.
        assert steps.collect_s[1:] == pytest.approx(generate + 2.0 - 0.5)
        assert steps.step_s[1:] == pytest.approx(generate + 2.0 + learn + 4.0)
        # The last step ends after the version's acknowledgement like any other, but nothing is dispatched in it.
        assert steps.engine_busy_ratio[1:-1] == pytest.approx(generate / steps.step_s[1:-1])
        assert result.learner_idle_share == pytest.approx(1 - learn / result.mean_step_s)

    def test_a_shared_prefix_is_learned_from_once(self) -> None:
        result = simulate(make(learner_shares_prefixes=True))
        assert result.steps.learned_tokens.tolist() == [GROUPS * (10 + 2 * 100)] * 12
        assert result.steps.trained_tokens.tolist() == [GROUPS * 2 * 100] * 12

    def test_one_step_off_is_twice_as_fast_where_both_sides_need_the_same_time(self) -> None:
        synchronous, one_off = simulate(make(steps=40)), simulate(make(steps=40, staleness=1))
        assert_mean_step(synchronous, 20.0)
        assert_mean_step(one_off, 10.0)
        assert one_off.learner_idle_share == pytest.approx(0.0)
        assert one_off.stale_ratio == one_off.staleness_mean == one_off.staleness_max == 1.0
        assert synchronous.stale_ratio == synchronous.staleness_max == 0.0

    def test_the_slower_side_sets_the_pace(self) -> None:
        slow_learner = simulate(make(steps=60, staleness=3, learn_base_s=17.0, publish_s=2.0, between_s=1.0))
        assert_mean_step(slow_learner, 20.0)
        # One engine with places for one group: the 4 groups of a batch take 4 times 10 s, and pauses come on top.
        slow_engine = simulate(
            make(steps=60, staleness=3, engines=1, max_concurrent_answers=ANSWERS, publish_s=3.0, pause_s=2.0)
        )
        assert_mean_step(slow_engine, 42.0)
        assert slow_engine.rollout_idle_share == pytest.approx(2 / 42)

    def test_taking_turns_gains_nothing(self) -> None:
        one_place = {"max_concurrent_answers": ANSWERS, "engine_speed_while_learning": 0.0}
        result = simulate(make(steps=40, staleness=1, **one_place, learner_speed_while_generating=0.5))
        assert_mean_step(result, 20.0)
        assert result.steps.learn_s == pytest.approx(10.0)  # at full speed: the engines stand still
        assert result.rollout_idle_share == pytest.approx(0.5)

    def test_engines_slowed_by_the_learner(self) -> None:
        # Every other batch is half written when the one before is learned, and needs 5 s more.
        result = simulate(make(steps=41, staleness=1, engine_speed_while_learning=0.5))
        steps = result.steps.step_s[1:-2]
        assert sorted(set(steps.round(6))) == [10.0, 15.0]
        assert steps.mean() == pytest.approx(12.5, rel=0.01)

    def test_a_learner_slowed_by_engines(self) -> None:
        # 10 s at half speed while the next batch is written, then 5 s at full speed.
        result = simulate(make(steps=40, staleness=1, learner_speed_while_generating=0.5))
        assert result.steps.learn_s[1:-2] == pytest.approx(15.0)
        assert result.steps.learn_s[-1] == pytest.approx(10.0)  # nothing is generated any more
        # In proportion: with half of the engines at work, 10 s at three quarters of the speed and 2.5 s at full speed.
        half = simulate(make(steps=40, staleness=1, engines=2 * GROUPS, learner_speed_while_generating=0.5))
        assert half.steps.learn_s[1:-2] == pytest.approx(12.5)

    def test_versions_of_answers_that_meet_a_publish(self) -> None:
        # The third batch is written from 16 s to 26 s, and version 2 comes at 22 s: 60 of its 100 tokens are version 1's.
        result = simulate(make(steps=4, staleness=1, learn_base_s=6.0))
        assert result.steps.acknowledged_s[:2] == pytest.approx([16.0, 22.0])
        assert result.steps.staleness_max.tolist() == [0, 1, 1, 1]
        assert result.steps.stale_token_ratio[:3] == pytest.approx([0.0, 1.0, 0.6])
        assert result.steps.in_flight_mean[:3] == pytest.approx([0.0, 0.0, 1.0])
        # In a pause nothing is written: the version comes 2 s later, after as many tokens.
        paused = simulate(make(steps=4, staleness=1, learn_base_s=6.0, publish_s=2.0, pause_s=2.0))
        assert paused.steps.acknowledged_s[:2] == pytest.approx([18.0, 26.0])
        assert paused.steps.stale_token_ratio[2] == pytest.approx(0.6)


class TestSummary:
    def test_leaves_out_filling_and_draining(self) -> None:
        result = simulate(make(steps=30, staleness=2))
        assert (result.warmup_steps, result.drain_steps) == (7, 2)
        assert result.measured == slice(7, 28)
        assert simulate(make(steps=1, staleness=2)).measured == slice(0, 1)
        assert result.total_s == result.steps.end_s[-1]

    def test_of_a_run_without_a_batch_is_not_a_number(self) -> None:
        result = simulate(
            make(workload=EmpiricalWorkload(10, [([5, 5], [1.0, 1.0])]), queue={"max_dispatches_per_batch": 3})
        )
        assert len(result.steps) == 0
        assert result.starved is not None
        assert "12 groups were filtered (12 all right" in result.starved
        assert all(math.isnan(value) for value in result.summary().values())
        assert np.isnan(result.histogram).all()

    def test_a_batch_is_shrunk_when_the_data_gives_no_more(self) -> None:
        workload = EmpiricalWorkload(10, [([5, 5], [1.0, 0.0]), *[([5, 5], [0.0, 0.0])] * 9])
        settings = make(workload=workload, steps=5, queue={"max_dispatches_per_batch": 2})
        result = simulate(settings)
        assert result.starved is not None or result.steps.groups.min() < GROUPS
        stopped = simulate(replace(settings, queue=replace(settings.queue, on_starved=OnStarved.STOP)))
        assert stopped.starved is not None
        assert len(stopped.steps) < 5

    def test_busy_engines_over_time(self) -> None:
        result = simulate(make(steps=2))
        assert result.trace_s.tolist() == [0.0, 10.0, 20.0, 30.0]
        assert result.trace_busy.tolist() == [GROUPS, 0, GROUPS, 0]


class WatchedQueue(SamplingQueue):
    """The real queue; it is checked at length after every event, and what happened is written down."""

    prompts: list[str]

    def __init__(self, settings: QueueSettings, version: int = 0) -> None:
        super().__init__(settings, version)
        self.prompts, self.again, self.batches = [], [], []
        watched.append(self)

    def dispatched(self, group_id: str, prompt_id: str, epoch: int) -> Commands:
        self.prompts.append(prompt_id)
        if self.again:  # prompts that are offered again come first
            assert prompt_id == self.again.pop(0)
        return self._checked(super().dispatched(group_id, prompt_id, epoch))

    def generated(self, group_id: str, missing: Sequence[int] = ()) -> Commands:
        return self._checked(super().generated(group_id, missing))

    def scored(self, group_id: str, members: Sequence[Member]) -> Commands:
        for member in members:
            assert member == Member(*member)  # which checks it
        return self._checked(super().scored(group_id, members))

    def acknowledged(self, version: int) -> Commands:
        return self._checked(super().acknowledged(version))

    def take_batch(self, *, shrink: bool = False) -> Batch | None:
        batch = super().take_batch(shrink=shrink)
        if batch is not None:
            self.batches.append(batch)
        return batch

    def _checked(self, commands: Commands) -> Commands:
        self.check()
        self.again += [command.prompt_id for command in commands if isinstance(command, OfferAgain)]
        return commands


watched: list[WatchedQueue] = []


@st.composite
def any_settings(draw: st.DrawFn) -> SimulationSettings:
    publish_s = draw(st.sampled_from([0.0, 3.0]))
    return make(
        steps=draw(st.integers(1, 12)),
        staleness=draw(st.integers(0, 4)),
        engines=draw(st.integers(1, 6)),
        seed=draw(st.integers(0, 1000)),
        workload=varied(
            wrong_length_factor=draw(st.sampled_from([0.5, 1.0, 2.0])),
            failed_ratio=draw(st.sampled_from([0.0, 0.1])),
            pass_alpha=draw(st.sampled_from([0.3, 2.0])),
        ),
        queue={
            "groups_per_batch": draw(st.integers(1, 5)),
            "answers_per_group": draw(st.integers(2, 5)),
            "filter": draw(st.booleans()),
            "min_scored_fraction": draw(st.sampled_from([0.5, 1.0])),
            "window_batches": draw(st.sampled_from([0.0, 1.0, math.inf])),
            "on_late": draw(st.sampled_from(OnLate)),
        },
        decode_per_answer_s=draw(st.sampled_from([0.0, 0.01])),
        max_concurrent_answers=draw(st.sampled_from([1, 3, 64])),
        prefill_s_per_token=draw(st.sampled_from([0.0, 0.1])),
        score_s=draw(st.sampled_from([0.0, 2.5])),
        learn_base_s=draw(st.sampled_from([0.01, 5.0])),
        learn_s_per_token=draw(st.sampled_from([0.0, 0.02])),
        publish_s=publish_s,
        pause_s=draw(st.sampled_from([0.0, publish_s / 2, publish_s])),
        between_s=draw(st.sampled_from([0.0, 1.0])),
        engine_speed_while_learning=draw(st.sampled_from([0.0, 0.4, 1.0])),
        learner_speed_while_generating=draw(st.sampled_from([0.0, 0.4, 1.0])),
    )


class TestWhatAlwaysHolds:
    @settings(max_examples=60, deadline=None)
    @given(any_settings())
    def test_the_queue_is_driven_by_its_protocol_and_all_is_counted(self, wanted: SimulationSettings) -> None:
        watched.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(simulator, "SamplingQueue", WatchedQueue)
            result = simulate(wanted)
        (queue,) = watched
        steps, counts = result.steps, queue.counts
        bound = wanted.queue.max_staleness
        if result.starved is None:
            assert len(steps) == wanted.steps
            assert counts.dispatched == steps.dispatched_groups.sum()
            assert counts.trained == steps.groups.sum()
            assert counts.filtered == steps.filtered_groups.sum()
            assert counts.failed == steps.failed_groups.sum()
            assert counts.stale == steps.stale_groups.sum()
        # Time goes on, and every part of it is there.
        moments = [steps.start_s, steps.taken_s, steps.learned_s, steps.acknowledged_s, steps.end_s]
        for before, after in itertools.pairwise(moments):
            assert (after >= before - 1e-9).all()
        assert (steps.end_s[:-1] == steps.start_s[1:]).all()
        assert (steps.engine_busy_ratio <= 1 + 1e-9).all()
        assert (steps.late_s <= steps.collect_s + 1e-9).all()
        # The bound is kept, and the numbers are the batch's own.
        assert (steps.staleness_max <= bound).all()
        assert (steps.histogram.sum(axis=1) == steps.answers).all()
        for index, batch in enumerate(queue.batches[: len(steps)]):
            assert batch.version == index
            assert batch.staleness().metrics()["staleness/mean"] == steps.staleness_mean[index]
        if bound == 0:
            assert not steps.stale_ratio.any()
        # A prompt comes twice at most, after it was stale.
        assert sum(times - 1 for times in Counter(queue.prompts).values()) <= counts.stale
        assert max(Counter(queue.prompts).values()) <= 2

    @settings(max_examples=20, deadline=None)
    @given(any_settings())
    def test_the_same_settings_give_the_same_result(self, wanted: SimulationSettings) -> None:
        first, second = simulate(wanted), simulate(wanted)
        for field in fields(first.steps):
            assert np.array_equal(getattr(first.steps, field.name), getattr(second.steps, field.name))
        assert np.array_equal(first.trace_s, second.trace_s)

    def test_another_seed_gives_another_run(self) -> None:
        first, second = simulate(make(workload=varied())), simulate(make(workload=varied(), seed=1))
        assert first.total_s != second.total_s

    @pytest.mark.parametrize("staleness", [0, 1, 4])
    def test_where_nothing_is_set_aside_all_that_is_dispatched_is_trained(self, staleness: int) -> None:
        queue = {"filter": False, "window_batches": 0.0}
        result = simulate(make(steps=15, staleness=staleness, workload=varied(), queue=queue))
        steps = result.steps
        assert steps.dispatched_groups.sum() == steps.groups.sum() == 15 * GROUPS
        assert steps.dispatched_tokens.sum() == steps.generated_tokens.sum() == steps.trained_tokens.sum()
        assert result.length_bias == 1.0
        assert result.wasted_token_share == 0.0

    def test_late_groups_are_waited_for_or_wasted(self) -> None:
        queue = {"filter": False, "window_batches": math.inf}
        many = {"steps": 150, "staleness": 1, "engines": 8, "workload": varied(prompt_share=1.0), "learn_base_s": 2.0}
        waits = simulate(make(**many, queue=queue))
        drops = simulate(make(**many, queue=queue | {"on_late": OnLate.DROP}))
        assert drops.late_share == 0.0
        assert drops.stale_share > 0.01
        assert drops.wasted_token_share > drops.stale_share  # what is lost is long
        assert drops.length_bias < 0.98
        assert drops.trained_to_dispatched_length < 0.98
        assert waits.late_share > 0.01
        assert waits.stale_share == waits.wasted_token_share == 0.0
        assert waits.trained_to_dispatched_length == pytest.approx(1.0, abs=0.02)
        assert waits.mean_step_s > drops.mean_step_s

    def test_answers_without_a_reward_are_in_no_loss(self) -> None:
        workload = EmpiricalWorkload(10, [([100, 100, 50], [1.0, 0.0, math.nan])])
        queue = {"answers_per_group": 3, "min_scored_fraction": 0.5}
        result = simulate(make(workload=workload, queue=queue))
        assert result.steps.answers.tolist() == [GROUPS * 2] * 12
        assert result.wasted_token_share == pytest.approx(0.2)
        failing = simulate(make(workload=workload, queue=queue | {"min_scored_fraction": 1.0}))
        assert failing.starved is not None
        assert "failed" in failing.starved


class TestSettings:
    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("decode_base_s", -1.0),
            ("score_s", math.inf),
            ("learn_base_s", math.nan),
            ("max_concurrent_answers", 0),
            ("pause_s", 1.0),
            ("engine_speed_while_learning", 1.5),
        ],
    )
    def test_impossible_timing_is_refused(self, field: str, value: float) -> None:
        with pytest.raises(ValueError, match=field):
            make(**{field: value})

    def test_a_decoding_step_takes_time(self) -> None:
        with pytest.raises(ValueError, match="must take time"):
            make(decode_base_s=0.0)

    @pytest.mark.parametrize("field", ["engines", "steps"])
    def test_there_is_something_to_simulate(self, field: str) -> None:
        with pytest.raises(ValueError, match=field):
            make(**{field: 0})
