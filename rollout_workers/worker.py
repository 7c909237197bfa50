"""A rollout actor: one engine, its chat template, and the two ends where text and weights come in.

`generate` answers one request, which is some members of one group, and returns two things: small reports for the
orchestrator, and the trajectories themselves, which stay in the object store of this node until a reward actor or a
learner rank fetches them. A member that failed is a report with `error`, never a trajectory with made-up numbers.

`park` interrupts requests: their members return as they are, and a later request, here or at another actor, continues
them from the very ids that were sampled. A continued answer is one trajectory, its spans say which version wrote what.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rollout_workers.chat import ChatTemplate
from rollout_workers.engine import PARKED, Answer, Engine, EngineDied, EngineSettings, UpdateReport
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
    """Some members of one group. `attempt` counts re-samplings, so that a seeded member differs each time.

    In a full engine requests with a lower `priority` (0 and up) come first.
    """

    group_id: str
    prompt_id: str
    epoch: int
    messages: tuple[Message, ...]
    indexes: tuple[int, ...]
    sampling: SamplingSettings
    timeout_s: float
    attempt: int = 0
    priority: int = 0


@dataclass(frozen=True)
class MemberReport:
    """What the orchestrator needs to know of one member; lengths and versions are those of the whole answer.

    One that is `parked` was interrupted, perhaps before its first token. The payload holds those that are `in_payload`,
    in the order of the reports.
    """

    index: int
    token_versions: tuple[tuple[int, int], ...] = ()  # (version, number of tokens)
    response_length: int = 0  # sampled tokens
    prompt_length: int = 0
    truncated: bool = False
    parked: bool = False
    error: str | None = None
    other_length: int = 0  # tokens behind the prompt that were not sampled: tools' results, templates of further turns

    @property
    def in_payload(self) -> bool:
        """There is a trajectory, whole or parked."""
        return self.error is None and self.response_length > 0


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

    async def generate(
        self, request: RolloutRequest, *partials: Sequence[Trajectory]
    ) -> tuple[RolloutReport, tuple[Trajectory, ...]]:
        """Answer a request within its time limit.

        `partials` are payloads of earlier requests for the same group. A member that was parked in one is continued, one
        that finished comes back as it is; of one that is in several the later counts. Raises EngineDied when the engine
        is gone, ValueError when a partial is another group's.
        """
        started_at = time.time()
        begun = {trajectory.index: trajectory for payload in partials for trajectory in payload}
        if strangers := {t.group_id for t in begun.values()} - {request.group_id}:
            raise ValueError(f"group {request.group_id} can't be continued from answers of {', '.join(strangers)}")
        blank = self._blank(request)
        results = await asyncio.gather(
            *(self._member(request, begun.get(index) or replace(blank, index=index)) for index in request.indexes),
            return_exceptions=True,
        )
        members: list[MemberReport] = []
        trajectories: list[Trajectory] = []
        for index, result in zip(request.indexes, results, strict=True):
            if isinstance(result, EngineDied):
                raise result
            if isinstance(result, BaseException):
                members.append(MemberReport(index, error=f"{type(result).__name__}: {result}"))
                continue
            members.append(report_of(result))
            if members[-1].in_payload:
                trajectories.append(result)
        return RolloutReport(tuple(members), started_at, time.time()), tuple(trajectories)

    def _blank(self, request: RolloutRequest) -> Trajectory:
        """A member before its first token."""
        prompt_ids = np.asarray(self._chat.prompt_ids(request.messages), dtype=np.int32)
        return Trajectory(
            group_id=request.group_id,
            index=0,
            prompt_id=request.prompt_id,
            messages=request.messages,
            token_ids=prompt_ids,
            response_mask=np.zeros(len(prompt_ids), dtype=bool),
            behaviour_logprobs=np.zeros(len(prompt_ids), dtype=np.float32),
            version_spans=(),
            finish_reason=PARKED,
            metadata={"prompt_length_messages": len(request.messages)},
        )

    async def _member(self, request: RolloutRequest, partial: Trajectory) -> Trajectory:
        """The answer that goes on from `partial`, in what that leaves of the budget and of the context."""
        if partial.finish_reason != PARKED:
            return partial
        sampling = request.sampling
        written = partial.response_length
        room = self._settings.max_model_tokens - len(partial.token_ids)
        max_tokens = min(sampling.max_response_tokens - written, room)
        if max_tokens < 1 and written:
            return replace(partial, finish_reason="length")
        if max_tokens < 1:
            raise ValueError(
                f"the prompt's {len(partial.token_ids)} tokens leave no room to answer in "
                f"{self._settings.max_model_tokens}"
            )
        seed = None
        if sampling.seed_base is not None:
            seed = member_seed(
                sampling.seed_base, request.prompt_id, request.epoch, partial.index, request.attempt, written
            )
        # Beyond its time limit the request is aborted in the engine as well: cancelling the generator does that.
        try:
            async with asyncio.timeout(request.timeout_s):
                answer = await self._engine.generate(
                    request.group_id,
                    partial.token_ids.tolist(),
                    temperature=sampling.temperature,
                    max_tokens=max_tokens,
                    eos_ids=self._chat.eos_ids,
                    seed=seed,
                    priority=request.priority,
                )
        except TimeoutError as error:
            raise TimeoutError(f"no answer within {request.timeout_s:g} s") from error
        if answer.finish_reason != PARKED and written + len(answer.token_ids) == 0:
            raise ValueError("the engine finished an answer without a token, not even one that ends it")
        return self._continued(request, partial, answer)

    def _continued(self, request: RolloutRequest, partial: Trajectory, answer: Answer) -> Trajectory:
        start = len(partial.token_ids)
        mask = np.concatenate([partial.response_mask, np.ones(len(answer.token_ids), dtype=bool)])
        token_ids = np.concatenate([partial.token_ids, answer.token_ids])
        text = self._chat.tokenizer.decode(token_ids[mask], skip_special_tokens=True)
        new_spans = [VersionSpan(s.start + start, s.end + start, s.version) for s in answer.version_spans]
        return replace(
            partial,
            messages=(*request.messages, {"role": "assistant", "content": text}),
            token_ids=token_ids,
            response_mask=mask,
            behaviour_logprobs=np.concatenate([partial.behaviour_logprobs, answer.logprobs]),
            version_spans=_joined(partial.version_spans, new_spans),
            finish_reason=answer.finish_reason,
        )

    async def park(self, group_ids: Collection[str]) -> int:
        """Interrupt what is being written for these groups; returns how many answers were.

        Their `generate` calls return at once. A call that has not reached the engine yet is not met; whoever must be sure
        asks again. Raises EngineDied.
        """
        return await self._engine.park(group_ids)

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


def report_of(trajectory: Trajectory) -> MemberReport:
    """Of an answer, whole or parked."""
    counts: dict[int, int] = {}
    for span in trajectory.version_spans:
        counts[span.version] = counts.get(span.version, 0) + span.end - span.start
    written = trajectory.response_length
    return MemberReport(
        trajectory.index,
        tuple(sorted(counts.items())),
        written,
        trajectory.prompt_length,
        trajectory.truncated,
        trajectory.finish_reason == PARKED,
        other_length=len(trajectory.token_ids) - trajectory.prompt_length - written,
    )


def _joined(old: Sequence[VersionSpan], new: Sequence[VersionSpan]) -> tuple[VersionSpan, ...]:
    """Spans of one text; where it goes on under the version that it was parked under, that is one span."""
    if old and new and old[-1].version == new[0].version and old[-1].end == new[0].start:
        return (*old[:-1], VersionSpan(old[-1].start, new[0].end, new[0].version), *new[1:])
    return (*old, *new)


def member_seed(base: int, prompt_id: str, epoch: int, index: int, attempt: int, written: int) -> int:
    """A seed of 63 bits that depends on everything that tells two answers of a run apart.

    `written` is the number of tokens that a continued answer has: it must not draw the same numbers again.
    """
    text = f"{base}/{prompt_id}/{epoch}/{index}/{attempt}/{written}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
