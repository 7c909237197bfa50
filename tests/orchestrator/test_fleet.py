"""The fleets over local actors: who is asked, what happens when one is lost, and when it serves again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest
from fakes import (
    FakeEngine,
    FakeJudge,
    FakeLearner,
    LocalActor,
    checksum,
    patch_ray,
    reward_fleet,
    rollout_fleet,
)
from ray.exceptions import RayActorError

from orchestrator.clerks import Clerk, ClerkFleet
from orchestrator.fleet import FleetError, Generated, RolloutFleet
from orchestrator.reward_fleet import RewardFleet, RewardsLost, lost_rewards
from reward_workers.alarm import ErrorAlarm
from rollout_workers.engine import UpdateReport
from rollout_workers.trajectory import RewardResult, Status, Trajectory
from rollout_workers.weights.manifest import WeightsNotDelivered
from rollout_workers.worker import RolloutRequest, SamplingSettings


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    patch_ray(monkeypatch)


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 10))


def request(group_id: str = "g", indexes: tuple[int, ...] = (0, 1), timeout_s: float = 5.0) -> RolloutRequest:
    messages = ({"role": "user", "content": "?"},)
    return RolloutRequest(group_id, "p", 0, messages, indexes, SamplingSettings(1.0, 8), timeout_s)


def handles(fleet: RolloutFleet) -> list[LocalActor]:
    """The present actor of every replica."""
    return [replica.handle for replica in fleet._replicas]


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it did not come to that")


async def members_of(generated: Generated) -> dict[int, Trajectory]:
    found: dict[int, Trajectory] = {}
    for payload in generated.payloads:
        found |= {answer.index: answer for answer in await payload}
    return found


class TestGenerate:
    def test_the_least_loaded_is_asked(self) -> None:
        async def scenario() -> None:
            fleet = rollout_fleet(lambda index: FakeEngine(lambda request: 0.01), count=3)
            await fleet.start(0)
            sizes = [6, 2, 1, 1, 1]
            done = await asyncio.gather(
                *(fleet.generate(request(f"g{i}", tuple(range(n)))) for i, n in enumerate(sizes))
            )
            # 6 | 2 | 1, then the third has least (2), then the second and the third are level.
            assert [g.replica for g in done] == ["rollout-0", "rollout-1", "rollout-2", "rollout-2", "rollout-1"]
            assert (await fleet.generate(request())).replica == "rollout-0"  # nothing is outstanding any more
            assert fleet.metrics()["rollout/rollout-0/answers"] == 8

        run(scenario())

    def test_only_the_missing_members_are_asked_for_elsewhere(self) -> None:
        async def scenario() -> None:
            engines = [FakeEngine(fails=lambda request, i: i == 1 and request.attempt == 0), FakeEngine()]
            fleet = rollout_fleet(lambda index: engines[index], count=2)
            await fleet.start(0)
            generated = await fleet.generate(request(indexes=(0, 1, 2)))
            assert [(m.index, m.error) for m in generated.members] == [(0, None), (1, None), (2, None)]
            assert [r.indexes for e in engines for r in e.requests] == [(0, 1, 2), (1,)]
            found = await members_of(generated)
            assert {index: t.index for index, t in found.items()} == {0: 0, 1: 1, 2: 2}
            merged = await ClerkFleet([LocalActor(Clerk())], 1.0).merged(generated.payloads)
            assert [t.index for t in merged] == [0, 1, 2]
            assert fleet.metrics()["rollout/retries"] == 1

        run(scenario())

    def test_another_actor_answers_for_a_lost_one(self) -> None:
        async def scenario() -> None:
            fleet = rollout_fleet(lambda index: FakeEngine(lambda request: 0.05), count=2)
            await fleet.start(0)
            task = asyncio.create_task(fleet.generate(request()))
            await asyncio.sleep(0.01)
            handles(fleet)[0].kill()
            generated = await task
            assert generated.replica == "rollout-1"
            assert all(member.error is None for member in generated.members)
            assert sorted(await members_of(generated)) == [0, 1]

        run(scenario())

    def test_when_all_tries_fail_it_is_reported_never_invented(self) -> None:
        async def scenario() -> None:
            fleet = rollout_fleet(lambda index: FakeEngine(fails=lambda request, i: i == 0), count=2, retries=1)
            await fleet.start(0)
            generated = await fleet.generate(request())
            failed, answered = generated.members
            assert failed.error == "TimeoutError: too slow"
            assert (failed.response_length, failed.token_versions) == (0, ())
            assert answered.error is None
            assert sorted(await members_of(generated)) == [1]

        run(scenario())

    def test_an_actor_that_does_not_answer_is_lost(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("orchestrator.fleet.SLACK_S", 0.01)

        async def scenario() -> None:
            engines = [FakeEngine(lambda request: 60.0), FakeEngine()]
            fleet = rollout_fleet(lambda index: engines[index], count=2)
            await fleet.start(0)
            generated = await fleet.generate(request(timeout_s=0.01))
            assert generated.replica == "rollout-1"
            assert fleet.metrics()["rollout/rollout-0/restarts"] == 1

        run(scenario())

    def test_nobody_serves(self) -> None:
        async def scenario() -> None:
            fleet = rollout_fleet(lambda index: FakeEngine(), start_timeout_s=0.02)
            with pytest.raises(FleetError, match=r"no rollout actor served within 0 s: rollout-0 starting"):
                await fleet.generate(request(timeout_s=0.01))

        run(scenario())


class TestRevival:
    def test_it_serves_again_only_after_a_broadcast(self) -> None:
        async def scenario() -> None:
            engines: list[FakeEngine] = []

            def make(index: int) -> FakeEngine:
                engines.append(FakeEngine())
                return engines[-1]

            news = asyncio.Event()
            fleet = rollout_fleet(make, on_change=news.set)
            learner = FakeLearner()
            await fleet.start(0)
            await fleet.broadcast(learner, 1)  # type: ignore[arg-type]
            handles(fleet)[0].kill()
            waiting = asyncio.create_task(fleet.generate(request()))
            await asyncio.wait_for(news.wait(), 1)
            assert fleet.awaiting_weights
            await asyncio.sleep(0.01)
            assert not waiting.done()
            assert engines[1].requests == []
            learner.weights = 0.5
            await fleet.broadcast(learner, 2)  # type: ignore[arg-type]
            generated = await waiting
            assert not fleet.awaiting_weights
            assert generated.members[0].token_versions == ((2, 4),)
            assert (engines[1].version, engines[1].weights) == (2, 0.5)

        run(scenario())

    def test_before_the_first_broadcast_it_starts_with_the_current_weights(self) -> None:
        async def scenario() -> None:
            fleet = rollout_fleet(lambda index: FakeEngine(lambda request: 0.01))
            await fleet.start(0)
            task = asyncio.create_task(fleet.generate(request()))
            await asyncio.sleep(0.005)
            handles(fleet)[0].kill()
            assert (await task).members[0].token_versions == ((0, 4),)

        run(scenario())

    def test_one_that_comes_back_during_a_broadcast_has_acknowledged_nothing(self) -> None:
        class Slow(FakeLearner):
            async def export_weights(self, version: int) -> AsyncIterator[Any]:
                yield self.weights
                handles(fleet)[0].kill()
                await until(lambda: fleet._replicas[0].restarts == 1 and fleet.awaiting_weights)
                async for item in FakeLearner.export_weights(self, version):
                    yield item

        async def scenario() -> None:
            await fleet.start(0)
            await fleet.broadcast(FakeLearner(), 1)  # type: ignore[arg-type]
            lost = asyncio.create_task(fleet.generate(request()))
            await asyncio.sleep(0)
            await fleet.broadcast(Slow(), 2)  # type: ignore[arg-type]
            assert fleet.awaiting_weights
            assert (await fleet.logprobs([[1, 2]])).keys() == {"rollout-1"}
            await fleet.broadcast(FakeLearner(), 3)  # type: ignore[arg-type]
            assert not fleet.awaiting_weights
            assert all(member.error is None for member in (await lost).members)

        fleet = rollout_fleet(lambda index: FakeEngine(lambda request: 0.01), count=2)
        run(scenario())

    def test_all_are_dead(self) -> None:
        async def scenario() -> None:
            news = asyncio.Event()
            fleet = rollout_fleet(lambda index: FakeEngine(), count=2, max_restarts=0, on_change=news.set)
            await fleet.start(0)
            for actor in handles(fleet):
                actor.kill()
            with pytest.raises(FleetError, match=r"no rollout actor is left: rollout-1 was lost 1 times"):
                await fleet.generate(request())
            assert news.is_set()  # the loop is told as well
            with pytest.raises(FleetError):
                fleet.check()

        run(scenario())

    def test_waiting_requests_hear_of_the_end(self) -> None:
        """They do not sit out their deadline when the last actor could not be started again."""

        async def scenario() -> None:
            class Unstartable(FakeEngine):
                async def start(self, version: int) -> int:
                    if started:
                        await asyncio.sleep(60)
                    started.append(version)
                    return 0

            started: list[int] = []
            fleet = rollout_fleet(lambda index: Unstartable(), max_restarts=1, start_timeout_s=0.05)
            await fleet.start(0)
            handles(fleet)[0].kill()
            with pytest.raises(FleetError, match="did not start again: rollout-0 did not start within 0 s"):
                await asyncio.wait_for(fleet.generate(request(timeout_s=60.0)), 2)

        run(scenario())


class TestBroadcast:
    def test_every_member_gets_it_and_it_is_timed(self) -> None:
        async def scenario() -> None:
            engines = [FakeEngine(), FakeEngine()]
            fleet = rollout_fleet(lambda index: engines[index], count=2)
            learner = FakeLearner()
            learner.weights = 0.25
            await fleet.start(0)
            report = await fleet.broadcast(learner, 1)  # type: ignore[arg-type]
            assert [(e.version, e.weights) for e in engines] == [(1, 0.25)] * 2
            assert report.pause_s == 0.01
            assert report.total_s > 0
            assert report.manifest.records[0].checksum == checksum(0.25)
            answers = await fleet.logprobs([[1, 2, 3]])
            assert {name: values[0].tolist() for name, values in answers.items()} == {
                "rollout-0": [-0.75, -0.75],
                "rollout-1": [-0.75, -0.75],
            }

        run(scenario())

    @pytest.mark.parametrize(
        ("report", "words"),
        [
            (UpdateReport(1, {"model.w": 1}, 0.0), "rollout-1 received tensor 'model.w' damaged"),
            (UpdateReport(1, {}, 0.0), "rollout-1 did not receive tensor 'model.w'"),
            (UpdateReport(1, {"model.w": 0, "x": 1}, 0.0), "rollout-1 received unexpected tensor 'x'"),
            (UpdateReport(0, {"model.w": 0}, 0.0), "rollout-1 says that it serves version 0"),
        ],
    )
    def test_wrong_weights_end_the_run(self, report: UpdateReport, words: str) -> None:
        class Wrong(FakeEngine):
            async def update(self, version: int) -> UpdateReport:
                return report

        async def scenario() -> None:
            fleet = rollout_fleet(lambda index: Wrong() if index == 1 else FakeEngine(), count=2)
            await fleet.start(0)
            with pytest.raises(WeightsNotDelivered, match=f"weights of version 1: {words}"):
                await fleet.broadcast(FakeLearner(), 1)  # type: ignore[arg-type]

        run(scenario())

    def test_a_member_lost_meanwhile_does_not_hold_up_the_others(self) -> None:
        class Fragile(FakeEngine):
            async def update(self, version: int) -> UpdateReport:
                handles(fleet)[0].kill()
                await asyncio.sleep(60)
                raise AssertionError

        async def scenario() -> None:
            await fleet.start(0)
            await fleet.broadcast(FakeLearner(), 1)  # type: ignore[arg-type]
            assert (await fleet.logprobs([[1, 2]])).keys() == {"rollout-1"}

        fleet = rollout_fleet(lambda index: Fragile() if index == 0 else FakeEngine(), count=2)
        run(scenario())

    def test_one_that_does_not_load_is_named(self) -> None:
        class Stuck(FakeEngine):
            async def update(self, version: int) -> UpdateReport:
                await asyncio.sleep(60)
                raise AssertionError

        async def scenario() -> None:
            fleet = rollout_fleet(lambda index: Stuck(), weights_timeout_s=0.02)
            await fleet.start(0)
            with pytest.raises(FleetError, match="rollout-0 did not load weights within 0 s"):
                await fleet.broadcast(FakeLearner(), 1)  # type: ignore[arg-type]

        run(scenario())

    def test_one_that_is_lost_while_it_is_probed_is_left_out(self) -> None:
        async def scenario() -> None:
            fleet = rollout_fleet(lambda index: FakeEngine(), count=2)
            await fleet.start(0)
            handles(fleet)[1].kill()
            assert (await fleet.logprobs([[1, 2]])).keys() == {"rollout-0"}

        run(scenario())

    def test_a_start_that_takes_too_long_is_named(self) -> None:
        class Slow(FakeEngine):
            async def start(self, version: int) -> int:
                await asyncio.sleep(60)
                return 0

        async def scenario() -> None:
            fleet = rollout_fleet(lambda index: Slow() if index else FakeEngine(), count=2, start_timeout_s=0.02)
            with pytest.raises(FleetError, match="rollout-1 did not start within 0 s"):
                await fleet.start(0)

        run(scenario())


class TestRewards:
    async def score(self, fleet: RewardFleet, count: int = 2) -> list[RewardResult]:
        generated = await FakeEngine().generate(request(indexes=tuple(range(count))))
        return await fleet.score(generated[1], {}, None, None)

    def test_the_least_loaded_judges(self) -> None:
        async def scenario() -> None:
            fleet = reward_fleet([lambda t: 0.0, lambda t: 1.0])
            done = await asyncio.gather(self.score(fleet), self.score(fleet))
            assert [[result.value for result in results] for results in done] == [[0.0, 0.0], [1.0, 1.0]]

        run(scenario())

    def test_a_lost_actor_is_asked_again(self) -> None:
        class Restarted(FakeJudge):
            async def score_group(self, *arguments: Any) -> list[RewardResult]:
                calls.append(1)
                if len(calls) == 1:
                    raise RayActorError
                return await super().score_group(*arguments)

        async def scenario() -> None:
            fleet = RewardFleet([LocalActor(Restarted())], deadline_s=1.0, tries=2, alarm=ErrorAlarm(1.0))
            assert [result.value for result in await self.score(fleet)] == [0.0, 1.0]
            assert len(calls) == 2

        calls: list[int] = []
        run(scenario())

    @pytest.mark.parametrize("fault", ["dead", "slow"])
    def test_no_verdict_is_a_status_not_a_number(self, fault: str) -> None:
        class Slow(FakeJudge):
            async def score_group(self, *arguments: Any) -> list[RewardResult]:
                await asyncio.sleep(60)
                raise AssertionError

        async def scenario() -> None:
            actor = LocalActor(Slow())
            actor.dead = fault == "dead"
            fleet = RewardFleet([actor], deadline_s=0.02, tries=2, alarm=ErrorAlarm(1.0))
            words = "reward-0 was lost" if fault == "dead" else "reward-0 did not answer within 0 s"
            with pytest.raises(RewardsLost, match=words) as caught:
                await self.score(fleet)
            verdicts = lost_rewards(3, str(caught.value))
            assert [(v.value, v.status) for v in verdicts] == [(None, Status.ERRORED)] * 3

        run(scenario())

    def test_too_many_failures_stop_the_run(self) -> None:
        async def scenario() -> None:
            failed = RewardResult(None, Status.ERRORED, detail={"math": {"error": "no such module"}})
            actor = LocalActor(FakeJudge(lambda t: failed))
            fleet = RewardFleet([actor], deadline_s=1.0, tries=1, alarm=ErrorAlarm(0.05, minimum=4))
            await self.score(fleet)
            with pytest.raises(FleetError, match=r"reward\.max_error_ratio: 4 of the last 4 .*'math'.*no such module"):
                await self.score(fleet)

        run(scenario())

    def test_a_start_that_takes_too_long_is_named(self) -> None:
        class Slow(FakeJudge):
            async def start(self) -> None:
                await asyncio.sleep(60)

        async def scenario() -> None:
            fleet = RewardFleet([LocalActor(Slow())], deadline_s=1.0, tries=1, alarm=ErrorAlarm(1.0))
            with pytest.raises(FleetError, match="reward-0 did not start within 0 s"):
                await fleet.start(0.02)

        run(scenario())


def test_a_clerk_that_does_not_answer_is_an_error() -> None:
    class Slow(Clerk):
        async def completions(self, payload: Any) -> list[str]:  # type: ignore[override]
            await asyncio.sleep(60)
            raise AssertionError

    async def scenario() -> None:
        with pytest.raises(FleetError, match="a clerk did not read out a payload within 0 s"):
            await ClerkFleet([LocalActor(Slow())], 0.02).completions(())

    run(scenario())
