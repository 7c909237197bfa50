"""A rollout actor: one engine, its chat template, and the two ends where text and weights come in.

`generate` answers one request, which is some members of one group, and returns two things: small reports for the
orchestrator, and the trajectories themselves, which stay in the object store of this node until a reward actor or a
learner rank fetches them. A member that failed is a report with `error`, never a trajectory with made-up numbers.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollout_workers.chat import ChatTemplate
from rollout_workers.engine import Answer, Engine, EngineDied, EngineSettings, UpdateReport
from rollout_workers.trajectory import Message, Trajectory, VersionSpan
from rollout_workers.weights.bucket import Bucket
from rollout_workers.weights.spool import Spool

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SamplingSettings:
    """How answers are drawn. `seed_base` None leaves the seeds to the engine's own generator."""

    temperature: float
    max_response_tokens: int
    seed_base: int | None = None


@dataclass(frozen=True)
class RolloutRequest:
    """Some members of one group. `attempt` counts re-samplings, so that a seeded member differs each time."""

    group_id: str
    prompt_id: str
    epoch: int
    messages: tuple[Message, ...]
    indexes: tuple[int, ...]
    sampling: SamplingSettings
    timeout_s: float
    attempt: int = 0


@dataclass(frozen=True)
class MemberReport:
    """What the orchestrator needs to know of one member. The payload holds those without `error`, in this order."""

    index: int
    token_versions: tuple[tuple[int, int], ...] = ()  # (version, number of tokens)
    response_length: int = 0
    prompt_length: int = 0
    truncated: bool = False
    error: str | None = None


@dataclass(frozen=True)
class RolloutReport:
    members: tuple[MemberReport, ...]
    started_at: float
    finished_at: float


class RolloutWorker:
    """The actor. Create it with `ray.remote(RolloutWorker)`; every method is a coroutine."""

    def __init__(self, settings: EngineSettings, chat_template_kwargs: Mapping[str, Any]) -> None:
        self._settings = settings
        self._chat_template_kwargs = chat_template_kwargs
        self._engine = Engine(settings)
        self._spool = Spool()

    async def start(self, version: int) -> int:
        """Load model and tokenizer; the process id of the actor, when it can answer."""
        import os

        self._chat = ChatTemplate.from_pretrained(self._settings.model_path, self._chat_template_kwargs)
        await self._engine.start(version)
        return os.getpid()

    async def generate(self, request: RolloutRequest) -> tuple[RolloutReport, tuple[Trajectory, ...]]:
        """Answer a request within its time limit. Raises EngineDied when the engine is gone."""
        started_at = time.time()
        prompt_ids = self._chat.prompt_ids(request.messages)
        results = await asyncio.gather(
            *(self._member(request, index, prompt_ids) for index in request.indexes), return_exceptions=True
        )
        members: list[MemberReport] = []
        trajectories: list[Trajectory] = []
        for index, result in zip(request.indexes, results, strict=True):
            if isinstance(result, EngineDied):
                raise result
            if isinstance(result, BaseException):
                members.append(MemberReport(index, error=f"{type(result).__name__}: {result}"))
                continue
            counts: dict[int, int] = {}
            for span in result.version_spans:
                counts[span.version] = counts.get(span.version, 0) + span.end - span.start
            members.append(
                MemberReport(
                    index,
                    tuple(sorted(counts.items())),
                    result.response_length,
                    len(prompt_ids),
                    result.truncated,
                )
            )
            trajectories.append(result)
        return RolloutReport(tuple(members), started_at, time.time()), tuple(trajectories)

    async def _member(self, request: RolloutRequest, index: int, prompt_ids: Sequence[int]) -> Trajectory:
        sampling = request.sampling
        room = self._settings.max_model_tokens - len(prompt_ids)
        if room < 1:
            raise ValueError(
                f"the prompt's {len(prompt_ids)} tokens leave no room to answer in {self._settings.max_model_tokens}"
            )
        seed = None
        if sampling.seed_base is not None:
            seed = member_seed(sampling.seed_base, request.prompt_id, request.epoch, index, request.attempt)
        # Beyond its time limit the request is aborted in the engine as well: cancelling the generator does that.
        try:
            async with asyncio.timeout(request.timeout_s):
                answer = await self._engine.generate(
                    prompt_ids,
                    temperature=sampling.temperature,
                    max_tokens=min(sampling.max_response_tokens, room),
                    eos_ids=self._chat.eos_ids,
                    seed=seed,
                )
        except TimeoutError as error:
            raise TimeoutError(f"no answer within {request.timeout_s:g} s") from error
        return self._trajectory(request, index, prompt_ids, answer)

    def _trajectory(self, request: RolloutRequest, index: int, prompt_ids: Sequence[int], answer: Answer) -> Trajectory:
        prompt_length = len(prompt_ids)
        total = prompt_length + len(answer.token_ids)
        mask = np.zeros(total, dtype=bool)
        mask[prompt_length:] = True
        return Trajectory(
            group_id=request.group_id,
            index=index,
            prompt_id=request.prompt_id,
            messages=(
                *request.messages,
                {
                    "role": "assistant",
                    "content": self._chat.tokenizer.decode(answer.token_ids, skip_special_tokens=True),
                },
            ),
            token_ids=np.concatenate([np.asarray(prompt_ids, dtype=np.int32), answer.token_ids]),
            response_mask=mask,
            behaviour_logprobs=np.concatenate([np.zeros(prompt_length, dtype=np.float32), answer.logprobs]),
            version_spans=tuple(
                VersionSpan(s.start + prompt_length, s.end + prompt_length, s.version) for s in answer.version_spans
            ),
            finish_reason=answer.finish_reason,
            metadata={"prompt_length_messages": len(request.messages)},
        )

    async def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Logprobs (temperature 1) of tokens 1… of each sequence: a list of float32 [T-1]."""
        return list(await asyncio.gather(*(self._engine.logprobs(ids) for ids in sequences)))

    async def add_bucket(self, bucket: Bucket) -> None:
        """Keep a bucket for the next update; generation goes on meanwhile."""
        await asyncio.to_thread(self._spool.add, bucket)

    async def update(self, version: int) -> UpdateReport:
        """Load the spooled buckets as `version`."""
        try:
            return await self._engine.update(version, self._spool.update_infos())
        finally:
            self._spool.clear()

    async def sleep(self) -> None:
        await self._engine.sleep()

    async def wake(self) -> None:
        await self._engine.wake()

    async def connect(self, init_info: Mapping[str, Any]) -> None:
        await self._engine.connect(init_info)

    async def disconnect(self) -> None:
        await self._engine.disconnect()

    async def receive(self, version: int, update_info: Mapping[str, Any]) -> UpdateReport:
        """Load `version` from the connected group (NCCL), while the learner sends it."""
        return await self._engine.update(version, [update_info])

    async def close(self) -> None:
        await self._engine.close()


def member_seed(base: int, prompt_id: str, epoch: int, index: int, attempt: int) -> int:
    """A seed of 63 bits that depends on everything that tells two answers of a run apart."""
    text = f"{base}/{prompt_id}/{epoch}/{index}/{attempt}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
