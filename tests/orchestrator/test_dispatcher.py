"""Groups on their way, in whole runs with fake engines: parked for the learner, stopped early, filtered by the user."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from fakes import ANSWER_TOKENS, FakeEngine, FakeLearner, FakeRun, LocalActor, fake_config, index_reward, patch_ray
from ray.exceptions import ActorDiedError, ObjectLostError, RayActorError, RayTaskError

from learner.rank_group import LearnerError
from learner.reference_group import ReferenceGroup
from orchestrator.config import ConfigError
from orchestrator.fleet import PartialsLost, RolloutFleet
from orchestrator.journal import read_outcomes, read_trajectories
from rollout_workers.trajectory import Trajectory
from rollout_workers.worker import RolloutRequest


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    patch_ray(monkeypatch)
    monkeypatch.setattr("orchestrator.run.prefix_sharing", lambda prepared: True)


def chosen(prompt_id: str) -> bool:
    """About a third of the prompts."""
    return sum(prompt_id.encode()) % 3 == 0


class TestTakingTurns:
    """placement.mode=shared: engines write nothing while the learner works, and lose nothing of what they had."""

    def start(self, folder: Path, *overrides: str) -> tuple[FakeRun, list[int]]:
        """A run whose chosen prompts take longer than a batch; requests that the engine held while the learner worked."""
        held: list[int] = []

        class Watching(FakeLearner):
            async def learn(self, *arguments):  # type: ignore[no-untyped-def]
                held.append(sum(len(engine.writing) for engine in run.engines))
                return await super().learn(*arguments)

        def delay_s(request: RolloutRequest) -> float:
            return 0.05 if chosen(request.prompt_id) else 0.002

        config = fake_config("placement.mode=shared", "run.batches=8", "data.epochs=null", *overrides)
        run = FakeRun(folder, config, engine=lambda index: FakeEngine(delay_s), learner=Watching(learn_s=0.01))
        return run.execute(), held

    @pytest.mark.parametrize("window", ["sampling.window_batches=1", "sampling.window_batches=8"])
    def test_what_is_being_written_is_parked_and_goes_on(self, tmp_path: Path, window: str) -> None:
        run, held = self.start(tmp_path, "staleness.max=2", window)
        assert held == [0] * 8
        assert sum(run.values("rollout/parked")) > 0
        assert max(run.values("staleness/max")) <= 2
        rows = read_trajectories(tmp_path).to_pylist()
        assert all(sum(row["response_mask"]) == ANSWER_TOKENS for row in rows)
        spread = [row for row in rows if len({span["version"] for span in row["version_spans"]}) > 1]
        assert spread
        # Only what was not whole yet was asked for again.
        engine = run.engines[0]
        assert all(len(request.indexes) == 2 and request.attempt == 0 for request in engine.requests)
        run.run.queue.check()

    def test_parked_answers_that_get_lost_cost_their_group_alone(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        generate = RolloutFleet.generate

        async def losing(self, request, partials=()):  # type: ignore[no-untyped-def]
            if partials:
                raise PartialsLost(f"the partial answers of group {request.group_id} are lost")
            return await generate(self, request, partials)

        monkeypatch.setattr(RolloutFleet, "generate", losing)
        run, _ = self.start(tmp_path, "staleness.max=2", "sampling.max_dispatches_per_batch=100")
        assert len(run.learner.batches) == 8
        failed = [o for o in read_outcomes(tmp_path).to_pylist() if o["outcome"] == "failed"]
        assert len(failed) == run.run.queue.counts.failed > 0
        assert all("partial answers" in o["reason"] for o in failed)

    def test_without_staleness_there_is_nothing_to_park(self, tmp_path: Path) -> None:
        run, held = self.start(tmp_path, "staleness.max=0")
        assert held == [0] * 8
        assert sum(run.values("rollout/parked")) == 0
        assert all(what != "park" for what, _ in run.engines[0].log)

    def test_an_engine_lost_with_parked_answers_costs_no_group(self, tmp_path: Path) -> None:
        run = FakeRun(
            tmp_path,
            fake_config("placement.mode=shared", "staleness.max=1", "run.batches=6", "rollout.replicas=2"),
        )

        def delay_s(request: RolloutRequest) -> float:
            if len(run.learner.batches) == 3 and not run.actors[0].dead:
                run.actors[0].kill()
            return 0.03 if chosen(request.prompt_id) else 0.002

        run.engine = lambda index: FakeEngine(delay_s)
        run.learner = FakeLearner(learn_s=0.01)
        run.execute()
        assert len(run.learner.batches) == 6
        assert run.run.queue.counts.failed == 0


class TestEarlyStop:
    """The last member of a chosen group is overdue; its others are equal, or not."""

    def start(self, folder: Path, *overrides: str, equal: bool = True, slow_s: float = 20.0) -> FakeRun:
        asked: Counter[str] = Counter()

        def delay_s(request: RolloutRequest) -> float:
            asked[request.group_id] += 1
            return slow_s if chosen(request.prompt_id) and asked[request.group_id] == 1 else 0.002

        def rule(trajectory: Trajectory) -> float:
            if chosen(trajectory.prompt_id) and trajectory.index < 3:
                return 0.0 if equal else index_reward(trajectory)
            return float(trajectory.index % 2)

        config = fake_config(
            "sampling.answers_per_group=4",
            "sampling.early_stop.after_s=0.03",
            "sampling.max_dispatches_per_batch=100",
            "rollout.answer_timeout_s=1",
            *overrides,
        )
        slow = FakeEngine(delay_s, slow=lambda request, index: index == 3)
        return FakeRun(folder, config, engine=lambda index: slow, rule=rule).execute()

    def test_a_group_that_can_hardly_teach_is_stopped(self, tmp_path: Path) -> None:
        run = self.start(tmp_path, "sampling.early_stop.control_share=0")
        stopped = [o for o in read_outcomes(tmp_path).to_pylist() if "stopped early" in o["reason"]]
        assert stopped
        assert all(chosen(o["prompt_id"]) and o["outcome"] == "filtered" for o in stopped)
        assert {tuple(o["reward_values"]) for o in stopped} == {(0.0, 0.0, 0.0, None)}  # the rest was not judged
        assert run.run.queue.tally.stopped_early == len(stopped) == sum(run.values("early_stop/stopped"))
        assert run.values("early_stop/discarded_tokens")[-1] == len(stopped)
        assert run.values("early_stop/lost_useful_ratio") == []  # without controls nobody knows
        assert len(run.learner.batches) == 4

    def test_controls_go_on_and_show_what_is_lost(self, tmp_path: Path) -> None:
        run = self.start(tmp_path, "sampling.early_stop.control_share=1")
        assert run.run.queue.tally.stopped_early == 0
        assert run.run.queue.counts.filtered == 0
        assert run.values("early_stop/lost_useful_ratio")[-1] == 1.0  # the overdue member was the right one
        assert run.values("early_stop/saved_tokens")[-1] == 0
        trained = read_trajectories(tmp_path).to_pylist()
        assert any(chosen(row["prompt_id"]) for row in trained)
        assert all(sum(row["response_mask"]) == ANSWER_TOKENS for row in trained)

    def test_a_group_that_differs_already_goes_on(self, tmp_path: Path) -> None:
        run = self.start(tmp_path, "sampling.early_stop.control_share=0", equal=False)
        assert run.run.queue.tally.stopped_early == 0
        assert run.run.queue.counts.trained == run.run.queue.counts.dispatched == 8
        assert run.values("early_stop/stopped") == []

    def test_off_by_default(self, tmp_path: Path) -> None:
        run = self.start(tmp_path, "sampling.early_stop.after_s=null", slow_s=0.1)
        assert all(what != "park" for what, _ in run.engines[0].log)


def only_first_right(members) -> bool:  # type: ignore[no-untyped-def]
    """A user's filter."""
    return members[0].filter_value == 1.0


def test_a_users_filter_decides_in_the_live_run_too(tmp_path: Path) -> None:
    config = fake_config(f"sampling.keep={__file__}:only_first_right", "sampling.max_dispatches_per_batch=100")

    def rule(trajectory: Trajectory) -> float:
        return float(trajectory.index == (0 if chosen(trajectory.prompt_id) else 1))

    run = FakeRun(tmp_path, config, rule=rule).execute()
    assert {o["prompt_id"] for o in read_outcomes(tmp_path).to_pylist() if o["outcome"] == "trained"} == {
        row["prompt_id"] for row in read_trajectories(tmp_path).to_pylist() if chosen(row["prompt_id"])
    }
    assert sum(run.values("group/not_kept")) == run.run.queue.counts.filtered > 0


def without_an_answer(members) -> None:  # type: ignore[no-untyped-def]
    """A user's filter that forgot to return: nothing would ever be trained on."""


def without_members() -> bool:
    return True


@pytest.mark.parametrize(
    ("name", "problem"),
    [("without_an_answer", "returned None"), ("without_members", "raised TypeError: .* positional argument")],
)
def test_a_users_filter_that_fails_is_named(tmp_path: Path, name: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=rf"^sampling\.keep=.*:{name}: {problem}"):
        FakeRun(tmp_path, fake_config(f"sampling.keep={__file__}:{name}")).execute()


def test_the_adaptive_bound_follows_the_mismatch_and_survives_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = iter([0.2, 0.9, 0.9, 0.9, 0.1, 0.9])
    monkeypatch.setattr(
        "orchestrator.reporting.learner_metrics",
        lambda reports, tally: {"mismatch/ess": next(figures), "mismatch/kl": 0.0},
    )
    overrides = ["staleness.max=4", "staleness.adaptive=true", "staleness.patience_batches=2", "data.epochs=null"]
    overrides += ["checkpoint.every_batches=1"]
    run = FakeRun(tmp_path, fake_config(*overrides, "run.batches=3")).execute()
    assert run.values("staleness/bound") == [4, 2, 2]
    resumed = FakeRun(tmp_path, fake_config(*overrides, "run.batches=6"), resume=True).execute()
    assert resumed.values("staleness/bound") == [3, 3, 1]
    assert run.most_untrained <= 2 * 5
    assert resumed.most_untrained <= 2 * 4


class FakeReference:
    """A reference actor. It says -2 of every token; the answers of a `gone` prompt are lost on their way to it, by `cause`."""

    def __init__(self, gone: str | None = None, cause: Exception | None = None) -> None:
        self.gone, self.cause = gone, cause
        self.scored: list[str] = []

    def ready(self) -> None:
        pass

    def score(self, answers: Sequence[Trajectory]) -> tuple[int, dict[tuple[str, int], np.ndarray]]:
        self.scored.append(answers[0].group_id)
        if answers[0].prompt_id == self.gone:
            raise RayTaskError("score", "lost", self.cause).as_instanceof_cause()
        return len(answers), {(a.group_id, a.index): np.full(a.response_length, -2.0) for a in answers}


class TestReferenceActors:
    """learner.reference=own: groups are scored by them on their way to the learner."""

    def start(self, folder: Path, actors: Sequence[FakeReference]) -> tuple[FakeRun, list[list[str]]]:
        learned: list[list[str]] = []

        class Learner(FakeLearner):
            async def learn(self, plans, payloads, references=None):  # type: ignore[no-untyped-def]
                found = [await reference for reference in references]
                learned.append([group_id for of_group in found for group_id in {group for group, _ in of_group}])
                groups = [(await payload)[0].group_id for payload in payloads]
                assert learned[-1] == groups
                return await super().learn(plans, payloads)

        learner = Learner()
        handles = [LocalActor(actor) for actor in actors]
        learner.reference = ReferenceGroup(handles, start_timeout_s=1.0, timeout_s=0.5)
        config = fake_config("algorithm.kl_coefficient=0.1", "learner.reference=own", "staleness.max=1")
        run = FakeRun(folder, config, learner=learner)
        return run, learned

    def test_score_each_group_once_before_the_learner_gets_it(self, tmp_path: Path) -> None:
        actors = [FakeReference(), FakeReference()]
        run, learned = self.start(tmp_path, actors)
        run.execute()
        scored = [group_id for actor in actors for group_id in actor.scored]
        assert sorted(scored) == sorted(group_id for groups in learned for group_id in groups)
        assert len(set(scored)) == len(scored) == 8
        assert all(actor.scored for actor in actors)

    @pytest.mark.parametrize("cause", [ObjectLostError("ab", "", ""), ActorDiedError()], ids=["object", "its actor"])
    def test_answers_that_are_lost_on_their_way_cost_their_group_alone(self, tmp_path: Path, cause: Exception) -> None:
        run, learned = self.start(tmp_path, [FakeReference(gone="main:9", cause=cause)])
        run.execute()
        assert [len(groups) for groups in learned] == [2] * 4
        fates = {o["prompt_id"]: o["outcome"] for o in read_outcomes(tmp_path).to_pylist()}
        assert Counter(fates.values()) == {"trained": 8, "failed": 1}
        assert fates["main:9"] == "failed"

    def test_one_that_is_late_or_gone_ends_the_run_by_name(self, tmp_path: Path) -> None:
        class Late(FakeReference):
            async def score(self, answers):  # type: ignore[no-untyped-def]
                await asyncio.sleep(60)

        run, _ = self.start(tmp_path, [Late()])
        with pytest.raises(LearnerError, match=r"reference actor 0 did not answer within"):
            run.execute()

        class Gone(FakeReference):
            def score(self, answers):  # type: ignore[no-untyped-def]
                raise RayActorError

        run, _ = self.start(tmp_path / "gone", [Gone()])
        with pytest.raises(LearnerError, match=r"reference actor 0 is gone"):
            run.execute()

    def test_a_failure_of_its_own_is_no_lost_answer(self, tmp_path: Path) -> None:
        class Full(FakeReference):
            def score(self, answers):  # type: ignore[no-untyped-def]
                raise RayTaskError("score", "out of memory", MemoryError("device")).as_instanceof_cause()

        run, _ = self.start(tmp_path, [Full()])
        with pytest.raises(RayTaskError, match="out of memory"):
            run.execute()
