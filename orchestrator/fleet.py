"""The rollout actors as a fleet: who is healthy, who gets the next group, what happens when one dies.

Contract:
- A request goes to the healthy actor with the fewest answers outstanding, once. When that is lost or does not answer in
  time, its members are reported as failed, never invented; whoever wants them asks again.
- Generation can be parked: the requests in flight end with what there is of their answers, and a later request, to
  whichever actor is free then, continues them. Partial answers that got lost meanwhile are nobody's fault but the
  group's end (`PartialsLost`).
- An actor that was lost is replaced (at most `max_restarts` times each) and serves again only after it acknowledged the
  current weight version: it waits in `awaiting_weights` for the next broadcast. (Before the first one, the weights that
  it starts with are the current ones.)
- From `sleep` to `wake` the device is the learner's: no actor starts on it, and one that was lost is replaced after `wake`.
- A broadcast goes to the members of this moment, and is complete when every one of them acknowledged the version with
  the right checksum for every tensor. One that is lost during a broadcast is replaced; one that received wrong weights
  stops the run.
Every await has a deadline whose error names the actor.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from ray.exceptions import RayError

from learner.rank_group import LearnerGroup
from orchestrator.replica import Call, Replica, is_of_an_argument, reason_of_loss
from rollout_workers.engine import UpdateReport
from rollout_workers.weights.manifest import Manifest, WeightsNotDelivered
from rollout_workers.worker import MemberReport, RolloutRequest

logger = logging.getLogger(__name__)

SLACK_S = 30.0  # on top of a deadline that the actor itself keeps
PARK_ROUND_S = 0.1  # after which requests that an actor had not begun yet are parked once more


class FleetError(RuntimeError):
    """No actor is left to do the work, or one broke its contract; the message names it."""


class PartialsLost(RuntimeError):
    """The partial answers that were to be continued can't be read any more; the message names the group."""


@dataclass(frozen=True)
class Generated:
    """What became of one request: a report for each member, and a reference to the trajectories of those that have one.

    `payload` is None where no member is `in_payload`.
    """

    members: tuple[MemberReport, ...]
    payload: Any
    replica: str


@dataclass(frozen=True)
class BroadcastReport:
    """A finished broadcast: `pause_s` is the longest standstill of an engine, `total_s` the whole."""

    manifest: Manifest
    pause_s: float
    total_s: float


class RolloutFleet:
    """`make_actor(index)` creates the actor of one replica; it is called again when that has to be replaced."""

    def __init__(
        self,
        make_actor: Callable[[int], Any],
        count: int,
        *,
        transport: str,
        workers_per_engine: int,
        start_timeout_s: float,
        weights_timeout_s: float,
        max_restarts: int,
        on_change: Callable[[], None],
    ) -> None:
        self._make_actor = make_actor
        self._transport = transport
        self._workers_per_engine = workers_per_engine
        self._connected: list[Any] = []  # actors in the NCCL group
        self._start_timeout_s = start_timeout_s
        self._weights_timeout_s = weights_timeout_s
        self._max_restarts = max_restarts
        self._on_change = on_change
        self._replicas = [Replica(f"rollout-{i}", i) for i in range(count)]
        self._published = False  # whether there was a broadcast: until then actors start with the current weights
        self._news = asyncio.Event()  # a replica serves, or none ever will
        self._awake = asyncio.Event()  # not set while the devices are the learner's
        self._awake.set()
        self._fatal: FleetError | None = None
        self.version = 0

    # Life and death

    async def start(self, version: int) -> None:
        """Start every actor; they hold the starting model's weights, which count as `version`."""
        self.version = version
        await asyncio.gather(*(self._start(replica) for replica in self._replicas))
        for replica in self._replicas:
            replica.state = "serving"

    async def _start(self, replica: Replica) -> None:
        replica.handle = self._make_actor(replica.index)
        await self._call(replica, replica.handle.start.remote(self.version), self._start_timeout_s, "start")

    def _lose(self, replica: Replica, handle: Any, reason: str) -> None:
        """Take the replica whose actor `handle` was lost out of service, and replace it in the background."""
        import ray

        if replica.handle is not handle or replica.state in ("dead", "starting"):
            return  # known already
        logger.warning("%s is lost: %s", replica.name, reason)
        ray.kill(replica.handle)  # its engine process goes with it
        replica.state, replica.calls = "dead", set()
        if replica.restarts >= self._max_restarts:
            if all(r.state == "dead" and r.revival is None for r in self._replicas):
                self._fatal = FleetError(
                    f"no rollout actor is left: {replica.name} was lost {replica.restarts + 1} times "
                    f"(rollout.max_restarts={self._max_restarts}), at last because {reason}"
                )
                self._news.set()
                self._on_change()
            return
        replica.restarts += 1
        replica.revival = asyncio.create_task(self._revive(replica))

    async def _revive(self, replica: Replica) -> None:
        await self._awake.wait()  # as long as the learner's turn, which has deadlines of its own
        replica.state, replica.acknowledged = "starting", None
        try:
            await self._start(replica)
        except (FleetError, RayError) as error:
            replica.revival, replica.state = None, "awaiting_weights"
            self._lose(replica, replica.handle, f"it did not start again: {error}")
            return
        replica.revival, replica.state = None, "awaiting_weights" if self._published else "serving"
        logger.info("%s is back, %s", replica.name, replica.state.replace("_", " "))
        self._news.set()
        self._on_change()

    def check(self) -> None:
        """Raise what can't be mended."""
        if self._fatal is not None:
            raise self._fatal

    @property
    def awaiting_weights(self) -> bool:
        return any(r.state == "awaiting_weights" for r in self._replicas)

    async def close(self) -> None:
        """End every actor; engines get a moment to shut down by themselves."""
        import ray

        for replica in self._replicas:
            if replica.revival is not None:
                replica.revival.cancel()
        closings = [
            asyncio.wait_for(replica.handle.close.remote(), SLACK_S)
            for replica in self._replicas
            if replica.state in ("serving", "awaiting_weights")
        ]
        for outcome in await asyncio.gather(*closings, return_exceptions=True):
            if isinstance(outcome, BaseException):
                logger.warning("a rollout actor did not close cleanly: %r", outcome)
        for replica in self._replicas:
            if replica.handle is not None:
                ray.kill(replica.handle)

    # Work

    async def generate(self, request: RolloutRequest, partials: Sequence[Any] = ()) -> Generated:
        """Have the request answered by one replica; members without an answer are reported with their error.

        `partials` are references to payloads of earlier requests for the group, see `RolloutWorker.generate`. Raises
        PartialsLost when one of them is gone, FleetError when no replica is left or serves in time.
        """
        replica = await self._pick(request.timeout_s + self._start_timeout_s)
        handle = replica.handle
        call = Call(request.group_id, len(request.indexes), asyncio.get_running_loop().create_future())
        replica.calls.add(call)
        report_ref, payload_ref = handle.generate.options(num_returns=2).remote(request, *partials)
        timeout_s = request.timeout_s + SLACK_S
        try:
            report = await asyncio.wait_for(report_ref, timeout_s)
        except TimeoutError:
            import ray

            ray.cancel(report_ref)
            reason = f"it did not answer group {request.group_id} within {timeout_s:.0f} s"
        except RayError as error:
            if partials and is_of_an_argument(error):
                raise PartialsLost(
                    f"the partial answers of group {request.group_id} are lost: {error.cause}"
                ) from error
            reason = reason_of_loss(error)
        else:
            replica.answers += len(request.indexes)
            payload = payload_ref if any(member.in_payload for member in report.members) else None
            return Generated(report.members, payload, replica.name)
        finally:
            replica.calls.discard(call)
            call.ended.set_result(None)
        self._lose(replica, handle, reason)
        failed = tuple(MemberReport(i, error=f"{replica.name} was lost: {reason}") for i in request.indexes)
        return Generated(failed, None, replica.name)

    async def park(self, group_ids: Collection[str] | None = None) -> int:
        """Interrupt the requests in flight for these groups (None: all), on every serving replica.

        Returns the number of answers interrupted, when every one of those requests has ended: `generate` then returns
        their members as they are. Requests for which no replica serves yet are not met. A replica that dies meanwhile,
        or takes too long, is lost as usual.
        """
        serving = [replica for replica in self._replicas if replica.state == "serving"]
        return sum(await asyncio.gather(*(self._park(replica, group_ids) for replica in serving)))

    async def _park(self, replica: Replica, group_ids: Collection[str] | None) -> int:
        handle = replica.handle
        calls = [call for call in replica.calls if group_ids is None or call.group_id in group_ids]
        count = 0
        try:
            async with asyncio.timeout(self._weights_timeout_s):
                while pending := [call for call in calls if not call.ended.done()]:
                    count += await handle.park.remote(sorted({call.group_id for call in pending}))
                    await asyncio.wait([call.ended for call in pending], timeout=PARK_ROUND_S)
        except TimeoutError:
            self._lose(replica, handle, f"it did not park its answers within {self._weights_timeout_s:.0f} s")
        except RayError as error:
            self._lose(replica, handle, reason_of_loss(error))
        return count

    async def _pick(self, timeout_s: float) -> Replica:
        """The serving replica with the fewest answers outstanding; waits while none serves."""
        try:
            async with asyncio.timeout(timeout_s):
                while self._fatal is None and not any(r.state == "serving" for r in self._replicas):
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError as error:
            states = ", ".join(f"{r.name} {r.state}" for r in self._replicas)
            raise FleetError(f"no rollout actor served within {timeout_s:.0f} s: {states}") from error
        self.check()
        return min((r for r in self._replicas if r.state == "serving"), key=lambda r: r.outstanding)

    async def logprobs(self, sequences: Sequence[Sequence[int]]) -> dict[str, list[np.ndarray]]:
        """Every serving engine's logprobs (temperature 1) of the given texts, by replica name; none of one that is lost."""
        serving = [r for r in self._replicas if r.state == "serving"]
        answers = await asyncio.gather(*(self._logprobs(replica, sequences) for replica in serving))
        return {r.name: answer for r, answer in zip(serving, answers, strict=True) if answer is not None}

    async def _logprobs(self, replica: Replica, sequences: Sequence[Sequence[int]]) -> list[np.ndarray] | None:
        handle = replica.handle
        try:
            return await self._call(replica, handle.logprobs.remote(sequences), self._weights_timeout_s, "score texts")
        except RayError as error:
            self._lose(replica, handle, reason_of_loss(error))
            return None

    async def sleep(self) -> None:
        """Every engine gives its device to the learner; nothing may be in flight. One that is starting is waited for."""
        self._awake.clear()
        starting = [r.revival for r in self._replicas if r.state == "starting" and r.revival is not None]
        if starting:
            await asyncio.wait(starting, timeout=self._start_timeout_s)
        await self._all_living("sleep")

    async def wake(self) -> None:
        self._awake.set()
        await self._all_living("wake")

    async def _all_living(self, method: str) -> None:
        living = [r for r in self._replicas if r.state in ("serving", "awaiting_weights")]
        await asyncio.gather(*(self._told(replica, method) for replica in living))

    async def _told(self, replica: Replica, method: str) -> None:
        handle = replica.handle
        try:
            await self._call(replica, getattr(handle, method).remote(), self._weights_timeout_s, method)
        except RayError as error:
            self._lose(replica, handle, reason_of_loss(error))

    # Weights

    async def broadcast(self, learner: LearnerGroup, version: int) -> BroadcastReport:
        """Give `version`, the learner's current weights, to every living member; returns when all acknowledged."""
        began = time.monotonic()
        self._published = True
        members = [r for r in self._replicas if r.state in ("serving", "awaiting_weights")]
        if not members:
            await self._wait_for_a_member()
            members = [r for r in self._replicas if r.state in ("serving", "awaiting_weights")]
        if self._transport == "nccl":
            manifest, pauses = await self._broadcast_nccl(learner, version, members)
        else:
            manifest, pauses = await self._broadcast_buckets(learner, version, members)
        self.version = version
        for replica in members:
            # One that was lost and came back meanwhile acknowledged nothing yet.
            if replica.state == "awaiting_weights" and replica.acknowledged == version:
                replica.state = "serving"
        self._news.set()
        return BroadcastReport(manifest, max(pauses, default=0.0), time.monotonic() - began)

    async def _wait_for_a_member(self) -> None:
        revivals = [r.revival for r in self._replicas if r.revival is not None]
        if revivals:
            await asyncio.wait(revivals, timeout=self._start_timeout_s, return_when=asyncio.FIRST_COMPLETED)
        self.check()

    async def _broadcast_buckets(
        self, learner: LearnerGroup, version: int, members: Sequence[Replica]
    ) -> tuple[Manifest, list[float]]:
        """Buckets reach each actor while its engine still generates; only loading them makes it pause."""
        deliveries: list[asyncio.Task[Any]] = []
        handles = {replica.name: replica.handle for replica in members}
        manifest: Manifest | None = None
        async with asyncio.timeout(self._weights_timeout_s):
            async for item in learner.export_weights(version):
                if isinstance(item, Manifest):
                    manifest = item
                    break
                for replica in members:
                    reference = handles[replica.name].add_bucket.remote(item)
                    deliveries.append(asyncio.create_task(self._deliver(replica, handles[replica.name], reference)))
            await asyncio.gather(*deliveries)
        assert manifest is not None
        pauses = await asyncio.gather(
            *(self._load(r, handles[r.name], version, manifest) for r in members if r.handle is handles[r.name])
        )
        return manifest, [pause for pause in pauses if pause is not None]

    async def _deliver(self, replica: Replica, handle: Any, reference: Any) -> None:
        try:
            await self._call(replica, reference, self._weights_timeout_s, "receive weights")
        except RayError as error:
            self._lose(replica, handle, reason_of_loss(error))

    async def _load(self, replica: Replica, handle: Any, version: int, manifest: Manifest) -> float | None:
        """Have the replica load what it received, and check that; the pause in seconds, None if it was lost instead."""
        if replica.state not in ("serving", "awaiting_weights"):
            return None
        try:
            report = await self._call(replica, handle.update.remote(version), self._weights_timeout_s, "load weights")
        except RayError as error:
            self._lose(replica, handle, reason_of_loss(error))
            return None
        return self._acknowledge(replica, handle, report, manifest)

    def _acknowledge(self, replica: Replica, handle: Any, report: UpdateReport, manifest: Manifest) -> float:
        """Take a replica's word that it serves a version, if what it received is what was sent; its pause in seconds."""
        if report.version != manifest.version:
            raise WeightsNotDelivered(
                f"weights of version {manifest.version}: {replica.name} says that it serves version {report.version}"
            )
        manifest.check(report.received, replica.name)
        if replica.handle is handle:
            replica.acknowledged = report.version
        return report.pause_s

    async def _broadcast_nccl(
        self, learner: LearnerGroup, version: int, members: Sequence[Replica]
    ) -> tuple[Manifest, list[float]]:
        """vLLM's NCCL transport: engines receive while the learner sends, in a group formed anew when members change."""
        handles = [replica.handle for replica in members]
        if handles != self._connected:
            await self._connect_nccl(learner, members)
            self._connected = handles
        info = await learner.nccl_metadata()
        receiving = [asyncio.ensure_future(r.handle.receive.remote(version, info)) for r in members]
        manifest = await learner.send_nccl(version)
        pauses = []
        for replica, future in zip(members, receiving, strict=True):
            report = await self._call(replica, future, self._weights_timeout_s, "receive weights")
            pauses.append(self._acknowledge(replica, replica.handle, report, manifest))
        return manifest, pauses

    async def _connect_nccl(self, learner: LearnerGroup, members: Sequence[Replica]) -> None:
        """The learner's rank 0 is rank 0 of the group; each engine's workers follow."""
        common = await learner.nccl_rendezvous()
        common |= {"world_size": 1 + self._workers_per_engine * len(members)}
        leaving = [r for r in members if r.handle in self._connected]
        await asyncio.gather(
            *(self._call(r, r.handle.disconnect.remote(), self._weights_timeout_s, "leave the group") for r in leaving)
        )
        joins = [
            self._call(
                replica,
                replica.handle.connect.remote(
                    {**common, "packed": True, "rank_offset": 1 + self._workers_per_engine * number}
                ),
                self._start_timeout_s,
                "join the weight-transfer group",
            )
            for number, replica in enumerate(members)
        ]
        await asyncio.gather(learner.connect_nccl(common), *joins)

    # Calls

    async def _call(self, replica: Replica, reference: Any, timeout_s: float, what: str) -> Any:
        try:
            return await asyncio.wait_for(reference, timeout_s)
        except TimeoutError as error:
            raise FleetError(f"{replica.name} did not {what} within {timeout_s:.0f} s") from error

    def metrics(self) -> dict[str, float]:
        values: dict[str, float] = {}
        for replica in self._replicas:
            values[f"rollout/{replica.name}/answers"] = replica.answers
            values[f"rollout/{replica.name}/restarts"] = replica.restarts
        return values
