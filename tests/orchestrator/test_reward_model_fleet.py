"""Reward models on actors: who is asked, what becomes of one that dies or hangs, and that a failure is never a number."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest
from fakes import FakeEngine, LocalActor, patch_ray
from ray.exceptions import ObjectLostError, RayActorError, RayTaskError

import orchestrator.reward_model_fleet
from orchestrator.fleet import FleetError
from orchestrator.reward_fleet import RewardFleet
from orchestrator.reward_model_fleet import RewardModelFleet
from reward_workers.alarm import ErrorAlarm
from reward_workers.reward import RewardFunction, RewardModel, RewardResult, RewardSet, Status
from reward_workers.reward_model_vllm import ScorerDied
from reward_workers.worker import RewardWorker
from rollout_workers.trajectory import Trajectory
from rollout_workers.worker import RolloutRequest, SamplingSettings


@pytest.fixture(autouse=True)
def without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    patch_ray(monkeypatch)
    monkeypatch.setattr(orchestrator.reward_model_fleet, "REVIVAL_ROUND_S", 0.01)


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 20))


async def answers(count: int = 2) -> tuple[Trajectory, ...]:
    request = RolloutRequest(
        "g", "p", 0, ({"role": "user", "content": "?"},), tuple(range(count)), SamplingSettings(1, 9), 1
    )
    return (await FakeEngine().generate(request))[1]


class Scorer:
    """A reward model worker whose scores are `base` plus the index of the answer.

    `faults` are what happens to the first calls instead: an exception, or `hang`.
    """

    def __init__(
        self, base: float = 0.0, faults: Sequence[Exception | str] = (), starts: Sequence[Exception] = ()
    ) -> None:
        self.base = base
        self.faults = list(faults)
        self.starts = list(starts)  # what the next starts end with, before they succeed
        self.started = self.asked = 0
        self.release: asyncio.Event | None = None

    async def start(self) -> None:
        self.started += 1
        if self.starts:
            raise self.starts.pop(0)

    async def score_group(self, trajectories: Sequence[Trajectory]) -> list[RewardResult]:
        self.asked += 1
        if self.release is not None:
            await self.release.wait()
        if self.faults:
            fault = self.faults.pop(0)
            if isinstance(fault, Exception):
                raise fault
            await asyncio.sleep(60)
        return [RewardResult(score, metrics={"raw": score}) for score in (self.base + t.index for t in trajectories)]

    async def close(self) -> None:
        pass


def fleet(
    *workers: Scorer, name: str = "rm", deadline_s: float = 5.0, tries: int = 2, **limits: float
) -> RewardModelFleet:
    limits = {"start_timeout_s": 5.0, **limits}
    return RewardModelFleet(name, list(map(LocalActor, workers)), deadline_s=deadline_s, tries=tries, **limits)


def task_error(cause: Exception) -> Exception:
    return RayTaskError("score_group", str(cause), cause).as_instanceof_cause()


class TestReplicas:
    def test_the_least_loaded_scores_and_order_is_kept(self) -> None:
        async def scenario() -> None:
            models = fleet(Scorer(0.0), Scorer(10.0))
            await models.start()
            done = await asyncio.gather(models.score(await answers()), models.score(await answers()))
            assert [[result.value for result in results] for results in done] == [[0.0, 1.0], [10.0, 11.0]]
            await models.close()

        run(scenario)

    def test_another_is_asked_when_one_dies(self) -> None:
        async def scenario() -> None:
            died, other = Scorer(0.0, [RayActorError()], [RayActorError(), RayActorError()]), Scorer(10.0)
            models = fleet(died, other)
            assert [r.value for r in await models.score(await answers())] == [10.0, 11.0]
            assert (died.asked, other.asked) == (1, 1)

        run(scenario)

    def test_the_only_one_is_waited_for_until_it_has_loaded_again(self) -> None:
        """Other groups that come meanwhile wait as well: not one of them is errored."""

        async def scenario() -> None:
            worker = Scorer(1.0, [RayActorError()], [RayActorError()] * 3)
            models = fleet(worker)
            trajectories = await answers()
            done = await asyncio.gather(*(models.score(trajectories) for _ in range(3)))
            again = await models.score(trajectories)
            assert [[r.value for r in results] for results in [*done, again]] == [[1.0, 2.0]] * 4
            assert worker.started == 4
            assert worker.asked == 5  # each group once, and the one that was lost once more

        run(scenario)

    def test_an_engine_that_died_in_a_living_actor_is_started_again(self) -> None:
        async def scenario() -> None:
            worker = Scorer(1.0, [task_error(ScorerDied("gone"))])
            assert [r.value for r in await fleet(worker).score(await answers())] == [1.0, 2.0]
            assert (worker.started, worker.asked) == (1, 2)

        run(scenario)

    def test_one_that_is_late_is_not_asked_first_again_and_not_ended(self) -> None:
        async def scenario() -> None:
            late, other = Scorer(0.0, ["hang"]), Scorer(10.0)
            models = fleet(late, other, deadline_s=0.05)
            assert [r.value for r in await models.score(await answers())] == [10.0, 11.0]
            assert [r.value for r in await models.score(await answers())] == [0.0, 1.0]

        run(scenario)

    @pytest.mark.parametrize(
        ("faults", "starts", "status", "problem"),
        [
            (["hang", "hang"], [], Status.TIMED_OUT, "rm-0: it gave no scores within 0 s"),
            ([RayActorError()] * 2, [], Status.ERRORED, "rm-0: it was lost"),
            ([RayActorError()], [task_error(OSError("no such file"))], Status.ERRORED, "rm-0: it was lost"),
            ([task_error(KeyError("role"))] * 2, [], Status.ERRORED, r"rm-0: it failed: KeyError\('role'\)"),
        ],
        ids=["late", "lost", "not back", "broken"],
    )
    def test_no_score_is_a_status_not_a_number(
        self, faults: list[Exception | str], starts: list[Exception], status: Status, problem: str
    ) -> None:
        async def scenario() -> None:
            models = fleet(Scorer(0.0, faults, starts), deadline_s=0.05)
            verdict = await models.score(await answers())
            assert isinstance(verdict, RewardResult)
            assert (verdict.value, verdict.status) == (None, status)
            with pytest.raises(AssertionError, match=problem):
                raise AssertionError(verdict.detail["error"])
            await models.close()

        run(scenario)

    def test_one_that_never_comes_back_is_given_up(self) -> None:
        async def scenario() -> None:
            models = fleet(Scorer(0.0, [RayActorError()], [RayActorError()] * 1000), start_timeout_s=0.1)
            first = await models.score(await answers())
            second = await models.score(await answers())
            assert isinstance(first, RewardResult)
            assert isinstance(second, RewardResult)
            assert second.detail["error"] == "no replica of reward model rm is left"

        run(scenario)

    def test_answers_that_are_gone_are_not_the_models_fault(self) -> None:
        async def scenario() -> None:
            worker = Scorer(0.0, [task_error(ObjectLostError("x", None, ""))])
            with pytest.raises(RayTaskError):
                await fleet(worker).score(await answers())
            assert (worker.asked, worker.started) == (1, 0)

        run(scenario)

    def test_a_start_that_takes_too_long_is_named(self) -> None:
        class Slow(Scorer):
            async def start(self) -> None:
                await asyncio.sleep(60)

        async def scenario() -> None:
            with pytest.raises(FleetError, match="reward model rm-1 did not start within 0 s"):
                await fleet(Scorer(), Slow(), start_timeout_s=0.02).start()

        run(scenario)


class TestBesideFunctions:
    """Through the reward fleet and a real reward worker."""

    def rewards(self, **of_model: Any) -> RewardSet:
        def even(trajectory: Trajectory) -> float:
            return float(trajectory.index % 2 == 0)

        return RewardSet([RewardFunction("even", even)], models=[RewardModel("rm", "somewhere", **of_model)])

    def verdicts(
        self,
        rewards: RewardSet,
        worker: Scorer,
        names: Sequence[str] | None = None,
        alarm: ErrorAlarm | None = None,
        groups: int = 1,
    ) -> list[RewardResult]:
        found: list[RewardResult] = []

        class Judge:
            def __init__(self, judge: RewardWorker) -> None:
                self._judge = judge

            async def score_group(self, *arguments: Any) -> list[RewardResult]:
                return await asyncio.to_thread(self._judge.score_group, *arguments)

        async def scenario() -> None:
            with RewardWorker(rewards, retries=0) as judge:
                whole = RewardFleet(
                    [LocalActor(Judge(judge))],
                    deadline_s=10.0,
                    tries=1,
                    alarm=alarm or ErrorAlarm(1.0),
                    models=[fleet(worker, deadline_s=0.2, tries=1)],
                )
                for _ in range(groups):
                    found.extend(await whole.score(await answers(), {}, names, None))

        run(scenario)
        return found

    def test_one_verdict_of_all_components(self) -> None:
        found = self.verdicts(self.rewards(weight=0.5), Scorer(4.0))
        assert [result.value for result in found] == [1.0 + 2.0, 0.0 + 2.5]
        assert [result.components for result in found] == [{"even": 1.0, "rm": 4.0}, {"even": 0.0, "rm": 5.0}]
        assert found[0].metrics == {"rm/raw": 4.0, "even/weighted": 1.0, "rm/weighted": 2.0}

    def test_a_row_without_the_model_does_not_ask_it(self) -> None:
        worker = Scorer(4.0)
        found = self.verdicts(self.rewards(), worker, ["even"])
        assert [result.components for result in found] == [{"even": 1.0}, {"even": 0.0}]
        assert worker.asked == 0
        found = self.verdicts(self.rewards(), worker, ["rm"])
        assert [result.components for result in found] == [{"rm": 4.0}, {"rm": 5.0}]
        assert worker.asked == 1

    def test_a_failed_model_voids_the_total_and_keeps_the_rest(self) -> None:
        found = self.verdicts(self.rewards(), Scorer(4.0, ["hang"]))
        assert [(result.value, result.status) for result in found] == [(None, Status.TIMED_OUT)] * 2
        assert [result.components for result in found] == [{"even": 1.0, "rm": None}, {"even": 0.0, "rm": None}]
        assert found[0].detail["rm"]["error"] == "reward model rm-0: it gave no scores within 0 s"

    def test_too_many_failures_of_a_model_stop_the_run(self) -> None:
        alarm = ErrorAlarm(0.05, minimum=4)
        worker = Scorer(4.0, [task_error(ValueError("odd"))] * 2)
        with pytest.raises(FleetError, match=r"reward\.max_error_ratio: 4 of the last 4 .*'rm'.*ValueError"):
            self.verdicts(self.rewards(), worker, alarm=alarm, groups=2)
