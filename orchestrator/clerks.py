"""The clerks: small actors that touch token data near where it lies, so that it never passes through the driver.

A clerk merges payloads of a group whose members came from several requests, writes journal shards, and reads out texts. There
is one per node; they hold nothing between calls, so one that is lost is restarted by Ray and asked again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from orchestrator.fleet import FleetError
from orchestrator.journal import TrajectoryRow, write_trajectories
from rollout_workers.trajectory import Trajectory


class Clerk:
    """Create with `ray.remote(Clerk).options(num_cpus=0, max_restarts=-1, max_task_retries=2)`."""

    def merged(self, indexes: Sequence[int], *payloads: Sequence[Trajectory]) -> tuple[Trajectory, ...]:
        """One payload of several, with the members `indexes`; of one that is in several, the later one counts."""
        by_index = {trajectory.index: trajectory for payload in payloads for trajectory in payload}
        return tuple(by_index[index] for index in indexes)

    def completions(self, payload: Sequence[Trajectory]) -> list[str]:
        """The answers' texts, in the payload's order."""
        return [trajectory.completion for trajectory in payload]

    def write_shard(
        self,
        journal_dir: str,
        lineage: int,
        policy_version: int,
        shard: int,
        rows: Sequence[Mapping[str, Any]],
        logprob_count: int,
        *objects: Any,
    ) -> str:
        """Write trajectories of one batch to the journal; returns the path.

        `rows` hold the fields of TrajectoryRow besides trajectory and logprobs, with `payload` and `index` instead.
        `objects` are the ranks' logprobs (the first `logprob_count`), then the payloads.
        """
        logprobs: dict[tuple[str, int], np.ndarray] = {}
        for of_rank in objects[:logprob_count]:
            logprobs |= of_rank
        payloads = objects[logprob_count:]
        found = {(number, t.index): t for number, payload in enumerate(payloads) for t in payload}
        written = []
        for row in rows:
            fields = dict(row)
            trajectory = found[fields.pop("payload"), fields.pop("index")].with_reward(fields.pop("reward"))
            sampled = logprobs.get((trajectory.group_id, trajectory.index))
            full = None
            if sampled is not None:
                full = np.zeros(len(trajectory.token_ids), dtype=np.float32)
                full[trajectory.response_mask] = sampled
            written.append(TrajectoryRow(trajectory=trajectory, learner_logprobs=full, **fields))
        return str(write_trajectories(Path(journal_dir), lineage, policy_version, shard, written))


class ClerkFleet:
    """The clerks, in turn. Their calls are references, so that payloads stay where they are."""

    def __init__(self, actors: Sequence[Any], timeout_s: float) -> None:
        self._actors = list(actors)
        self._timeout_s = timeout_s
        self._turn = 0

    def _next(self) -> Any:
        self._turn += 1
        return self._actors[self._turn % len(self._actors)]

    def merged(self, payloads: Sequence[Any], indexes: Sequence[int]) -> Any:
        """A reference to one payload of several, with the members `indexes`."""
        return self._next().merged.remote(tuple(indexes), *payloads)

    async def completions(self, payload: Any) -> list[str]:
        return await self._wait(self._next().completions.remote(payload), "read out a payload")

    async def write_journal(
        self,
        folder: str,
        lineage: int,
        policy_version: int,
        rows: Sequence[Mapping[str, Any]],
        logprobs: Sequence[Any],
        payloads: Sequence[Any],
    ) -> None:
        """Every clerk writes a share of the batch, whole groups each; returns when all of it is on disk."""
        writing = []
        for shard, clerk in enumerate(self._actors):
            share = range(shard, len(payloads), len(self._actors))
            numbers = {payload: number for number, payload in enumerate(share)}
            mine = [{**row, "payload": numbers[row["payload"]]} for row in rows if row["payload"] in numbers]
            if mine:
                objects = [*logprobs, *(payloads[number] for number in share)]
                reference = clerk.write_shard.remote(
                    folder, lineage, policy_version, shard, mine, len(logprobs), *objects
                )
                writing.append(self._wait(reference, f"write journal shard {shard} of version {policy_version}"))
        await asyncio.gather(*writing)

    async def _wait(self, reference: Any, what: str) -> Any:
        try:
            return await asyncio.wait_for(reference, self._timeout_s)
        except TimeoutError as error:
            raise FleetError(f"a clerk did not {what} within {self._timeout_s:.0f} s") from error

    async def close(self) -> None:
        import ray

        for actor in self._actors:
            ray.kill(actor)
