"""Rollout actors that a test can look into, and plain transformers to judge what they write.

The actors' processes import this module, so it imports nothing heavy.
"""

from __future__ import annotations

import asyncio
import copy
import multiprocessing
import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from rollout_workers.engine import PARKED, AdapterSettings, Answer, Engine, EngineSettings, UpdateReport
from rollout_workers.trajectory import Trajectory
from rollout_workers.worker import MemberReport, RolloutReport, RolloutRequest, RolloutWorker


class WatchedEngine(Engine):
    """Remembers how much of each named request's prompt came from the prefix cache."""

    def __init__(self, settings: EngineSettings) -> None:
        super().__init__(settings)
        self.cached: dict[str, int] = {}

    async def _run(self, name: str, prompt: Any, parameters: Any, priority: int) -> Any:
        output = await super()._run(name, prompt, parameters, priority)
        self.cached[name] = output.num_cached_tokens
        return output


class Replica(RolloutWorker):
    def __init__(self, settings: EngineSettings) -> None:
        super().__init__(settings, {})
        self._engine = WatchedEngine(settings)

    async def write(self, name: str, prompt_ids: Sequence[int], **arguments: Any) -> Answer:
        """What the engine answers to bare ids."""
        return await self._engine.generate(name, prompt_ids, **arguments)

    async def load(self, version: int, update_infos: Sequence[Mapping[str, Any]]) -> UpdateReport:
        return await self._engine.update(version, update_infos)

    async def begin_adapter(self, adapter: AdapterSettings) -> None:
        """As at the start of an engine with this adapter."""
        await self._engine._begin_adapter(adapter)

    async def cached_tokens(self, names: Collection[str]) -> list[int]:
        return [self._engine.cached[name] for name in names]

    async def stand_still(self, still: bool) -> None:
        """As during an update: requests are taken in, and nothing is written."""
        if still:
            await self._engine._llm.pause_generation(mode="keep", clear_cache=False)
        else:
            await self._engine._llm.resume_generation()

    async def give_up(self, name: str) -> None:
        """As the engine does by itself, for example when it is put to sleep."""
        await self._engine._llm.abort(name)

    async def signal_engine(self, number: int) -> None:
        """To the engine's process: a stop, as of a host that swaps, or a kill, as by the out-of-memory killer."""
        for child in multiprocessing.active_children():
            assert child.pid is not None
            os.kill(child.pid, number)

    async def busy(self) -> bool:
        """Whether the engine process has anything to do."""
        return bool(await self._engine._llm.engine_core.call_utility_async("has_work"))


def changed(model: Any, seed: int) -> Any:
    """A copy of the model with every weight moved, far enough that nothing old could be taken for new."""
    import torch

    copied = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return copied


def reference_logprobs(
    model: Any,
    prompt: Sequence[int],
    answer: Sequence[int],
    temperature: float = 1.0,
    *,
    old: Any = None,
    old_tokens: int = 0,
) -> np.ndarray:
    """Logprobs of the answer's tokens by one transformers forward; the first `old_tokens` inputs go through `old`."""
    import torch

    ids = torch.tensor([[*prompt, *answer]])
    with torch.no_grad():
        if old is None or not old_tokens:
            logits = model(ids).logits
        else:
            first = old(ids[:, :old_tokens], use_cache=True)
            rest = model(ids[:, old_tokens:], past_key_values=first.past_key_values)
            logits = torch.cat([first.logits, rest.logits], dim=1)
    logprobs = torch.log_softmax(logits[0, len(prompt) - 1 : -1] / temperature, dim=-1)
    return logprobs.gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()


class Hollow:
    """A rollout actor without an engine. Its answers grow by one token a request; `g-never` is never answered."""

    async def start(self, version: int) -> int:
        return os.getpid()

    async def generate(
        self, request: RolloutRequest, *partials: Sequence[Trajectory]
    ) -> tuple[RolloutReport, tuple[Trajectory, ...]]:
        if request.group_id == "g-never":
            await asyncio.sleep(600)
        (index,) = request.indexes
        written = 1 + max([t.response_length for payload in partials for t in payload], default=0)
        answer = Trajectory(
            group_id=request.group_id,
            index=index,
            prompt_id=request.prompt_id,
            messages=request.messages,
            token_ids=np.arange(written, dtype=np.int32),
            response_mask=np.ones(written, dtype=bool),
            behaviour_logprobs=np.zeros(written, dtype=np.float32),
            version_spans=(),
            finish_reason=PARKED,
        )
        member = MemberReport(index, response_length=written, parked=True)
        return RolloutReport((member,), 0.0, 0.0), (answer,)

    async def park(self, group_ids: Collection[str]) -> int:
        return 0

    async def die(self) -> None:
        os._exit(1)

    async def close(self) -> None:
        pass
