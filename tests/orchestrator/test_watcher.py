"""The independent checker in whole runs with fake engines: it sees every chosen group, and holds up nothing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeJudge, FakeLearner, FakeRun, Killed, fake_config, index_reward, patch_ray

from orchestrator.journal import read_outcomes, read_trajectories
from orchestrator.watch import RewardGamed
from rollout_workers.trajectory import RewardResult, Status, Trajectory

EVERYTHING = ("reward.watch.share=1", "reward.watch.window_batches=2")


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    patch_ray(monkeypatch)
    monkeypatch.setattr("orchestrator.run.prefix_sharing", lambda prepared: True)


@dataclass
class Checker(FakeJudge):
    """Remembers which groups it was asked about; with `gate` it answers none before that is set."""

    groups: list[str] = field(default_factory=list)
    gate: asyncio.Event | None = None

    async def score_group(self, trajectories: Sequence[Trajectory], *arguments: Any) -> list[RewardResult]:
        self.groups.append(trajectories[0].group_id)
        if self.gate is not None:
            await self.gate.wait()
        return await super().score_group(trajectories, *arguments)


def gamed_from(version: int) -> Checker:
    """Agrees with the reward about what earlier versions wrote, and finds nothing right in later answers."""
    return Checker(lambda t: index_reward(t) if t.version_spans[-1].version < version else 0.0)


def alarms(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "parts from its checker" in record.getMessage()]


def test_a_gap_that_grows_is_seen_and_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checker = gamed_from(4)
    with caplog.at_level(logging.WARNING):
        run = FakeRun(tmp_path, fake_config("run.batches=10", *EVERYTHING), watch_judge=checker).execute()
    assert len(checker.groups) == run.run.queue.counts.dispatched == 20
    assert run.values("watch/reward") == [0.5] * 10
    assert run.values("watch/checker") == [0.5] * 4 + [0.0] * 6
    assert run.values("watch/agreement") == [1.0] * 4  # nothing is told apart afterwards
    assert run.values("watch/gap") == [0.0] * 4 + [0.5] * 6
    assert run.values("watch/gap_growth") == [0, 0, 0, 0.25, 0.5, 0.5, 0.5, 0.5, 0.5]
    assert run.values("watch/answers") == [4] * 10
    assert run.values("watch/unscored_ratio") == [0] * 10
    [warning] = alarms(caplog)
    assert run.wandb.alerts == [("The reward parts from its checker", warning)]
    assert "The gap has grown by 0.500" in warning
    assert "-> 'answer 1'" in warning
    rows = read_trajectories(tmp_path).to_pylist()
    assert all(row["checker_value"] == (row["index"] % 2 if row["policy_version"] < 4 else 0) for row in rows)
    assert "watch/gap" in run.console.states[-1].metrics


def test_it_can_stop_the_run(tmp_path: Path) -> None:
    run = FakeRun(
        tmp_path, fake_config("run.batches=99", *EVERYTHING, "reward.watch.on_gap=stop"), watch_judge=gamed_from(3)
    )
    with pytest.raises(RewardGamed) as caught:
        run.execute()
    for piece in ("'reward'", "0.500 and 0.000, a gap of +0.500", "a gap of +0.000", "max_gap=0.2", "main:"):
        assert piece in str(caught.value)
    # What it saw is in the records, and what was trained on in the journal.
    assert run.values("watch/gap_growth")[-1] == 0.5
    assert run.run.version == 5
    assert set(read_trajectories(tmp_path)["policy_version"].to_pylist()) == set(range(5))
    assert not (tmp_path / "model").exists()


def test_which_groups_are_watched_depends_on_them_alone(tmp_path: Path) -> None:
    def watched(name: str, share: float) -> set[str]:
        checker = Checker()
        config = fake_config("run.batches=10", f"reward.watch.share={share}")
        FakeRun(tmp_path / name, config, watch_judge=checker).execute()
        return set(checker.groups)

    half = watched("half", 0.5)
    assert 5 < len(half) < 15  # of 20
    assert watched("less", 0.25) < half
    assert watched("none", 0) == set()


def test_without_a_checker_nothing_is_said(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, fake_config(*EVERYTHING)).execute()
    assert not [name for record in run.records.records for name in record if name.startswith("watch/")]
    assert {row["checker_value"] for row in read_trajectories(tmp_path).to_pylist()} == {None}


def test_a_verdict_that_comes_late_counts_for_the_next_batch(tmp_path: Path) -> None:
    checker = Checker(gate=asyncio.Event())

    class Opening(FakeLearner):
        async def learn(self, *arguments):  # type: ignore[no-untyped-def]
            if len(self.batches) == 1:
                checker.gate.set()
            return await super().learn(*arguments)

    run = FakeRun(tmp_path, fake_config(*EVERYTHING), watch_judge=checker, learner=Opening(learn_s=0.02)).execute()
    assert run.versions_of("watch/answers") == [2, 3, 4]
    assert run.values("watch/answers") == [8, 4, 4]
    # What was journaled before the verdict came does without.
    values = {row["policy_version"]: row["checker_value"] for row in read_trajectories(tmp_path).to_pylist()}
    assert [values[version] is None for version in range(4)] == [True, False, False, False]


def test_a_checker_that_never_answers_holds_up_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Stuck(Checker):
        async def score_group(self, trajectories: Sequence[Trajectory], *arguments: Any) -> list[RewardResult]:
            self.groups.append(trajectories[0].group_id)
            await asyncio.Event().wait()
            raise AssertionError

    checker = Stuck()
    with caplog.at_level(logging.WARNING):
        run = FakeRun(tmp_path, fake_config("run.batches=8", *EVERYTHING), watch_judge=checker).execute()
    assert [len(batch) for batch in run.learner.batches] == [2] * 8
    assert len(checker.groups) == 4  # two batches of groups wait, and no more
    assert run.values("watch/unscored_ratio") == [1] * 6  # of those that were not asked; the others may still be judged
    assert sum(run.values("watch/answers")) == 0
    assert run.values("watch/reward") == []
    assert caplog.text.count("the checker is slower than training") == 1
    assert (tmp_path / "model").exists()


def test_a_checker_that_fails_is_counted_and_touches_nothing(tmp_path: Path) -> None:
    def breaks(trajectory: Trajectory) -> RewardResult | float:
        return RewardResult(None, Status.ERRORED) if trajectory.index == 0 else index_reward(trajectory)

    def train(name: str, checker: Checker | None) -> FakeRun:
        config = fake_config("run.batches=6", *EVERYTHING)
        return FakeRun(tmp_path / name, config, watch_judge=checker).execute()

    plain, broken = train("plain", None), train("broken", Checker(breaks))
    assert broken.learner.batches == plain.learner.batches
    assert broken.values("reward/mean") == plain.values("reward/mean")
    assert broken.values("watch/unscored_ratio") == [0.5] * 6
    assert broken.values("watch/gap") == [0.0] * 6  # of those that have both, and no zero for the rest

    class Lost(Checker):
        async def score_group(self, *arguments: Any) -> list[RewardResult]:
            from ray.exceptions import RayActorError

            raise RayActorError

    lost = train("lost", Lost())
    assert lost.learner.batches == plain.learner.batches
    assert lost.values("watch/unscored_ratio") == [1] * 6
    outcomes = read_outcomes(tmp_path / "lost").to_pylist()
    assert {outcome["outcome"] for outcome in outcomes} == {"trained"}


def test_answers_without_the_primary_reward_are_not_compared(tmp_path: Path) -> None:
    """A row's own set of rewards may lack it, and a failed verifier gives none."""

    def rule(trajectory: Trajectory) -> RewardResult:
        value = index_reward(trajectory)
        if sum(trajectory.prompt_id.encode()) % 2:
            return RewardResult(value, components={"other": value})
        return RewardResult(value, components={"reward": value})

    checker = Checker()
    run = FakeRun(tmp_path, fake_config("run.batches=8", *EVERYTHING), rule=rule, watch_judge=checker).execute()
    rows = read_trajectories(tmp_path).to_pylist()
    compared = {row["group_id"] for row in rows if sum(row["prompt_id"].encode()) % 2 == 0}
    assert set(checker.groups) == compared
    assert sum(run.values("watch/answers")) == 2 * len(compared) > 0


def test_a_resumed_run_keeps_its_baseline(tmp_path: Path) -> None:
    config = fake_config("run.batches=99", "checkpoint.every_batches=2", *EVERYTHING, "reward.watch.on_gap=stop")

    def start(**changes: Any) -> FakeRun:
        return FakeRun(tmp_path, config, watch_judge=gamed_from(4), **changes)

    with pytest.raises(Killed):
        start(learner=FakeLearner(dies_at=5)).execute()
    resumed = start(resume=True)
    with pytest.raises(RewardGamed, match=r"over the first ones 0\.500 and 0\.500, a gap of \+0\.000"):
        resumed.execute()
    assert resumed.versions_of("watch/gap_growth") == [5, 6]
    assert resumed.values("watch/gap_growth") == [0.25, 0.5]
