"""The replicas of one reward model as a fleet: scores for every group in bounded time, or one status that says why not.

Contract:
- A group goes to the least loaded replica that is up. When that is lost or late, another is asked, or the same again where
  there is no other, `tries` times in all; then the verdict is a status (`errored`, `timed_out`), never a number.
- A replica that was lost is restarted by Ray, and is up again when it has loaded its model. Groups wait for that where no
  other replica is up, at most `start_timeout_s`. One that can't load its model any more is given up.
- One that is late is not ended: it may be busy with other groups.
Every await has a deadline whose error names the replica.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from ray.exceptions import RayActorError, RayError, RayTaskError

from orchestrator.fleet import SLACK_S, FleetError
from orchestrator.replica import is_of_an_argument
from reward_workers.reward_model_vllm import ScorerDied
from rollout_workers.trajectory import RewardResult, Status

logger = logging.getLogger(__name__)

REVIVAL_ROUND_S = 1.0  # Ray gives no sign when an actor is back: it is asked now and then


@dataclass(eq=False)
class _Replica:
    name: str
    handle: Any
    state: str = "up"  # up | restarting | dead
    groups: int = 0  # that it is scoring
    revival: asyncio.Task[None] | None = field(default=None, repr=False)


class RewardModelFleet:
    """`deadline_s` is for one group at one replica, what waits before it included."""

    def __init__(
        self, name: str, actors: Sequence[Any], *, deadline_s: float, tries: int, start_timeout_s: float
    ) -> None:
        self.name = name
        self._replicas = [_Replica(f"reward model {name}-{i}", actor) for i, actor in enumerate(actors)]
        self._deadline_s = deadline_s
        self._tries = tries
        self._start_timeout_s = start_timeout_s
        self._news = asyncio.Event()  # a replica is up again, or none will be

    async def start(self) -> None:
        """Load the model everywhere. Raises what loading raises, FleetError when it takes too long."""
        await asyncio.gather(*(self._start(replica) for replica in self._replicas))

    async def _start(self, replica: _Replica) -> None:
        try:
            await asyncio.wait_for(replica.handle.start.remote(), self._start_timeout_s)
        except TimeoutError as error:
            raise FleetError(f"{replica.name} did not start within {self._start_timeout_s:.0f} s") from error

    async def score(self, trajectories: Any) -> list[RewardResult] | RewardResult:
        """Verdicts on the trajectories behind a reference, in order; one status where no replica could give them.

        Raises the RayTaskError of trajectories that are gone.
        """
        import ray

        failure = RewardResult(
            None, Status.ERRORED, detail={"error": f"no replica of reward model {self.name} is left"}
        )
        asked: set[_Replica] = set()
        for _ in range(self._tries):
            replica = await self._pick(asked)
            if replica is None:
                break
            asked.add(replica)
            status = Status.ERRORED
            replica.groups += 1
            reference = replica.handle.score_group.remote(trajectories)
            try:
                verdicts: list[RewardResult] = await asyncio.wait_for(reference, self._deadline_s)
            except TimeoutError:
                ray.cancel(reference)
                status, problem = Status.TIMED_OUT, f"it gave no scores within {self._deadline_s:.0f} s"
            except RayError as error:
                if is_of_an_argument(error):
                    raise
                if isinstance(error, RayTaskError) and not isinstance(error.cause, ScorerDied):
                    problem = f"it failed: {error.cause!r}"
                else:
                    problem = f"it was lost: {str(error).splitlines()[0]}"
                    self._lose(replica)
            else:
                return verdicts
            finally:
                replica.groups -= 1
            logger.warning("%s could not score a group: %s", replica.name, problem)
            failure = RewardResult(None, status, detail={"error": f"{replica.name}: {problem}"})
        return failure

    async def _pick(self, asked: Collection[_Replica]) -> _Replica | None:
        """The least loaded replica that is up, rather one that was not asked yet; None when none will be up in time."""
        try:
            async with asyncio.timeout(self._start_timeout_s):
                while not (up := [r for r in self._replicas if r.state == "up"]):
                    if all(r.state == "dead" for r in self._replicas):
                        return None
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            return None
        return min(up, key=lambda r: (r in asked, r.groups))

    def _lose(self, replica: _Replica) -> None:
        if replica.state == "up":
            replica.state = "restarting"
            replica.revival = asyncio.create_task(self._revive(replica))

    async def _revive(self, replica: _Replica) -> None:
        """Wait until Ray has restarted the replica and it has loaded its model."""
        problem = "it is not back"
        try:
            async with asyncio.timeout(self._start_timeout_s):
                while replica.state == "restarting":
                    try:
                        await replica.handle.start.remote()
                    except RayActorError as error:
                        problem = str(error).splitlines()[0]
                        await asyncio.sleep(REVIVAL_ROUND_S)
                    else:
                        replica.state = "up"
                        logger.info("%s is back", replica.name)
        except (TimeoutError, RayError) as error:
            replica.state = "dead"
            logger.error(
                "%s is given up, it did not start again within %.0f s: %s",
                replica.name,
                self._start_timeout_s,
                problem if isinstance(error, TimeoutError) else error,
            )
        self._news.set()

    async def close(self) -> None:
        """End every replica; engines get a moment to shut down by themselves."""
        import ray

        for replica in self._replicas:
            if replica.revival is not None:
                replica.revival.cancel()
        closings = [asyncio.wait_for(r.handle.close.remote(), SLACK_S) for r in self._replicas if r.state == "up"]
        for outcome in await asyncio.gather(*closings, return_exceptions=True):
            if isinstance(outcome, BaseException):
                logger.warning("a reward model did not close cleanly: %r", outcome)
        for replica in self._replicas:
            ray.kill(replica.handle)
