"""A reward actor or one of its processes is killed in mid-batch: no verdict is lost, none is invented, nothing stays behind.

The reward function leaves a note of each call and waits for a word before it answers, so that what is in flight is known.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from orchestrator.reward_fleet import RewardFleet
from reward_workers.alarm import ErrorAlarm
from reward_workers.reward import RewardFunction, RewardResult, RewardSet, Status
from reward_workers.worker import RewardWorker
from rollout_workers.trajectory import Trajectory

pytestmark = [pytest.mark.engine, pytest.mark.timeout(240)]

GROUPS, SIZE = 6, 4
WITHIN_S = 90.0
PROGRAM = {"kind": "function", "entry_point": "square", "cases": [{"args": [3], "expected": 9}]}


@dataclass(frozen=True)
class Note:
    """A call that has begun: the process that it runs in, and the actor whose process that is."""

    group_id: str
    index: int
    process: int
    actor: int


@dataclass(frozen=True)
class Stage:
    """The folder of the notes."""

    folder: Path

    def notes(self) -> list[Note]:
        parts = [path.name.split(".") for path in self.folder.glob("g*.*")]
        return [Note(group_id, int(index), int(process), int(actor)) for group_id, index, process, actor in parts]

    def calls(self) -> Counter[tuple[str, int]]:
        """How often each trajectory was judged, or begun to be."""
        return Counter((note.group_id, note.index) for note in self.notes())

    async def all_begun(self) -> list[Note]:
        """The notes of the first call of each group, once they are there."""
        await until(lambda: len(self.notes()) == GROUPS)
        return self.notes()

    def go(self) -> None:
        (self.folder / "go").touch()


def held(folder: str) -> Callable[..., float]:
    """The reward function; a local one, so that it travels by value."""

    def digest(trajectory: Trajectory) -> float:
        where = f"{trajectory.group_id}.{trajectory.index}.{os.getpid()}.{os.getppid()}"
        (Path(folder) / where).touch()
        while not (Path(folder) / "go").exists():
            time.sleep(0.01)
        return int.from_bytes(hashlib.sha256(trajectory.completion.encode()).digest()[:6], "big") / 2**48

    return digest


def group(name: str, completions: list[str] | None = None) -> list[Trajectory]:
    return [
        Trajectory.from_messages(
            [{"role": "user", "content": "?"}, {"role": "assistant", "content": text}],
            group_id=name,
            prompt_id="p",
            index=index,
        )
        for index, text in enumerate(completions or [f"{name}, answer {index}" for index in range(SIZE)])
    ]


async def until(condition: Callable[[], bool], timeout_s: float = WITHIN_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that"
        await asyncio.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def descendants(pid: int) -> dict[int, str]:
    """All processes below one, with their command lines."""
    found: dict[int, str] = {}
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, task.read_text().split()):
                found[child] = Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                found |= descendants(child)
    return found


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


Scenario = Callable[[RewardFleet], Any]


@pytest.fixture
def play(stage: Stage, runner: asyncio.Runner, ray_session: None) -> Callable[..., None]:
    """Play a scenario on a fleet of `actors`, made as a run makes them."""

    def on_fleet(scenario: Scenario, *, actors: int, retries: int = 1) -> None:
        import ray

        from orchestrator.cluster import REWARD_ACTOR

        rewards = RewardSet(
            [
                RewardFunction("held", held(str(stage.folder))),
                RewardFunction("math", "reward_workers.math.grade_math"),
                RewardFunction("code", "reward_workers.code.grade_code"),
            ]
        )
        actor = ray.remote(RewardWorker).options(**REWARD_ACTOR)
        made = [
            actor.remote(rewards, timeout_s=WITHIN_S, retries=retries, processes=REWARD_ACTOR["max_concurrency"])
            for _ in range(actors)
        ]
        fleet = RewardFleet(made, deadline_s=WITHIN_S, tries=1 + retries, alarm=ErrorAlarm(1.0))

        async def act() -> None:
            await fleet.start(WITHIN_S)
            try:
                await asyncio.wait_for(scenario(fleet), 2 * WITHIN_S)
            finally:
                stage.go()
                await fleet.close()

        runner.run(act())

    return on_fleet


async def score(fleet: RewardFleet, members: list[Trajectory], names: list[str], **columns: Any) -> list[RewardResult]:
    import ray

    return await fleet.score(ray.put(members), columns, names, None)


def batch(fleet: RewardFleet) -> dict[str, asyncio.Task[list[RewardResult]]]:
    """All groups, on their way."""
    names = [f"g{number}" for number in range(GROUPS)]
    return {name: asyncio.create_task(score(fleet, group(name), ["held"])) for name in names}


def expected(name: str) -> list[float]:
    """The verdicts on a group that nobody kills."""
    texts = [trajectory.completion for trajectory in group(name)]
    return [int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big") / 2**48 for text in texts]


async def give_children(fleet: RewardFleet) -> None:
    """Let a process of the first actor have what it keeps for programs and for algebra."""
    [passed] = await score(fleet, group("program", ["def square(n): return n * n"]), ["code"], tests=PROGRAM)
    [equal] = await score(fleet, group("algebra", [r"\boxed{2\sin x\cos x}"]), ["math"], answer=r"\sin 2x")
    assert (passed.value, equal.value) == (1.0, 1.0)


@pytest.mark.parametrize("actors", [1, 2])
def test_an_actor_is_killed_in_mid_batch(play: Callable[..., None], stage: Stage, actors: int) -> None:
    async def scenario(fleet: RewardFleet) -> None:
        await give_children(fleet)
        judging = batch(fleet)
        begun = await stage.all_begun()
        of_actor = {pid: descendants(pid) for pid in {note.actor for note in begun}}
        assert len(of_actor) == actors
        killed = max(of_actor, key=lambda pid: len(of_actor[pid]))  # the one with the children
        below = of_actor[killed]
        lost = {note.group_id for note in begun if note.actor == killed}
        assert len(lost) == GROUPS // actors
        assert {note.process for note in begun if note.actor == killed} <= below.keys()
        assert any("sandbox.zygote" in title for title in below.values())
        assert sum("reward_workers.process" in title for title in below.values()) == len(lost) + 1  # for the algebra

        os.kill(killed, signal.SIGKILL)
        await until(lambda: not alive(killed))
        judging["g-late"] = asyncio.create_task(score(fleet, group("g-late"), ["held"]))  # while the actor is away
        await until(lambda: not any(alive(pid) for pid in below))
        # The groups that were lost are judged anew, from their first answer on; the others were not disturbed.
        await until(lambda: len(stage.notes()) == GROUPS + len(lost) + 1)
        assert not any(task.done() for task in judging.values())
        stage.go()
        for name, task in judging.items():
            results = await task
            assert [result.status for result in results] == [Status.SCORED] * SIZE
            assert [result.value for result in results] == expected(name)
        assert stage.calls() == {
            (name, index): 2 if index == 0 and name in lost else 1 for name in judging for index in range(SIZE)
        }
        [again] = await score(fleet, group("g-after", ["x"]), ["held"])
        assert again.status is Status.SCORED
        await fleet.start(WITHIN_S)  # all of them serve

    play(scenario, actors=actors)


@pytest.mark.parametrize("retries", [1, 0])
def test_a_process_of_an_actor_is_killed_in_mid_batch(play: Callable[..., None], stage: Stage, retries: int) -> None:
    async def scenario(fleet: RewardFleet) -> None:
        await give_children(fleet)
        judging = batch(fleet)
        begun = await stage.all_begun()
        below = {note.process: descendants(note.process) for note in begun}
        victim = max(begun, key=lambda note: len(below[note.process]))
        assert len(below[victim.process]) >= 2  # what runs programs, and what does algebra
        os.kill(victim.process, signal.SIGKILL)
        await until(lambda: not any(alive(pid) for pid in (victim.process, *below[victim.process])))
        stage.go()
        for name, task in judging.items():
            results = await task
            values, statuses = expected(name), [Status.SCORED] * SIZE
            if name == victim.group_id and not retries:  # no verdict is a status, never a number
                assert "killed by SIGKILL" in results[0].detail["held"]["error"]
                assert (results[0].value, results[0].status) == (None, Status.ERRORED)
                results, values, statuses = results[1:], values[1:], statuses[1:]
            assert [result.status for result in results] == statuses
            assert [result.value for result in results] == values
        again = Counter({(victim.group_id, 0): retries})
        assert stage.calls() == Counter({(name, index): 1 for name in judging for index in range(SIZE)}) + again
        assert {note.actor for note in stage.notes()} == {victim.actor}

    play(scenario, actors=1, retries=retries)
