"""The actors of `learner.reference=own` as one: what the orchestrator and the learner group hold.

They have no state. One that is lost is replaced by Ray and loads the same model; the calls that it owed are made again once, and
a second loss is an error that names it. Token data and logprobs go by reference, every call has a deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from learner.rank_group import answer_of

ACTOR = {"max_restarts": -1, "max_task_retries": 1}  # Ray options of each


class ReferenceGroup:
    """`timeout_s` is for one group of answers, what waits before it and a restart included."""

    def __init__(self, actors: Sequence[Any], *, start_timeout_s: float, timeout_s: float) -> None:
        self._actors = list(actors)
        self._groups = [0] * len(self._actors)  # that each is to score
        self._start_timeout_s = start_timeout_s
        self._timeout_s = timeout_s

    async def device_bytes(self) -> int:
        """All memory of the smallest actor's GPU, or of its machine; before `start` as well."""
        return min(await self._all([actor.device_bytes.remote() for actor in self._actors]))

    async def start(self) -> list[Any]:
        """Have every actor load its model."""
        return await self._all([actor.load.remote() for actor in self._actors])

    async def _all(self, answers: list[Any]) -> list[Any]:
        waits = (answer_of(_name(number), answer, self._start_timeout_s) for number, answer in enumerate(answers))
        return await asyncio.gather(*waits)

    async def score(self, answers: Any) -> Any:
        """Have the answers of one group scored that a reference refers to; a reference to their logprobs.

        Raises LearnerError for an actor that is late or lost for good, and the RayTaskError of answers that are gone.
        """
        number = min(range(len(self._actors)), key=self._groups.__getitem__)
        self._groups[number] += 1
        try:
            count, logprobs = self._actors[number].score.options(num_returns=2).remote(answers)
            await answer_of(_name(number), count, self._timeout_s)
        finally:
            self._groups[number] -= 1
        return logprobs

    async def close(self) -> None:
        import ray

        for actor in self._actors:
            ray.kill(actor)


def _name(number: int) -> str:
    return f"reference actor {number}"
