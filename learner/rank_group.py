"""All learner ranks as one: what the orchestrator holds.

Every call goes to every rank (they compute in lockstep), has a deadline, and fails naming the rank that did not answer.
A rank that is lost ends the job: DeepSpeed's process group can't go on without it, and the checkpoint is the way back.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from learner.batch import RankPlan
from learner.settings import LearnerSettings
from learner.tally import Tally
from learner.worker import LearnerRank, LearnReport
from rollout_workers.weights.manifest import Manifest

if TYPE_CHECKING:
    from learner.reference_group import ReferenceGroup


class LearnerError(RuntimeError):
    """A rank or a reference actor failed or did not answer in time."""


async def answer_of(who: str, reference: Any, timeout_s: float) -> Any:
    """What an actor answers, or raises. Raises LearnerError, naming it, where it is gone or does not answer in time."""
    from ray.exceptions import RayActorError, RayTaskError

    try:
        return await asyncio.wait_for(reference, timeout_s)
    except RayTaskError:  # it answered; its error may be a TimeoutError as well, or tell of another actor's death
        raise
    except TimeoutError as error:
        raise LearnerError(f"{who} did not answer within {timeout_s:.0f} s") from error
    except RayActorError as error:
        raise LearnerError(f"{who} is gone: {error}") from error


class LearnerGroup:
    """`options[i]` are the Ray actor options of rank i. `reference` are the actors of `learner.reference=own`, to start and
    end with the ranks."""

    def __init__(
        self,
        settings: LearnerSettings,
        options: Sequence[dict[str, Any]],
        *,
        start_timeout_s: float,
        timeout_s: float,
        reference: ReferenceGroup | None = None,
    ) -> None:
        import ray

        self.reference = reference
        self._timeout_s = timeout_s
        self._start_timeout_s = start_timeout_s
        actor = ray.remote(LearnerRank)
        self._ranks = [
            actor.options(**option).remote(settings, rank, len(options)) for rank, option in enumerate(options)
        ]
        self.optimizer_step = 0

    def __len__(self) -> int:
        return len(self._ranks)

    async def device_bytes(self) -> int:
        """All memory of the smallest rank's GPU, or of its machine; before `start` as well."""
        return min(await self._all([r.device_bytes.remote() for r in self._ranks], self._start_timeout_s))

    async def start(self) -> int:
        """Form the process group and load the model on every rank; the number of trainable parameters."""
        rendezvous = await self._one(0, self._ranks[0].address.remote(), self._start_timeout_s)
        starting = [self._all([r.start.remote(rendezvous) for r in self._ranks], self._start_timeout_s)]
        if self.reference is not None:
            starting.append(self.reference.start())
        counts, *_ = await asyncio.gather(*starting)
        return counts[0]

    async def learn(
        self, plans: Sequence[RankPlan], payloads: Sequence[Any], references: Sequence[Any] | None = None
    ) -> tuple[list[LearnReport], Tally, list[Any]]:
        """Perform one batch. `payloads` are object references; each rank fetches only those of its own plan.

        `references` are what `reference.score` gave for each payload: where there are such actors they are asked now without.
        Returns every rank's report, their tallies added up, and for each rank a reference to its answers' logprobs.
        """
        calls = await self._called("learn", plans, payloads, references)
        reports: list[LearnReport] = await self._all([report for report, _ in calls], self._timeout_s)
        tally = Tally()
        for report in reports:
            tally.merge(Tally(report.sums, report.maxima))
        self.optimizer_step = reports[0].optimizer_step
        return reports, tally, [logprobs for _, logprobs in calls]

    async def score(self, plans: Sequence[RankPlan], payloads: Sequence[Any]) -> tuple[Tally, list[Any]]:
        """One forward pass over the plans' answers, without learning: the tally of all ranks, and `learn`'s references."""
        calls = await self._called("score", plans, payloads, None)
        tally = Tally()
        for of_rank in await self._all([counted for counted, _ in calls], self._timeout_s):
            tally.merge(of_rank)
        return tally, [logprobs for _, logprobs in calls]

    async def _called(
        self, method: str, plans: Sequence[RankPlan], payloads: Sequence[Any], references: Sequence[Any] | None
    ) -> list[Any]:
        """For each rank the two references that `learn` or `score` returns."""
        scored: Sequence[Any] = ()
        if self.reference is not None:
            scored = references or await asyncio.gather(*map(self.reference.score, payloads))
        return [
            getattr(rank, method)
            .options(num_returns=2)
            .remote(plan, *(of_payload[n] for of_payload in (payloads, scored) if of_payload for n in plan.payloads))
            for rank, plan in zip(self._ranks, plans, strict=True)
        ]

    async def export_weights(self, version: int) -> AsyncIterator[Any]:
        """References to the buckets of `version`, one by one as rank 0 has gathered them; last the Manifest itself."""
        streams = [r.export_weights.options(num_returns="streaming").remote(version) for r in self._ranks]
        # The other ranks only take part in gathering: their streams end without a value.
        others = [asyncio.ensure_future(self._drain(rank, stream)) for rank, stream in enumerate(streams) if rank]
        previous = None
        try:
            async for reference in streams[0]:
                if previous is not None:
                    yield previous
                previous = reference
            manifest = await self._one(0, previous, self._timeout_s)
            if not isinstance(manifest, Manifest):
                raise LearnerError(f"learner rank 0 ended the weights of version {version} without a manifest")
            await asyncio.wait_for(asyncio.gather(*others), self._timeout_s)
            yield manifest
        finally:
            for other in others:
                other.cancel()

    async def _drain(self, rank: int, stream: Any) -> None:
        async for reference in stream:
            await self._one(rank, reference, self._timeout_s)

    async def logprobs(self, sequences: Sequence[Sequence[int]], temperature: float = 1.0) -> list[np.ndarray]:
        """Logprobs of tokens 1… of each sequence under the learner's current weights."""
        answers = await self._all([r.logprobs.remote(sequences, temperature) for r in self._ranks], self._timeout_s)
        return answers[0]

    async def perturb(self, scale: float, seed: int) -> None:
        await self._all([r.perturb.remote(scale, seed) for r in self._ranks], self._timeout_s)

    async def restore(self) -> None:
        await self._all([r.restore.remote() for r in self._ranks], self._timeout_s)

    async def save(self, folder: Path) -> list[str]:
        """Every rank writes its state under `folder`; the names of the files written, relative to it."""
        names = await self._all([r.save.remote(str(folder)) for r in self._ranks], self._timeout_s)
        return sorted({name for of_rank in names for name in of_rank})

    async def load(self, folder: Path) -> None:
        steps = await self._all([r.load.remote(str(folder)) for r in self._ranks], self._timeout_s)
        self.optimizer_step = steps[0]

    async def export_model(self, folder: Path) -> None:
        await self._all([r.export_model.remote(str(folder)) for r in self._ranks], self._timeout_s)

    async def export_adapter(self, folder: Path) -> None:
        await self._all([r.export_adapter.remote(str(folder)) for r in self._ranks], self._timeout_s)

    async def close(self) -> None:
        """End the process group and the actors; never raises for ranks that are gone already."""
        import ray

        for rank in self._ranks:
            ray.kill(rank)
        if self.reference is not None:
            await self.reference.close()

    async def nccl_rendezvous(self) -> dict[str, Any]:
        """Host and port at which rank 0 waits for the engines."""
        address = await self._one(0, self._ranks[0].address.remote(), self._timeout_s)
        host, port = address.removeprefix("tcp://").rsplit(":", 1)
        return {"master_address": host, "master_port": int(port)}

    async def connect_nccl(self, init_info: dict[str, Any]) -> None:
        """Join the weight-transfer group together with the engines."""
        await self._all([r.connect_nccl.remote(init_info) for r in self._ranks], self._start_timeout_s)

    async def send_nccl(self, version: int) -> Manifest:
        """Broadcast `version` to the engines that are receiving it now."""
        manifests = await self._all([r.send_nccl.remote(version) for r in self._ranks], self._timeout_s)
        return manifests[0]

    async def nccl_metadata(self) -> dict[str, Any]:
        """What the engines must be told to expect."""
        return await self._one(0, self._ranks[0].nccl_metadata.remote(), self._timeout_s)

    async def _one(self, rank: int, reference: Any, timeout_s: float) -> Any:
        return await answer_of(f"learner rank {rank}", reference, timeout_s)

    async def _all(self, references: Sequence[Any], timeout_s: float) -> list[Any]:
        """Every rank's answer. The first failure ends the wait: the other ranks may hang in a collective."""
        tasks = [asyncio.ensure_future(self._one(rank, ref, timeout_s)) for rank, ref in enumerate(references)]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
