"""The rollout fleet on real Ray actors: payloads pass from one to the next, and whose fault a failed call is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from replicas import Hollow

from orchestrator.fleet import Generated, PartialsLost, RolloutFleet
from rollout_workers.worker import RolloutRequest, SamplingSettings

pytestmark = pytest.mark.engine

Fleet = tuple[RolloutFleet, list[Any], Callable[[Any], Any]]


@pytest.fixture(scope="module")
def fleet(runner: asyncio.Runner, ray_session: None) -> Iterator[Fleet]:
    """Two replicas, their actors, and a way to wait for something on them."""
    import ray

    actors: list[Any] = []

    def make(index: int) -> Any:
        actors.append(ray.remote(Hollow).options(num_cpus=0, max_concurrency=10).remote())
        return actors[-1]

    rollouts = RolloutFleet(
        make,
        2,
        transport="shared_memory",
        workers_per_engine=1,
        start_timeout_s=30.0,
        weights_timeout_s=10.0,
        max_restarts=1,
        on_change=lambda: None,
    )

    async def within(work: Any) -> Any:
        return await asyncio.wait_for(work, 60)

    def run(work: Any) -> Any:
        return runner.run(within(work))

    run(rollouts.start(0))
    yield rollouts, actors, run
    run(rollouts.close())


def request(name: str = "g") -> RolloutRequest:
    return RolloutRequest(name, "p", 0, ({"role": "user", "content": "?"},), (0,), SamplingSettings(1.0, 8), 30.0)


def test_partials_reach_whichever_actor_goes_on(fleet: Fleet) -> None:
    rollouts, _, run = fleet
    generated: Generated = run(rollouts.generate(request()))
    for written in (2, 3):
        generated = run(rollouts.generate(request(), [generated.payload]))
        assert generated.members[0].response_length == written
    (answer,) = run(_value(generated.payload))
    assert answer.token_ids.tolist() == [0, 1, 2]


def test_lost_partials_end_their_group_and_no_actor(fleet: Fleet) -> None:
    """Ray makes the error of a call whose argument is gone an instance of the argument's error."""
    import ray

    rollouts, actors, run = fleet
    third = ray.remote(Hollow).options(num_cpus=0).remote()
    with pytest.raises(PartialsLost, match="the partial answers of group g are lost"):
        run(rollouts.generate(request(), [third.die.remote()]))
    assert len(actors) == 2
    assert run(rollouts.generate(request())).replica == "rollout-0"


def test_an_actor_that_dies_with_partials_in_hand_is_lost(fleet: Fleet) -> None:
    rollouts, actors, run = fleet
    payload = run(rollouts.generate(request())).payload

    async def scenario() -> Generated:
        answering = asyncio.create_task(rollouts.generate(request("g-never"), [payload]))
        await actors[0].park.remote([])  # it has begun by then
        actors[0].die.remote()
        return await answering

    generated = run(scenario())
    assert (generated.replica, generated.payload) == ("rollout-0", None)
    assert str(generated.members[0].error).startswith("rollout-0 was lost")
    going_on = run(rollouts.generate(request(), [payload]))
    assert going_on.members[0].response_length == 2  # what the other had written is still there


async def _value(reference: Any) -> Any:
    return await reference
