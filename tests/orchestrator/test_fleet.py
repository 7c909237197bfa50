"""The fleets over local actors: who is asked, what happens when one is lost, and when it serves again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any

import pytest
from fakes import (
    FakeEngine,
    FakeJudge,
    FakeLearner,
    LocalActor,
    Reference,
    checksum,
    patch_ray,
    reward_fleet,
    rollout_fleet,
)
from ray.exceptions import ObjectLostError, RayActorError, RayTaskError

from orchestrator.clerks import Clerk, ClerkFleet
from orchestrator.fleet import FleetError, Generated, PartialsLost, RolloutFleet
from orchestrator.reward_fleet import RewardFleet, RewardsLost, lost_rewards
from reward_workers.alarm import ErrorAlarm
from rollout_workers.engine import EngineDied, UpdateReport
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


async def notice_loss(fleet: RolloutFleet, replica: str = "rollout-0") -> None:
    """An actor's end is noticed by the next request that goes to it."""
    generated = await fleet.generate(request("lost"))
    assert (generated.replica, generated.payload) == (replica, None)
    assert all(m.error is not None and m.error.startswith(f"{replica} was lost") for m in generated.members)


async def answers_of(generated: Generated) -> dict[int, Trajectory]:
    return {answer.index: answer for answer in await generated.payload}


def slow(request: RolloutRequest) -> float:
    return 60.0


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

    def test_a_member_that_fails_is_reported_never_invented(self) -> None:
        async def scenario() -> None:
            engine = FakeEngine(fails=lambda request, i: i == 0)
            fleet = rollout_fleet(lambda index: engine)
            await fleet.start(0)
            generated = await fleet.generate(request())
            failed, answered = generated.members
            assert failed.error == "TimeoutError: too slow"
            assert (failed.response_length, failed.token_versions) == (0, ())
            assert answered.error is None
            assert sorted(await answers_of(generated)) == [1]
            assert len(engine.requests) == 1  # whether it is asked again is not the fleet's to decide

        run(scenario())

    def test_where_no_member_answered_there_is_no_payload(self) -> None:
        async def scenario() -> None:
            fleet = rollout_fleet(lambda index: FakeEngine(fails=lambda request, i: True))
            await fleet.start(0)
            generated = await fleet.generate(request())
            assert [m.error for m in generated.members] == ["TimeoutError: too slow"] * 2
            assert generated.payload is None

        run(scenario())

    def test_a_lost_actors_members_are_reported_and_another_answers_next_time(self) -> None:
        async def scenario() -> None:
            fleet = rollout_fleet(lambda index: FakeEngine(lambda request: 0.05), count=2)
            await fleet.start(0)
            task = asyncio.create_task(notice_loss(fleet))
            await asyncio.sleep(0.01)
            handles(fleet)[0].kill()
            await task
            again = await fleet.generate(request())
            assert again.replica == "rollout-1"
            assert sorted(await answers_of(again)) == [0, 1]

        run(scenario())

    def test_a_dead_engine_is_a_lost_actor(self) -> None:
        class Dead(FakeEngine):
            async def generate(self, request: RolloutRequest, *partials: Any) -> Any:
                raise RayTaskError("generate", "", EngineDied("the vLLM engine process died")).as_instanceof_cause()

        async def scenario() -> None:
            fleet = rollout_fleet(lambda index: FakeEngine() if index else Dead(), count=2)
            await fleet.start(0)
            generated = await fleet.generate(request())
            assert generated.members[0].error == "rollout-0 was lost: the vLLM engine process died"
            assert fleet.metrics()["rollout/rollout-0/restarts"] == 1

        run(scenario())

    def test_an_actor_that_does_not_answer_is_lost(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("orchestrator.fleet.SLACK_S", 0.01)

        async def scenario() -> None:
            fleet = rollout_fleet(lambda index: FakeEngine(slow), count=2)
            await fleet.start(0)
            generated = await fleet.generate(request(timeout_s=0.01))
            assert generated.members[1].error == "rollout-0 was lost: it did not answer group g within 0 s"
            assert fleet.metrics()["rollout/rollout-0/restarts"] == 1

        run(scenario())

    def test_nobody_serves(self) -> None:
        async def scenario() -> None:
            fleet = rollout_fleet(lambda index: FakeEngine(), start_timeout_s=0.02)
            with pytest.raises(FleetError, match=r"no rollout actor served within 0 s: rollout-0 starting"):
                await fleet.generate(request(timeout_s=0.01))

        run(scenario())


def fates(generated: Generated) -> list[str]:
    return ["failed" if m.error else "parked" if m.parked else "whole" for m in generated.members]


class TestPark:
    """Interrupting what is in flight, and going on with it: also where an actor, or what was written, is lost."""

    async def started(self, *engines: FakeEngine, **limits: Any) -> RolloutFleet:
        """A fleet of these workers; one that has to be replaced gets a new one, which is quick."""
        workers = dict(enumerate(engines))
        fleet = rollout_fleet(lambda index: workers.pop(index, FakeEngine()), count=len(engines), **limits)
        await fleet.start(0)
        return fleet

    async def asked(self, fleet: RolloutFleet, *requests: RolloutRequest) -> list[asyncio.Task[Generated]]:
        """Requests in flight."""
        tasks = [asyncio.create_task(fleet.generate(r)) for r in requests]
        workers = [actor.worker for actor in handles(fleet)]
        await until(lambda: sum(len(worker.writing) for worker in workers) == len(requests))
        return tasks

    def test_requests_in_flight_end_with_what_they_have_and_go_on_elsewhere(self) -> None:
        async def scenario() -> None:
            first, second = FakeEngine(slow, parked_tokens=3), FakeEngine(version=5)
            fleet = await self.started(first, second)
            [task] = await self.asked(fleet, request())
            assert await fleet.park() == 2
            assert task.done()  # when `park` returns, there is nothing left to wait for
            generated = await task
            assert fates(generated) == ["parked"] * 2
            assert [m.response_length for m in generated.members] == [3, 3]
            handles(fleet)[0].kill()
            await notice_loss(fleet)
            second.version = 1
            resumed = await fleet.generate(request(), [generated.payload])
            assert (resumed.replica, fates(resumed)) == ("rollout-1", ["whole"] * 2)
            assert [m.token_versions for m in resumed.members] == [((0, 3), (1, 1))] * 2
            before, after = await answers_of(generated), await answers_of(resumed)
            for index in (0, 1):
                length = len(before[index].token_ids)
                assert after[index].token_ids[:length].tolist() == before[index].token_ids.tolist()

        run(scenario())

    def test_only_the_groups_that_were_named_are_met(self) -> None:
        async def scenario() -> None:
            fleet = await self.started(FakeEngine(slow), FakeEngine(slow))
            tasks = await self.asked(fleet, *(request(name) for name in "abcd"))
            assert await fleet.park(["b", "c", "x"]) == 4
            assert [task.done() for task in tasks] == [False, True, True, False]
            assert await fleet.park() == 4
            assert [fates(await task) for task in tasks] == [["parked"] * 2] * 4
            assert await fleet.park() == 0  # nothing is in flight
            resumed = await asyncio.gather(*self.short(fleet, tasks, "abcd"))
            assert [fates(generated) for generated in resumed] == [["whole"] * 2] * 4

        run(scenario())

    def short(self, fleet: RolloutFleet, tasks: Any, names: str) -> list[Coroutine[Any, Any, Generated]]:
        for actor in handles(fleet):
            actor.worker.delay_s = lambda request: 0.0
        return [fleet.generate(request(name), [task.result().payload]) for name, task in zip(names, tasks, strict=True)]

    def test_twice_at_once_interrupts_once(self) -> None:
        async def scenario() -> None:
            fleet = await self.started(FakeEngine(slow))
            [task] = await self.asked(fleet, request())
            assert sorted(await asyncio.gather(fleet.park(), fleet.park(["g"]))) == [0, 2]
            assert fates(await task) == ["parked"] * 2

        run(scenario())

    def test_before_the_first_token_there_is_nothing_to_keep(self) -> None:
        async def scenario() -> None:
            fleet = await self.started(FakeEngine(slow, parked_tokens=0))
            [task] = await self.asked(fleet, request())
            assert await fleet.park() == 2
            generated = await task
            assert (fates(generated), generated.payload) == (["parked"] * 2, None)
            [resumed] = await asyncio.gather(*self.short_without(fleet))
            assert fates(resumed) == ["whole"] * 2

        run(scenario())

    def short_without(self, fleet: RolloutFleet) -> list[Coroutine[Any, Any, Generated]]:
        handles(fleet)[0].worker.delay_s = lambda request: 0.0
        return [fleet.generate(request())]

    def test_a_request_that_its_actor_had_not_begun_is_met_by_the_next_round(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A call whose arguments are still under way is not in the engine when `park` arrives there."""
        monkeypatch.setattr("orchestrator.fleet.PARK_ROUND_S", 0.01)

        async def scenario() -> None:
            engine = FakeEngine(slow)
            fleet = await self.started(engine)
            arriving: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            late = Reference(handles(fleet)[0], arriving)
            task = asyncio.create_task(fleet.generate(request(), [late]))
            await asyncio.sleep(0)
            parking = asyncio.create_task(fleet.park())
            await until(lambda: ("park", 0) in engine.log)
            assert not parking.done()
            arriving.set_result(())
            assert await parking == 2
            assert fates(await task) == ["parked"] * 2

        run(scenario())

    def test_a_replica_that_dies_while_it_parks_is_lost_and_the_others_are_parked(self) -> None:
        class Dying(FakeEngine):
            async def park(self, group_ids: Sequence[str]) -> int:
                handles(fleet)[0].kill()
                await asyncio.sleep(60)
                raise AssertionError

        async def scenario() -> None:
            nonlocal fleet
            fleet = await self.started(Dying(slow), FakeEngine(slow))
            tasks = await self.asked(fleet, request("a"), request("b"))
            assert await fleet.park() == 2
            assert [fates(await task) for task in tasks] == [["failed"] * 2, ["parked"] * 2]
            assert fleet.metrics()["rollout/rollout-0/restarts"] == 1

        fleet: Any = None
        run(scenario())

    def test_a_dead_engine_under_a_living_actor_is_lost_as_well(self) -> None:
        class Dead(FakeEngine):
            async def park(self, group_ids: Sequence[str]) -> int:
                raise RayTaskError("park", "", EngineDied("the vLLM engine process died")).as_instanceof_cause()

        async def scenario() -> None:
            fleet = await self.started(Dead(slow))
            [task] = await self.asked(fleet, request())
            assert await fleet.park() == 0
            assert fates(await task) == ["failed"] * 2
            assert fleet.metrics()["rollout/rollout-0/restarts"] == 1

        run(scenario())

    def test_one_that_does_not_park_in_time_is_lost(self) -> None:
        class Stuck(FakeEngine):
            async def park(self, group_ids: Sequence[str]) -> int:
                return 0

        async def scenario() -> None:
            fleet = await self.started(Stuck(slow), weights_timeout_s=0.02)
            [task] = await self.asked(fleet, request())
            assert await fleet.park() == 0
            assert fates(await task) == ["failed"] * 2

        run(scenario())

    def test_a_replica_lost_before_its_groups_go_on_costs_nothing(self) -> None:
        async def scenario() -> None:
            fleet = await self.started(FakeEngine(slow), FakeEngine())
            [task] = await self.asked(fleet, request())
            await fleet.park()
            handles(fleet)[0].kill()
            lost = await fleet.generate(request(), [(await task).payload])  # nobody noticed yet
            assert (lost.replica, fates(lost)) == ("rollout-0", ["failed"] * 2)
            resumed = await fleet.generate(request(), [(await task).payload])
            assert (resumed.replica, fates(resumed)) == ("rollout-1", ["whole"] * 2)

        run(scenario())

    def test_lost_partials_are_the_groups_end_and_nobodys_fault(self) -> None:
        async def scenario() -> None:
            fleet = await self.started(FakeEngine(), FakeEngine())
            gone: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            gone.set_exception(ObjectLostError("0", None, ""))
            reference = Reference(handles(fleet)[0], gone)
            with pytest.raises(PartialsLost, match="the partial answers of group g are lost"):
                await asyncio.wait_for(fleet.generate(request(), [reference]), 1)
            assert fleet.metrics()["rollout/rollout-0/restarts"] == 0
            assert (await fleet.generate(request())).replica == "rollout-0"
            assert await fleet.park() == 0  # the request that failed is not waited for

        run(scenario())

    def test_whose_fault_an_error_is_while_partials_are_passed(self) -> None:
        """The death of the actor itself is not mistaken for the loss of what it was given."""

        async def scenario() -> None:
            fleet = await self.started(FakeEngine(slow), FakeEngine(slow))
            [task] = await self.asked(fleet, request())
            await fleet.park()
            payload = (await task).payload
            going_on = asyncio.create_task(fleet.generate(request(), [payload]))
            await until(lambda: len(handles(fleet)[0].worker.writing) == 1)
            handles(fleet)[0].kill()
            assert fates(await going_on) == ["failed"] * 2
            assert fleet.metrics()["rollout/rollout-0/restarts"] == 1

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
            await notice_loss(fleet)
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
            fleet = rollout_fleet(lambda index: FakeEngine())
            await fleet.start(0)
            handles(fleet)[0].kill()
            await notice_loss(fleet)
            assert (await fleet.generate(request())).members[0].token_versions == ((0, 4),)

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
            lost = asyncio.create_task(notice_loss(fleet))
            await asyncio.sleep(0)
            await fleet.broadcast(Slow(), 2)  # type: ignore[arg-type]
            assert fleet.awaiting_weights
            assert (await fleet.logprobs([[1, 2]])).keys() == {"rollout-1"}
            await fleet.broadcast(FakeLearner(), 3)  # type: ignore[arg-type]
            assert not fleet.awaiting_weights
            await lost
            assert all(member.error is None for member in (await fleet.generate(request())).members)

        fleet = rollout_fleet(lambda index: FakeEngine(lambda request: 0.01), count=2)
        run(scenario())

    def test_all_are_dead(self) -> None:
        async def scenario() -> None:
            news = asyncio.Event()
            fleet = rollout_fleet(lambda index: FakeEngine(), count=2, max_restarts=0, on_change=news.set)
            await fleet.start(0)
            for actor in handles(fleet):
                actor.kill()
            for replica in ("rollout-0", "rollout-1"):
                await notice_loss(fleet, replica)
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
            await notice_loss(fleet)
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

    def test_an_engine_that_dies_while_it_loads_is_replaced(self) -> None:
        class Dead(FakeEngine):
            async def update(self, version: int) -> UpdateReport:
                raise RayTaskError("update", "", EngineDied("the vLLM engine process died")).as_instanceof_cause()

        async def scenario() -> None:
            fleet = rollout_fleet(lambda index: FakeEngine() if index else Dead(), count=2)
            await fleet.start(0)
            await fleet.broadcast(FakeLearner(), 1)  # type: ignore[arg-type]
            assert (await fleet.logprobs([[1, 2]])).keys() == {"rollout-1"}
            assert fleet.metrics()["rollout/rollout-0/restarts"] == 1

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

    @pytest.mark.parametrize("method", ["sleep", "wake"])
    def test_f22_one_that_is_lost_while_devices_change_hands_is_replaced(self, method: str) -> None:
        async def scenario() -> None:
            fleet = rollout_fleet(lambda index: FakeEngine(), count=2)
            await fleet.start(0)
            handles(fleet)[1].kill()
            await getattr(fleet, method)()
            await until(lambda: fleet.metrics()["rollout/rollout-1/restarts"] == 1)

        run(scenario())

    def test_no_engine_starts_on_a_device_that_the_learner_has(self) -> None:
        async def scenario() -> None:
            engines: list[FakeEngine] = []

            def engine(index: int) -> FakeEngine:
                engines.append(FakeEngine())
                return engines[-1]

            fleet = rollout_fleet(engine, count=2)
            await fleet.start(0)
            handles(fleet)[1].kill()
            await fleet.sleep()
            for _ in range(20):
                await asyncio.sleep(0)
            assert fleet.metrics()["rollout/rollout-1/restarts"] == 1
            assert len(engines) == 2
            await fleet.wake()
            await until(lambda: len(engines) == 3 and fleet._replicas[1].state == "serving")
            assert [[what for what, _ in e.log] for e in engines] == [["sleep", "wake"], [], []]

        run(scenario())

    def test_an_engine_that_is_starting_sleeps_before_the_learner_works(self) -> None:
        async def scenario() -> None:
            may_start = asyncio.Event()

            class Slow(FakeEngine):
                async def start(self, version: int) -> int:
                    await may_start.wait()
                    return await super().start(version)

            second = [FakeEngine(), Slow()]
            fleet = rollout_fleet(lambda index: second.pop(0) if index else FakeEngine(), count=2)
            await fleet.start(0)
            await fleet.broadcast(FakeLearner(), 1)  # type: ignore[arg-type]
            slow = second[0]
            handles(fleet)[1].kill()
            await fleet.logprobs([[1, 2]])  # where its loss is noticed
            await until(lambda: not second)
            asleep = asyncio.create_task(fleet.sleep())
            for _ in range(20):
                await asyncio.sleep(0)
            assert not asleep.done()
            may_start.set()
            await asleep
            assert fleet.awaiting_weights
            await fleet.wake()
            assert [what for what, _ in slow.log] == ["sleep", "wake"]

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

    def test_a_lenient_fleet_asks_once_and_its_failures_stop_nothing(self) -> None:
        calls: list[int] = []

        class Failing(FakeJudge):
            async def score_group(self, *arguments: Any) -> list[RewardResult]:
                calls.append(1)
                if len(calls) == 30:
                    raise RayActorError
                return await super().score_group(*arguments)

        async def scenario() -> None:
            actor = LocalActor(Failing(lambda t: RewardResult(None, Status.ERRORED)))
            fleet = RewardFleet([actor], deadline_s=1.0, tries=2, alarm=ErrorAlarm(0.05, minimum=10))
            lenient = fleet.lenient()
            for _ in range(29):
                await self.score(lenient)
            with pytest.raises(RewardsLost):
                await self.score(lenient)
            assert len(calls) == 30
            await self.score(fleet)  # whose alarm has seen nothing of all that

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
