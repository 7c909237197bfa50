"""The sampling queue: examples for each rule, and random event histories for its invariants.

Ids such as f34 refer to the reported-bug cases.
"""

from __future__ import annotations

import json
import math
import pickle
import random
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from orchestrator.sampling_queue import QueueError, SamplingQueue
from orchestrator.sampling_types import (
    Batch,
    Commands,
    Done,
    Member,
    OfferAgain,
    OnLate,
    OnStarved,
    QueueSettings,
    Resample,
    Stage,
)
from rollout_workers.trajectory import RewardResult, Status, Trajectory, VersionSpan


def make_queue(version: int = 0, **changes: Any) -> SamplingQueue:
    values: dict[str, Any] = {"groups_per_batch": 2, "answers_per_group": 4, "filter": True}
    return SamplingQueue(QueueSettings(**(values | changes)), version)


def answers(rewards: Sequence[float | None], version: int = 0, versions: list[int] | None = None) -> list[Member]:
    """Members of ten tokens each; None is an errored one."""
    return [
        Member(index, Status.ERRORED)
        if reward is None
        else Member(index, Status.SCORED, reward, reward, ((versions[index] if versions else version, 10),), 10)
        for index, reward in enumerate(rewards)
    ]


GOOD: list[float | None] = [1.0, 0.0, 1.0, 0.0]
RIGHT: list[float | None] = [1.0] * 4
WRONG: list[float | None] = [0.0] * 4


def finish(queue: SamplingQueue, group: str, rewards: list[float | None] = GOOD, **kwargs: Any) -> Commands:
    """Dispatch, if it isn't yet, generate and score one group; the group's id is its prompt's too."""
    if all(group != known for known, _, _ in queue.oldest(1000)):
        queue.dispatched(group, group, 0)
    queue.generated(group)
    return queue.scored(group, answers(rewards, **({"version": queue.version} | kwargs)))


def taken(batch: Batch | None) -> list[str]:
    assert batch is not None
    return [group.group_id for group in batch.groups]


# Life of a group


def test_a_batch_from_dispatch_to_trained() -> None:
    queue = make_queue()
    assert queue.room() == 2
    assert finish(queue, "a") == ()
    assert queue.take_batch() is None
    finish(queue, "b")
    batch = queue.take_batch()
    assert taken(batch) == ["a", "b"]
    assert batch is not None
    assert batch.version == 0
    assert not batch.shrunk
    assert batch.groups[0].trainable == (0, 1, 2, 3)
    assert queue.counts.training == 2
    assert queue.acknowledged(1) == (Done("a", "a", 0, Stage.TRAINED), Done("b", "b", 0, Stage.TRAINED))
    assert (queue.counts.trained, queue.version) == (2, 1)
    assert "a" not in [group for group, _, _ in queue.oldest()]


def test_a_parked_group_keeps_its_place() -> None:
    queue = make_queue()
    queue.dispatched("a", "a", 0)
    queue.parked("a")
    assert (queue.counts.parked, queue.room()) == (1, 1)
    with pytest.raises(QueueError, match="a is parked"):
        queue.generated("a")
    queue.resumed("a")
    assert finish(queue, "a") == ()
    assert queue.counts.ready == 1


def test_events_that_cannot_follow_are_errors() -> None:
    queue = make_queue()
    queue.dispatched("a", "p", 0)
    with pytest.raises(QueueError, match="dispatched twice"):
        queue.dispatched("a", "p", 0)
    with pytest.raises(QueueError, match="a is generating"):
        queue.scored("a", answers(GOOD))
    with pytest.raises(QueueError, match="unknown or finished"):
        queue.generated("b")
    queue.dispatched("b", "q", 0)
    with pytest.raises(QueueError, match="beyond the room"):
        queue.dispatched("c", "r", 0)
    queue.generated("a")
    with pytest.raises(QueueError, match=r"members 0 to 3, got \[0, 1, 2\]"):
        queue.scored("a", answers(GOOD)[:3])
    with pytest.raises(QueueError, match="version 0 was acknowledged"):
        queue.acknowledged(0)
    queue.check()
    assert queue.oldest() == (("a", "p", Stage.SCORING), ("b", "q", Stage.GENERATING))


# Admission


def test_a_batch_counts_as_untrained_until_its_version_is_acknowledged() -> None:
    queue = make_queue(max_staleness=0)
    finish(queue, "a")
    finish(queue, "b")
    queue.take_batch()
    assert queue.room() == 0
    queue.acknowledged(1)
    assert queue.room() == 2


def test_one_step_off_runs_one_batch_ahead() -> None:
    queue = make_queue(max_staleness=1)
    assert queue.room() == 4
    for group in "abcd":
        finish(queue, group)
    assert taken(queue.take_batch()) == ["a", "b"]
    assert (queue.room(), queue.take_batch()) == (0, None)
    queue.acknowledged(1)
    batch = queue.take_batch()
    assert taken(batch) == ["c", "d"]
    assert batch is not None
    assert batch.staleness().metrics()["staleness/stale_ratio"] == 1.0
    assert batch.staleness().in_queue_mean == 1.0


def test_a_shrunk_batch_in_training_leaves_no_room_for_groups_that_would_be_too_old() -> None:
    queue = make_queue(max_staleness=0)
    finish(queue, "a")
    queue.prompts_exhausted()
    assert taken(queue.take_batch(shrink=True)) == ["a"]
    with pytest.raises(QueueError, match="beyond the room"):
        queue.dispatched("b", "b", 0)


@pytest.mark.parametrize("rewards", [RIGHT, WRONG, [None, 1.0, 0.0, 1.0]])
def test_a_group_set_aside_makes_room_for_exactly_one_prompt(rewards: list[float | None]) -> None:
    queue = make_queue()
    queue.dispatched("a", "a", 0)
    queue.dispatched("b", "b", 0)
    assert queue.room() == 0
    finish(queue, "a", rewards)
    assert queue.room() == 1


# Dynamic sampling


def test_f02_a_batch_is_refilled_before_it_is_trained() -> None:
    queue = make_queue(groups_per_batch=8)
    for group in range(8):
        finish(queue, str(group), GOOD if group < 3 else WRONG)
    assert queue.take_batch() is None
    assert queue.room() == 5
    for group in range(8, 13):
        finish(queue, str(group))
    assert len(taken(queue.take_batch())) == 8


def test_filtered_groups_are_counted_right_or_wrong() -> None:
    queue = make_queue(groups_per_batch=1)
    assert finish(queue, "a", RIGHT) == (Done("a", "a", 0, Stage.FILTERED, "rewards do not differ"),)
    finish(queue, "b", WRONG)
    finish(queue, "c")
    batch = queue.take_batch()
    assert batch is not None
    tally = batch.tally
    assert (tally.judged, tally.zero_variance, tally.filtered) == (3, 2, 2)
    assert (tally.all_right, tally.all_wrong) == (1, 1)
    queue.acknowledged(1)
    finish(queue, "d")
    following = queue.take_batch()
    assert following is not None
    assert (following.tally.judged, following.tally.filtered) == (1, 0)
    assert queue.tally.judged == 4


def test_the_filter_uses_a_tolerance() -> None:
    nearly: list[float | None] = [0.1 + 0.2, 0.3, 0.3, 0.3]
    queue = make_queue(groups_per_batch=1)
    finish(queue, "a", nearly)
    assert queue.counts.filtered == 1
    exact = make_queue(groups_per_batch=1, filter_tolerance=0.0)
    finish(exact, "a", nearly)
    assert exact.counts.ready == 1


@pytest.mark.parametrize(
    ("filter_values", "rewards", "kept"),
    [
        ([0.0, 0.0], [0.1, 0.2], False),  # a length term alone does not keep an all-wrong group
        ([0.0, 1.0], [0.5, 0.5], False),  # the total must differ too
        ([0.0, 1.0], [0.1, 1.2], True),
        ([None, None], [0.1, 1.2], True),  # nobody has the component: the total stands in
        ([None, 1.0], [0.1, 1.2], False),
    ],
)
def test_filter_value_and_total_must_both_differ(
    filter_values: list[float | None], rewards: list[float], kept: bool
) -> None:
    queue = make_queue(groups_per_batch=1, answers_per_group=2)
    queue.dispatched("a", "a", 0)
    queue.generated("a")
    pairs = enumerate(zip(filter_values, rewards, strict=True))
    queue.scored("a", [Member(i, Status.SCORED, total, value, ((0, 5),), 5) for i, (value, total) in pairs])
    assert (queue.counts.ready, queue.counts.filtered) == ((1, 0) if kept else (0, 1))


def test_without_the_filter_equal_groups_train_and_are_still_counted() -> None:
    queue = make_queue(groups_per_batch=1, filter=False)
    finish(queue, "a", WRONG)
    batch = queue.take_batch()
    assert taken(batch) == ["a"]
    assert batch is not None
    assert (batch.tally.zero_variance, batch.tally.all_wrong, batch.tally.filtered) == (1, 1, 0)


@pytest.mark.parametrize(
    ("changes", "counted"),
    [
        ({"pass_rate_band": (0.2, 0.8)}, "out_of_band"),
        ({"keep": lambda members: sum(member.reward for member in members) > 1}, "not_kept"),
    ],
)
def test_other_filters_set_groups_aside_and_are_counted_apart(changes: dict[str, Any], counted: str) -> None:
    queue = make_queue(groups_per_batch=1, answers_per_group=10, **changes)
    finish(queue, "a", [1.0] + [0.0] * 9)
    assert queue.counts.filtered == 1
    assert (getattr(queue.tally, counted), queue.tally.zero_variance) == (1, 0)
    assert queue.room() == 1
    finish(queue, "b", [1.0, 1.0] + [0.0] * 8)  # the ends of the band belong to it
    batch = queue.take_batch()
    assert taken(batch) == ["b"]
    assert batch is not None
    assert (batch.tally.filtered, getattr(batch.tally, counted)) == (1, 1)


def test_a_band_no_group_meets_is_named_when_the_data_run_dry() -> None:
    queue = make_queue(pass_rate_band=(0.9, 0.95), max_dispatches_per_batch=2)
    for group in "abcd":
        finish(queue, group)
    assert "4 groups were filtered (0 all right, 0 all wrong, 4 by other filters)" in str(queue.starvation())
    assert "sampling.pass_rate_band" in str(queue.starvation())


def test_a_filter_sees_scored_members_only() -> None:
    seen: list[int] = []
    queue = make_queue(
        min_scored_fraction=0.5, keep=lambda members: seen.extend(member.index for member in members) or True
    )
    finish(queue, "a", [1.0, None, 0.0, None])
    assert seen == [0, 2]


@pytest.mark.parametrize(
    ("rewards", "useless"),
    [
        ([0.0, 0.0], True),
        ([1.0, 1.0, 1.0], True),
        ([0.0], False),  # less than half of the group says little
        ([0.0, 1.0], False),
        ([None, 0.0], False),
    ],
)
def test_a_group_whose_answers_in_time_are_equal_is_hardly_useful(rewards: list[float | None], useless: bool) -> None:
    assert make_queue().hardly_useful(answers(rewards)) == useless
    assert not make_queue(filter=False).hardly_useful(answers(rewards))


def test_a_parked_group_may_be_stopped_early() -> None:
    queue = make_queue()
    queue.dispatched("a", "p", 0)
    with pytest.raises(QueueError, match="a is generating"):
        queue.stopped("a")
    queue.parked("a")
    assert queue.stopped("a") == (
        Done("a", "p", 0, Stage.FILTERED, "stopped early: the answers in time do not differ"),
    )
    assert (queue.tally.stopped_early, queue.tally.filtered, queue.room()) == (1, 1, 2)


def test_run_ahead_tightens_and_loosens_admission_alone() -> None:
    queue = make_queue(max_staleness=2)
    for group in "abcd":
        finish(queue, group)
    queue.run_ahead(0)
    assert queue.room() == 0
    assert taken(queue.take_batch()) == ["a", "b"]
    queue.acknowledged(1)
    assert queue.counts.ready == 2  # nothing is thrown away
    assert queue.room() == 0
    assert taken(queue.take_batch()) == ["c", "d"]
    queue.acknowledged(2)
    assert queue.room() == 2
    queue.run_ahead(2)
    assert queue.room() == 6
    with pytest.raises(QueueError, match="0 to 2 versions"):
        queue.run_ahead(3)


def test_surplus_groups_wait_for_the_next_batch() -> None:
    queue = make_queue(max_staleness=1)
    for group in "abc":
        finish(queue, group)
    assert taken(queue.take_batch()) == ["a", "b"]
    queue.acknowledged(1)
    finish(queue, "d")
    assert taken(queue.take_batch()) == ["c", "d"]


# Failures are not zeros


def test_members_that_were_not_generated_are_resampled_alone_then_unscored() -> None:
    queue = make_queue(groups_per_batch=1, member_retries=2)
    queue.dispatched("a", "a", 0)
    assert queue.generated("a", missing=[1, 3]) == (Resample("a", (1, 3)),)
    assert queue.generated("a", missing=[3]) == (Resample("a", (3,)),)
    assert queue.counts.generating == 1
    assert queue.generated("a", missing=[3]) == ()
    assert queue.counts.scoring == 1
    (done,) = queue.scored("a", answers([1.0, 0.0, 0.0, None]))
    assert isinstance(done, Done)
    assert done.outcome is Stage.FAILED
    assert "4 scored members with tokens are needed, got 1 errored, 3 scored" in done.reason
    assert queue.tally.resampled_members == 3


def test_e12_only_the_last_attempt_of_a_member_counts() -> None:
    queue = make_queue(groups_per_batch=1, member_retries=1)
    queue.dispatched("a", "a", 0)
    assert queue.generated("a", missing=[1]) == (Resample("a", (1,)),)
    assert queue.generated("a") == ()
    members = answers(GOOD)
    again = Member(1, Status.SCORED, 0.0, 0.0, ((0, 4),), 4)
    queue.scored("a", [members[0], again, *members[2:]])
    batch = queue.take_batch()
    assert batch is not None
    assert batch.groups[0].members[1].response_length == 4
    assert batch.staleness().tokens == 34


@pytest.mark.parametrize("status", [Status.UNSCORED, Status.UNPARSEABLE_ANSWER, Status.ERRORED, Status.TIMED_OUT])
def test_an_answer_that_could_not_be_judged_is_not_sampled_anew(status: Status) -> None:
    """A verifier may fail for some answers more than for others: drawing until it likes one would favour the rest."""
    queue = make_queue(member_retries=3)
    queue.dispatched("a", "a", 0)
    queue.generated("a")
    (done,) = queue.scored("a", [*answers(GOOD)[:3], Member(3, status, None, None, ((0, 3),), 3)])
    assert isinstance(done, Done)
    assert done.outcome is Stage.FAILED


def test_a_group_trains_with_the_configured_share_of_scored_members() -> None:
    queue = make_queue(groups_per_batch=1, min_scored_fraction=0.75)
    finish(queue, "a", [1.0, None, 0.0, 1.0])
    batch = queue.take_batch()
    assert batch is not None
    assert batch.groups[0].trainable == (0, 2, 3)
    assert batch.groups[0].excluded == ()
    assert len(batch.groups[0].members) == 4


def test_f24_a_scorer_that_always_fails_never_gives_zeros_and_says_so() -> None:
    queue = make_queue(max_dispatches_per_batch=2, on_starved=OnStarved.ERROR)
    for group in "abcd":
        finish(queue, group, [None] * 4)
    starvation = queue.starvation()
    assert starvation is not None
    assert starvation.action is OnStarved.ERROR
    assert "4 failed" in str(starvation)
    assert "Most groups failed" in str(starvation)


@pytest.mark.parametrize("stage", ["generating", "scoring", "parked", "ready", "training"])
def test_a_lost_group_is_failed_at_any_stage(stage: str) -> None:
    queue = make_queue(groups_per_batch=1)
    queue.dispatched("a", "a", 0)
    if stage == "parked":
        queue.parked("a")
    elif stage != "generating":
        queue.generated("a")
    if stage in ("ready", "training"):
        queue.scored("a", answers(GOOD))
    if stage == "training":
        queue.take_batch()
    assert queue.failed("a", "object lost") == (Done("a", "a", 0, Stage.FAILED, "object lost"),)
    queue.check()
    assert queue.room() == 1
    finish(queue, "b")
    assert taken(queue.take_batch()) == ["b"]


def test_a_cancelled_group_gives_its_prompt_back() -> None:
    queue = make_queue()
    queue.dispatched("a", "a", 3)
    queue.prompts_exhausted()
    assert queue.cancelled("a") == (OfferAgain("a", "a", 3),)
    assert queue.room() == 2
    finish(queue, "b")
    finish(queue, "c")
    queue.take_batch()
    with pytest.raises(QueueError, match="b is training"):
        queue.cancelled("b")


# Staleness at consumption


def test_f34_one_stale_member_does_not_cost_the_group() -> None:
    queue = make_queue(version=10, groups_per_batch=1, max_staleness=8)
    finish(queue, "a", versions=[1, 9, 9, 9])
    batch = queue.take_batch()
    assert batch is not None
    (group,) = batch.groups
    assert group.trainable == (1, 2, 3)
    assert [member.reward for member in group.members] == GOOD
    assert [member.index for member in group.excluded] == [0]
    assert (batch.tally.excluded_members, batch.tally.excluded_tokens) == (1, 10)
    assert batch.staleness().max == 1


def test_f15_versions_come_from_the_engine_not_from_the_dispatch() -> None:
    queue = make_queue(version=5, groups_per_batch=1, max_staleness=1)
    finish(queue, "a", version=4)
    batch = queue.take_batch()
    assert batch is not None
    assert batch.staleness().max == 1


def test_f33_older_versions_fill_a_batch_without_a_stall() -> None:
    queue = make_queue(version=5, max_staleness=2)
    finish(queue, "a", version=3)
    finish(queue, "b", version=4)
    assert taken(queue.take_batch()) == ["a", "b"]


def test_e11_tokens_before_and_after_a_resume_all_count() -> None:
    queue = make_queue(version=3, groups_per_batch=1, answers_per_group=2, max_staleness=1)
    queue.dispatched("a", "a", 0)
    queue.generated("a")
    queue.scored("a", [Member(i, Status.SCORED, float(i), float(i), ((2, 4), (3, 3)), 7) for i in range(2)])
    batch = queue.take_batch()
    assert batch is not None
    summary = batch.staleness()
    assert summary.tokens == 14
    assert summary.stale_token_ratio == pytest.approx(4 / 7)
    assert (summary.in_flight_mean, summary.in_queue_mean) == (1.0, 0.0)


def test_a_stale_prompt_is_offered_again_once() -> None:
    queue = make_queue(version=5, max_staleness=1)
    queue.dispatched("a", "p", 0)
    queue.prompts_exhausted()
    queue.generated("a")
    assert queue.scored("a", answers(GOOD, versions=[3, 3, 3, 5])) == (OfferAgain("a", "p", 0),)
    assert queue.room() == 4
    queue = SamplingQueue.restore(json.loads(json.dumps(queue.state())), queue.settings)
    queue.dispatched("b", "p", 0)
    queue.generated("b")
    (done,) = queue.scored("b", answers(GOOD, version=3))
    assert done == Done("b", "p", 0, Stage.STALE, "over staleness.max=1 twice")
    assert queue.counts.stale == 2
    assert queue.state()["second_chances"] == []


def test_ready_groups_grow_stale_as_versions_are_acknowledged() -> None:
    queue = make_queue(max_staleness=1)
    for group in "abc":
        finish(queue, group, versions=[0, 0, 0, 0])
    queue.take_batch()
    assert [type(command) for command in queue.acknowledged(1)] == [Done, Done]
    assert queue.counts.ready == 1
    assert queue.acknowledged(2) == (OfferAgain("c", "c", 0),)
    assert (queue.counts.ready, queue.counts.stale, queue.room()) == (0, 1, 4)
    finish(queue, "d")
    finish(queue, "e")
    assert taken(queue.take_batch()) == ["d", "e"]


def test_groups_of_one_answer_train_without_the_filter() -> None:
    queue = make_queue(groups_per_batch=1, answers_per_group=1, filter=False)
    finish(queue, "a", [0.5])
    batch = queue.take_batch()
    assert batch is not None
    assert batch.groups[0].trainable == (0,)


def test_answers_without_tokens_cannot_train() -> None:
    queue = make_queue(answers_per_group=2)
    queue.dispatched("a", "a", 0)
    queue.generated("a")
    (done,) = queue.scored("a", [Member(0, Status.SCORED, 0.0), Member(1, Status.SCORED, 1.0, None, ((0, 3),), 3)])
    assert isinstance(done, Done)
    assert done.outcome is Stage.FAILED
    assert "1 scored without tokens" in done.reason


# Order


def test_oldest_dispatched_first_whatever_finished_first() -> None:
    queue = make_queue(max_staleness=1)
    for group in "abcd":
        queue.dispatched(group, group, 0)
    for group in "dcba":
        finish(queue, group)
    assert taken(queue.take_batch()) == ["a", "b"]


@pytest.mark.parametrize(("window", "expected"), [(0.0, None), (1.0, None), (1.5, ["b", "c"]), (math.inf, ["b", "c"])])
def test_the_window_bounds_how_far_an_unfinished_group_is_overtaken(window: float, expected: list[str] | None) -> None:
    queue = make_queue(max_staleness=2, window_batches=window)
    for group in "axbcd":
        queue.dispatched(group, group, 0)
    queue.failed("x", "not part of this")
    for group in "dcb":
        finish(queue, group)
    batch = queue.take_batch()
    if expected is None:
        assert batch is None
        finish(queue, "a")
        batch = queue.take_batch()
        assert taken(batch) == ["a", "b"]
    else:
        assert taken(batch) == expected
    queue.check()


def overtaken(on_late: OnLate) -> SamplingQueue:
    """Of two places a batch: `a` is slow, dispatched at version 0 with a bound of 1; others overtook it in one batch."""
    queue = make_queue(max_staleness=1, window_batches=math.inf, on_late=on_late)
    for group in "abc":
        queue.dispatched(group, group, 0)
    finish(queue, "b")
    finish(queue, "c")
    assert taken(queue.take_batch()) == ["b", "c"]  # `a` can still be trained at version 1
    queue.acknowledged(1)
    finish(queue, "d")
    finish(queue, "e")
    return queue


def test_a_batch_is_held_back_for_a_group_that_would_be_too_old_after_it() -> None:
    queue = overtaken(OnLate.WAIT)
    assert queue.take_batch() is None
    assert queue.waits_for_late()
    assert queue.starvation() is None
    finish(queue, "a", version=0)
    assert not queue.waits_for_late()
    assert taken(queue.take_batch()) == ["a", "d"]
    assert queue.counts.stale == 0


def test_a_late_group_is_dropped_where_nobody_waits_for_it() -> None:
    queue = overtaken(OnLate.DROP)
    assert not queue.waits_for_late()
    assert taken(queue.take_batch()) == ["d", "e"]
    queue.acknowledged(2)
    assert finish(queue, "a", version=0) == (OfferAgain("a", "a", 0),)
    assert queue.counts.stale == 1


def test_nobody_waits_for_a_group_that_is_too_old_already() -> None:
    queue = make_queue(groups_per_batch=1, max_staleness=1, window_batches=math.inf)
    queue.dispatched("a", "a", 0)
    finish(queue, "b")
    queue.take_batch()
    queue.acknowledged(5)
    finish(queue, "c")
    assert taken(queue.take_batch()) == ["c"]


# Starvation


@pytest.mark.parametrize(("max_staleness", "dispatches"), [(0, 6), (2, 10)])
def test_dispatches_that_do_not_fill_a_batch_end(max_staleness: int, dispatches: int) -> None:
    queue = make_queue(max_dispatches_per_batch=3, max_staleness=max_staleness)
    count = 0
    while queue.room():
        assert queue.starvation() is None
        finish(queue, str(count), RIGHT)
        count += 1
    assert count == dispatches
    starvation = queue.starvation()
    assert starvation is not None
    assert starvation.action is OnStarved.STOP  # nothing is ready that could make a smaller batch
    assert not starvation.exhausted
    assert f"{count} groups were filtered ({count} all right, 0 all wrong, 0 by other filters)" in str(starvation)
    assert "too easy" in str(starvation)
    assert queue.take_batch(shrink=True) is None


@pytest.mark.parametrize("action", list(OnStarved))
def test_starved_with_something_ready(action: OnStarved) -> None:
    queue = make_queue(max_dispatches_per_batch=2, on_starved=action)
    for group in "abcd":
        finish(queue, group, GOOD if group == "c" else WRONG)
    starvation = queue.starvation()
    assert starvation is not None
    assert (starvation.action, starvation.ready, starvation.wanted) == (action, 1, 2)
    assert "too hard" in starvation.suggestion
    batch = queue.take_batch(shrink=True)
    assert taken(batch) == ["c"]
    assert batch is not None
    assert batch.shrunk
    queue.acknowledged(1)
    assert queue.room() == 2
    assert queue.starvation() is None


def test_a_batch_does_not_shrink_while_it_could_be_filled() -> None:
    queue = make_queue()
    queue.dispatched("a", "a", 0)
    queue.dispatched("b", "b", 0)
    finish(queue, "a")
    queue.prompts_exhausted()
    assert queue.take_batch(shrink=True) is None
    assert queue.starvation() is None
    finish(queue, "b", WRONG)
    assert taken(queue.take_batch(shrink=True)) == ["a"]


def test_no_prompts_at_all_is_starvation() -> None:
    queue = make_queue()
    assert queue.starvation() is None
    queue.prompts_exhausted()
    starvation = queue.starvation()
    assert starvation is not None
    assert starvation.exhausted
    assert "the prompts are exhausted" in str(starvation)
    assert "data.epochs" in starvation.suggestion


# Checkpoints


def test_restored_queue_has_full_room_and_the_right_version() -> None:
    queue = make_queue(max_staleness=1)
    for group in "abcd":
        finish(queue, group)
    queue.take_batch()
    queue.acknowledged(1)
    queue.dispatched("e", "e", 0)
    state = json.loads(json.dumps(queue.state()))
    assert (queue.counts.ready, queue.counts.cancelled) == (2, 0)  # taking the state changes nothing
    restored = SamplingQueue.restore(state, queue.settings)
    restored.check()
    assert (restored.version, restored.room()) == (1, 4)
    assert (restored.counts.dispatched, restored.counts.trained, restored.counts.cancelled) == (5, 2, 3)
    for group in "cd":
        finish(restored, group)
    batch = restored.take_batch()
    assert taken(batch) == ["c", "d"]
    assert batch is not None
    assert batch.staleness().max == 0
    assert batch.tally.cancelled == 0


def test_restore_with_another_batch_size() -> None:
    queue = make_queue(groups_per_batch=4)
    for group in "abcd":
        finish(queue, group)
    queue.take_batch()
    queue.acknowledged(1)
    restored = SamplingQueue.restore(queue.state(), make_queue(groups_per_batch=1, max_staleness=2).settings)
    assert restored.room() == 3


# Values


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"groups_per_batch": 0}, "groups_per_batch"),
        ({"answers_per_group": 1}, "answers_per_group must be at least 2"),
        ({"answers_per_group": 0, "filter": False}, "answers_per_group"),
        ({"filter_tolerance": math.nan}, "filter_tolerance"),
        ({"filter_tolerance": math.inf}, "filter_tolerance"),
        ({"min_scored_fraction": 0.0}, "min_scored_fraction"),
        ({"min_scored_fraction": 1.1}, "min_scored_fraction"),
        ({"window_batches": -0.5}, "window_batches"),
        ({"window_batches": math.nan}, "window_batches"),
        ({"max_dispatches_per_batch": 0}, "max_dispatches_per_batch"),
        ({"member_retries": -1}, "rollout.retries"),
        ({"max_staleness": -1}, "staleness.max"),
        ({"pass_rate_band": (0.8, 0.2)}, "pass_rate_band"),
        ({"pass_rate_band": (math.nan, 1.0)}, "pass_rate_band"),
    ],
)
def test_settings_that_could_deadlock_are_refused(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(ValueError, match=key):
        make_queue(**changes)


@pytest.mark.parametrize(("fraction", "size", "needed"), [(1.0, 8, 8), (0.7, 10, 7), (0.5, 3, 2), (0.1, 8, 2)])
def test_min_scored(fraction: float, size: int, needed: int) -> None:
    assert QueueSettings(1, size, filter=True, min_scored_fraction=fraction).min_scored == needed


@pytest.mark.parametrize(
    "values",
    [
        {"status": Status.SCORED},
        {"status": Status.ERRORED, "reward": 0.0},
        {"status": Status.SCORED, "reward": math.nan},
        {"status": Status.SCORED, "reward": 1.0, "filter_value": math.inf},
        {"status": Status.SCORED, "reward": 1.0, "token_versions": ((0, 3),), "response_length": 4},
    ],
)
def test_members_that_make_no_sense_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="member 7"):
        Member(7, **values)


def test_member_of_a_trajectory() -> None:
    trajectory = Trajectory(
        group_id="g",
        index=2,
        prompt_id="p",
        messages=(),
        token_ids=np.arange(6, dtype=np.int32),
        response_mask=np.array([False, True, True, False, True, True]),
        behaviour_logprobs=np.zeros(6, dtype=np.float32),
        version_spans=(VersionSpan(1, 3, 4), VersionSpan(4, 6, 5)),
        finish_reason="length",
    )
    with pytest.raises(ValueError, match="g/2 was not judged"):
        Member.of(trajectory, "correct")
    judged = trajectory.with_reward(RewardResult(0.9, components={"correct": 1.0, "length": -0.1}))
    assert Member.of(judged, "correct") == Member(2, Status.SCORED, 0.9, 1.0, ((4, 2), (5, 2)), 4, True)
    assert Member.of(judged, "absent").filter_value is None


def test_a_version_may_jump() -> None:
    queue = make_queue(groups_per_batch=1, max_staleness=2)
    for group in "abc":
        finish(queue, group)
    queue.take_batch()
    assert queue.acknowledged(7)[1:] == (OfferAgain("b", "b", 0), OfferAgain("c", "c", 0))


def test_finished_groups_are_forgotten() -> None:
    queue = make_queue(max_staleness=1)
    sizes = []
    for group in range(1200):
        finish(queue, f"{group:04}", GOOD if group % 3 else WRONG)
        if queue.take_batch():
            queue.acknowledged(queue.version + 1)
        if group in (299, 1199):
            sizes.append(len(pickle.dumps(queue)))
    assert sizes[1] < 1.1 * sizes[0]


# Random histories

SETTINGS = st.builds(
    QueueSettings,
    groups_per_batch=st.integers(1, 3),
    answers_per_group=st.integers(2, 3),
    filter=st.booleans(),
    pass_rate_band=st.sampled_from([None, None, (0.0, 0.6)]),
    min_scored_fraction=st.sampled_from([0.5, 1.0]),
    window_batches=st.sampled_from([0.0, 0.5, 1.0, 3.0, math.inf]),
    max_dispatches_per_batch=st.integers(1, 3),
    member_retries=st.integers(0, 2),
    max_staleness=st.integers(0, 3),
    on_late=st.sampled_from(list(OnLate)),
)


SEEDS = st.integers(0, 2**32).map(random.Random)


class Histories(RuleBasedStateMachine):
    """A driver with a small prompt stream that does everything a real one may do, in any order."""

    @initialize(queue_settings=SETTINGS, prompts=st.integers(0, 60), version=st.integers(0, 3))
    def start(self, queue_settings: QueueSettings, prompts: int, version: int) -> None:
        self.queue = SamplingQueue(queue_settings, version)
        self.waiting = deque((f"p{number}", 0) for number in range(prompts))
        self.all_prompts = set(self.waiting)
        self.live: dict[str, tuple[str, int]] = {}
        self.dispatched_at: dict[str, int] = {}
        self.done: dict[tuple[str, int], Stage] = {}
        self.given = 0

    def obey(self, commands: Commands) -> None:
        for command in commands:
            if isinstance(command, Resample):
                assert command.indexes
                continue
            prompt = self.live.pop(command.group_id)
            assert prompt == (command.prompt_id, command.epoch)
            if isinstance(command, OfferAgain):
                self.waiting.appendleft(prompt)
            else:
                assert prompt not in self.done
                self.done[prompt] = command.outcome

    def groups(self, stage: Stage) -> list[str]:
        return [group for group, _, at in self.queue.oldest(1000) if at is stage]

    def dispatch_one(self) -> None:
        if self.waiting:
            group_id = f"g{self.given}"
            self.given += 1
            prompt = self.waiting.popleft()
            self.queue.dispatched(group_id, *prompt)
            self.live[group_id] = prompt
            self.dispatched_at[group_id] = self.queue.version
        else:
            self.queue.prompts_exhausted()

    @rule(count=st.integers(1, 8))
    def dispatch(self, count: int) -> None:
        for _ in range(min(count, self.queue.room())):
            self.dispatch_one()

    @rule(rng=SEEDS, event=st.sampled_from(["generated", "generated", "lost", "parked", "resumed", "stopped"]))
    def generate(self, rng: random.Random, event: str) -> None:
        """One group goes on, or an actor is lost with all that it was writing."""
        groups = self.groups(Stage.PARKED if event in ("resumed", "stopped") else Stage.GENERATING)
        size = self.queue.settings.answers_per_group
        if event == "lost":
            for group in rng.sample(groups, (len(groups) + 1) // 2):
                missing = sorted(rng.sample(range(size), rng.randint(1, size)))
                commands = self.queue.generated(group, missing)
                assert commands in ((), (Resample(group, tuple(missing)),))
        elif groups:
            self.obey(getattr(self.queue, event)(rng.choice(groups)))

    @rule(share=st.floats(0, 1))
    def run_ahead(self, share: float) -> None:
        self.obey(self.queue.run_ahead(round(share * self.queue.settings.max_staleness)))

    @rule(rng=SEEDS)
    def score(self, rng: random.Random) -> None:
        """All that were generated, with anything that may come of their members."""
        for group in self.groups(Stage.SCORING):
            members = []
            for index in range(self.queue.settings.answers_per_group):
                status = rng.choice([Status.SCORED] * 8 + [Status.ERRORED, Status.UNSCORED])
                reward = float(rng.random() < 0.5) if status is Status.SCORED else None
                versions = sorted({rng.randint(self.dispatched_at[group], self.queue.version) for _ in range(2)})
                spans = tuple((version, 3) for version in versions if rng.random() < 0.9)
                members.append(Member(index, status, reward, reward, spans, 3 * len(spans)))
            self.obey(self.queue.scored(group, members))

    @rule(rng=SEEDS, count=st.integers(1, 8))
    def finish_well(self, rng: random.Random, count: int) -> None:
        """Several groups, with rewards that differ and tokens of any version since their dispatch."""
        groups = self.groups(Stage.GENERATING)
        for group in rng.sample(groups, min(count, len(groups))):
            rewards = [float(index % 2) for index in range(self.queue.settings.answers_per_group)]
            versions = [rng.randint(self.dispatched_at[group], self.queue.version) for _ in rewards]
            self.obey(self.queue.generated(group))
            self.obey(self.queue.scored(group, answers(rewards, versions=versions)))

    @rule(rng=SEEDS, event=st.sampled_from(["failed", "cancelled"]))
    def lose(self, rng: random.Random, event: str) -> None:
        training = self.queue.counts.training > 0
        unfinished = [group for group, _, _ in self.queue.oldest(1000)]
        if event == "failed" and self.live and training:
            self.obey(self.queue.failed(rng.choice(list(self.live)), "lost"))
        elif event == "cancelled" and unfinished:
            self.obey(self.queue.cancelled(rng.choice(unfinished)))

    @rule(shrink=st.booleans())
    def take(self, shrink: bool) -> None:
        oldest_unfinished = next((group for group, _, _ in self.queue.oldest(1)), None)
        batch = self.queue.take_batch(shrink=shrink)
        if batch is None:
            return
        queue_settings = self.queue.settings
        assert batch.shrunk == (len(batch.groups) < queue_settings.groups_per_batch)
        assert not batch.shrunk or shrink
        numbers = [int(group.group_id[1:]) for group in batch.groups]
        assert numbers == sorted(numbers)
        if oldest_unfinished is not None:
            window = queue_settings.window_batches * queue_settings.groups_per_batch
            assert numbers[-1] <= int(oldest_unfinished[1:]) + window
        assert all(len(group.trainable) >= queue_settings.min_trainable for group in batch.groups)
        assert batch.staleness().max <= queue_settings.max_staleness
        for group in batch.groups:
            excluded = {member.index for member in group.excluded}
            scored = {m.index for m in group.members if m.reward is not None and m.token_versions}
            assert excluded | set(group.trainable) == scored

    @rule(jump=st.sampled_from([1, 1, 1, 2, 4]), take=st.booleans())
    def acknowledge(self, jump: int, take: bool) -> None:
        if self.queue.counts.training:
            self.obey(self.queue.acknowledged(self.queue.version + jump))
            if take:
                self.take(shrink=True)

    @rule(luck=st.integers(0, 5))
    def restart(self, luck: int) -> None:
        """The process dies after a checkpoint; the stream hands out again what was not done, oldest first."""
        if luck:
            return
        before = self.queue.counts
        state = json.loads(json.dumps(self.queue.state()))
        self.queue = SamplingQueue.restore(state, self.queue.settings)
        self.waiting.extendleft(reversed(list(self.live.values())))
        self.live.clear()
        assert self.queue.room() == self.queue.policy.capacity
        assert (self.queue.counts.dispatched, self.queue.counts.trained) == (
            before.dispatched,
            before.trained,
        )
        # Numbering must follow the queue's own sequence, which goes on where it was.
        self.given = self.queue.counts.dispatched

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "queue"):
            return
        queue, counts = self.queue, self.queue.counts
        queue.check()
        final = counts.trained + counts.filtered + counts.failed + counts.stale + counts.cancelled
        assert counts.dispatched == counts.untrained + final == self.given
        assert counts.untrained == len(self.live) <= queue.policy.capacity
        # Each prompt is in exactly one place.
        assert self.all_prompts == {*self.waiting, *self.live.values(), *self.done}
        assert len(self.all_prompts) == len(self.waiting) + len(self.live) + len(self.done)
        # What is remembered of prompts ends with them.
        assert not {tuple(prompt) for prompt in queue.state()["second_chances"]} & set(self.done)
        # Something can always happen, or the queue says that nothing can.
        full = counts.ready >= queue.settings.groups_per_batch
        assert counts.in_flight or counts.training or queue.room() or full or queue.starvation()

    def teardown(self) -> None:
        """From wherever the history ended, well-behaved workers bring every prompt to its end."""
        if not hasattr(self, "queue"):
            return
        queue = self.queue
        good = [float(index % 2) for index in range(queue.settings.answers_per_group)]
        for _ in range(1000):
            if queue.counts.training:
                self.obey(queue.acknowledged(queue.version + 1))
            elif queue.take_batch() is not None:
                continue
            elif starvation := queue.starvation():
                if starvation.action is OnStarved.STOP and starvation.exhausted:
                    break
                if queue.take_batch(shrink=True) is None:  # all was set aside; the run would stop here
                    assert starvation.action is OnStarved.STOP
                    return
            elif parked := self.groups(Stage.PARKED):
                queue.resumed(parked[0])
            elif scoring := self.groups(Stage.SCORING):
                self.obey(queue.scored(scoring[0], answers(good, queue.version)))
            elif generating := self.groups(Stage.GENERATING):
                queue.generated(generating[0])
            else:
                assert queue.room(), "deadlock"
                self.dispatch_one()
        else:
            raise AssertionError("the queue does not come to an end")
        assert set(self.done) == self.all_prompts


Histories.TestCase.settings = settings(max_examples=125, stateful_step_count=50, deadline=None)
TestHistories = Histories.TestCase


def play(seed: int, queue_settings: QueueSettings) -> None:
    """The same events, longer: each history likes some of them more than others."""
    rng = random.Random(seed)
    machine = Histories()
    machine.start(queue_settings, prompts=rng.choice([10, 100]), version=0)
    events = {
        lambda: machine.dispatch(rng.randint(1, 8)): 4,
        lambda: machine.finish_well(rng, rng.randint(1, 4)): 4,
        lambda: machine.generate(
            rng, rng.choice(["generated", "generated", "lost", "parked", "resumed", "stopped"])
        ): 3,
        lambda: machine.run_ahead(rng.random()): 0.3,
        lambda: machine.score(rng): 2,
        lambda: machine.take(shrink=rng.random() < 0.5): 2,
        lambda: machine.acknowledge(rng.choice([1, 1, 1, 2]), take=rng.random() < 0.7): 3,
        lambda: machine.lose(rng, rng.choice(["failed", "cancelled"])): 0.3,
        lambda: machine.restart(luck=rng.randint(0, 3)): 0.1,
    }
    weights = [weight * rng.random() for weight in events.values()]
    for event in rng.choices(list(events), weights, k=150):
        event()
        machine.holds()
    machine.teardown()


@settings(max_examples=250, deadline=None)
@given(seed=st.integers(0, 2**32), queue_settings=SETTINGS)
def test_long_histories(seed: int, queue_settings: QueueSettings) -> None:
    play(seed, queue_settings)


@pytest.mark.thorough
@settings(max_examples=2000, deadline=None)
@given(seed=st.integers(0, 2**32), queue_settings=SETTINGS)
def test_two_thousand_long_histories(seed: int, queue_settings: QueueSettings) -> None:
    play(seed, queue_settings)


@settings(max_examples=250, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    groups_per_batch=st.integers(1, 4),
    max_staleness=st.integers(0, 3),
    window=st.sampled_from([0.0, 0.5, 1.0, 2.0, math.inf]),
)
def test_who_waits_for_late_groups_wastes_nothing(
    seed: int, groups_per_batch: int, max_staleness: int, window: float
) -> None:
    """Answers of any length, filtered groups, shrunk batches, any order: nothing is ever too old when its turn comes."""
    rng = random.Random(seed)
    queue = make_queue(
        groups_per_batch=groups_per_batch,
        max_staleness=max_staleness,
        window_batches=window,
        max_dispatches_per_batch=rng.choice([1, 2, 5]),
    )
    slow = rng.random()  # how often the oldest group is not the one that finishes
    dispatched_at: dict[str, int] = {}
    for _ in range(120):
        choices = ["take"] + ["dispatch"] * (queue.room() > 0) + ["finish"] * bool(queue.counts.in_flight)
        choices += ["acknowledge"] * bool(queue.counts.training)
        match rng.choice(choices):
            case "dispatch":
                group = str(queue.counts.dispatched)
                queue.dispatched(group, group, 0)
                dispatched_at[group] = queue.version
            case "finish":
                unfinished = queue.oldest(1000)
                group = rng.choice(unfinished[1:] if rng.random() < slow and unfinished[1:] else unfinished)[0]
                rewards = rng.choice([GOOD, GOOD, RIGHT])
                finish(queue, group, rewards, version=dispatched_at.pop(group))
            case "take":
                queue.take_batch(shrink=True)
            case "acknowledge":
                queue.acknowledged(queue.version + 1)
        queue.check()
        held = queue.waits_for_late()
        assert not held or (queue.counts.in_flight and queue.take_batch() is None)
    assert queue.counts.stale == queue.tally.excluded_members == 0
