"""A judge that is one of our own rollout actors: an engine with a model of its own, whose weights nobody updates.

    actor = ray.remote(RolloutWorker).remote(EngineSettings(model_path=...), {})
    ray.get(actor.start.remote(0))
    scores = await ruler(message_lists, judge=ActorJudge(actor, "my-judge"))

A run's reward processes know no Ray: there a judge is a server (`vllm serve` and `api_base`).
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.replica import LOST
from reward_workers.judge_client import JudgeCallError
from rollout_workers.trajectory import Message, Trajectory
from rollout_workers.worker import RolloutReport, RolloutRequest, SamplingSettings


@dataclass(frozen=True)
class ActorJudge:
    """A `judge` for `reward_workers.judge`: one answer of a rollout actor for each request.

    `name` stands for the model in the cache of verdicts. `timeout_s` is for one answer, the engine's queue included. Raises
    JudgeCallError when the actor is lost or gives no answer, TimeoutError when it gives none in time.
    """

    actor: Any
    name: str
    max_tokens: int = 1024
    temperature: float = 0.0
    timeout_s: float = 120.0

    async def __call__(self, messages: Sequence[Message]) -> str:
        request = RolloutRequest(
            group_id=f"judge-{uuid.uuid4().hex}",
            prompt_id="judge",
            epoch=0,
            messages=tuple(messages),
            indexes=(0,),
            sampling=SamplingSettings(self.temperature, self.max_tokens),
            timeout_s=self.timeout_s,
        )
        report: RolloutReport
        payload: tuple[Trajectory, ...]
        references = self.actor.generate.options(num_returns=2).remote(request)
        try:
            # The actor keeps to the limit itself; what is waited beyond is for one that hangs.
            report, payload = await asyncio.wait_for(asyncio.gather(*references), self.timeout_s + 10.0)
        except LOST as error:
            raise JudgeCallError(f"judge {self.name}: its actor was lost: {str(error).splitlines()[0]}") from error
        if not payload:
            raise JudgeCallError(f"judge {self.name} gave no answer: {report.members[0].error}")
        return payload[0].completion
