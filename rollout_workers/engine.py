"""One vLLM engine: exact tokens out, numbered weights in.

`Engine` asks vLLM's `AsyncLLM` for exactly what training needs and nothing that would distort it: sampled ids, the
sampled token's own logprob after temperature (`processed_logprobs`), and the spans of weight versions that vLLM itself
recorded. Sampling is never truncated here (no top_p, top_k, min_p), and a model's own generation defaults are ignored.

A request's `cache_salt` is the version it was dispatched under, so its prompt never meets keys and values of another
version. Requests in flight survive an update (`pause` keeps them) and go on under the new weights.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rollout_workers.trajectory import VersionSpan
from rollout_workers.weights.vllm_plugin import ENGINE_EXTENSION, NCCL_BACKEND, SHARED_MEMORY_BACKEND

logger = logging.getLogger(__name__)

CPU_KV_CACHE_MIB = 512
CPU_STEP_TOKENS = 8192  # of one engine step, prompts included
CPU_BLOCK_TOKENS = 32  # prompts shorter than a block never meet the prefix cache; vLLM's CPU default is 128


@dataclass(frozen=True)
class EngineSettings:
    """What an engine is started with. `transport` is `shared_memory` or `nccl`."""

    model_path: str
    dtype: str
    device: str
    max_model_tokens: int
    max_concurrent_answers: int
    seed: int
    transport: str = "shared_memory"
    tensor_parallel_size: int = 1
    kv_cache_mib: int | None = None
    gpu_memory_utilization: float = 0.85
    enforce_eager: bool = True
    takes_turns: bool = False  # shares its device with the learner: gives its memory back while that works
    engine_options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """What the engine sampled for one request. Spans count from the first sampled token."""

    token_ids: np.ndarray  # int32 [T]
    logprobs: np.ndarray  # float32 [T]
    version_spans: tuple[VersionSpan, ...]
    finish_reason: str


@dataclass(frozen=True)
class UpdateReport:
    """One weight update: checksums by tensor name as received, and how long generation stood still."""

    version: int
    received: Mapping[str, int]
    pause_s: float


class EngineDied(RuntimeError):
    """The engine process is gone; the actor around it is of no more use."""


class Engine:
    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._request_numbers = itertools.count()
        self.version = 0

    async def start(self, version: int) -> None:
        """Start the engine; its weights count as `version` until the first update."""
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        s = self._settings
        options: dict[str, Any] = {
            "model": s.model_path,
            "dtype": s.dtype,
            "seed": s.seed,
            "max_model_len": s.max_model_tokens,
            "max_num_seqs": s.max_concurrent_answers,
            "tensor_parallel_size": s.tensor_parallel_size,
            "gpu_memory_utilization": s.gpu_memory_utilization,
            "enforce_eager": s.enforce_eager,
            "enable_prefix_caching": True,
            "enable_sleep_mode": s.takes_turns,
            "logprobs_mode": "processed_logprobs",
            "generation_config": "vllm",  # never a model's own top_p or temperature
            "weight_transfer_config": {"backend": NCCL_BACKEND if s.transport == "nccl" else SHARED_MEMORY_BACKEND},
            "worker_extension_cls": ENGINE_EXTENSION,
            "disable_log_stats": True,
        }
        if s.device == "cpu":
            options["block_size"] = CPU_BLOCK_TOKENS
            # A seeded request whose prefill is cut into chunks kills vLLM 0.32's CPU engine.
            options["enable_chunked_prefill"] = False
            options["max_num_batched_tokens"] = max(CPU_STEP_TOKENS, s.max_model_tokens)
            if s.tensor_parallel_size == 1:
                options["distributed_executor_backend"] = "uni"
        kv_cache_mib = s.kv_cache_mib or (CPU_KV_CACHE_MIB if s.device == "cpu" else None)
        if kv_cache_mib is not None:
            options["kv_cache_memory_bytes"] = kv_cache_mib * 2**20
        options.update(s.engine_options)
        self._llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**options))
        await self._llm.update_weight_version(str(version))
        self.version = version

    async def generate(
        self,
        prompt_ids: Sequence[int],
        *,
        temperature: float,
        max_tokens: int,
        eos_ids: Sequence[int],
        seed: int | None,
    ) -> Answer:
        """Sample one answer. Raises EngineDied when the engine process is gone."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        parameters = SamplingParams(
            temperature=temperature,
            max_tokens=max_tokens,
            logprobs=0,  # the sampled token's own entry only
            seed=seed,
            stop_token_ids=list(eos_ids),
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        prompt = TokensPrompt(prompt_token_ids=list(prompt_ids), cache_salt=f"v{self.version}")
        output = (await self._run(prompt, parameters)).outputs[0]
        ids = np.asarray(output.token_ids, dtype=np.int32)
        if output.logprobs is None or len(output.logprobs) != len(ids):
            raise ValueError(f"the engine returned {len(ids)} ids and {len(output.logprobs or ())} logprobs")
        logprobs = np.asarray(
            [entry[int(token)].logprob for token, entry in zip(ids, output.logprobs, strict=True)],
            dtype=np.float32,
        )
        if not output.weight_versions and len(ids):
            raise ValueError("the engine reported no weight versions for an answer")
        spans = tuple(
            VersionSpan(s.start, s.end, int(s.version)) for s in output.weight_versions or () if s.end > s.start
        )
        return Answer(ids, logprobs, spans, output.finish_reason or "unknown")

    async def logprobs(self, token_ids: Sequence[int]) -> np.ndarray:
        """Logprobs (temperature 1) of tokens 1… of a given text under the current weights: float32 [T-1]."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        parameters = SamplingParams(
            temperature=0.0, max_tokens=1, prompt_logprobs=0, output_kind=RequestOutputKind.FINAL_ONLY
        )
        # A salt of its own: a probe must be computed anew each time.
        salt = f"probe-{next(self._request_numbers)}"
        prompt = TokensPrompt(prompt_token_ids=list(token_ids), cache_salt=salt)
        entries = (await self._run(prompt, parameters)).prompt_logprobs
        return np.asarray(
            [entry[int(t)].logprob for t, entry in zip(token_ids[1:], entries[1:], strict=True)],
            dtype=np.float32,
        )

    async def _run(self, prompt: Any, parameters: Any) -> Any:
        from vllm.v1.engine.exceptions import EngineDeadError

        final = None
        try:
            async for output in self._llm.generate(prompt, parameters, str(next(self._request_numbers))):
                final = output
        except EngineDeadError as error:
            raise EngineDied("the vLLM engine process died") from error
        if final is None:
            raise RuntimeError("the engine ended a request without any output")
        return final

    async def connect(self, init_info: Mapping[str, Any]) -> None:
        """Join a weight-transfer group (NCCL); returns when every member has joined."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=dict(init_info)))

    async def disconnect(self) -> None:
        await self._llm.shutdown_weight_transfer_engine()

    async def update(self, version: int, update_infos: Sequence[Mapping[str, Any]]) -> UpdateReport:
        """Load a weight version while requests in flight wait, and report what arrived.

        An engine whose update failed stays paused.
        """
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        began = time.monotonic()
        # Keys and values of the old version stay for the requests in flight; new requests can't meet them (salt).
        await self._llm.pause_generation(mode="keep", clear_cache=False)
        await self._llm.start_weight_update()
        for info in update_infos:
            await self._llm.update_weights(WeightTransferUpdateRequest(update_info=dict(info)))
        received = await self._llm.collective_rpc("headway_received")
        await self._llm.finish_weight_update(weight_version=str(version))
        self.version = version
        # Not in a `finally`: after a failed update the weights are half loaded, and no token may come from them.
        await self._llm.resume_generation()
        if any(other != received[0] for other in received[1:]):
            raise RuntimeError(f"tensor-parallel workers received different weights of version {version}")
        return UpdateReport(version, received[0], time.monotonic() - began)

    async def sleep(self) -> None:
        """Give the device's memory to the learner: weights go to the host, keys and values are dropped."""
        await self._llm.sleep(level=1)

    async def wake(self) -> None:
        """Take the memory back; the weights are those from before `sleep`, until the next update."""
        await self._llm.wake_up()

    async def close(self) -> None:
        self._llm.shutdown(timeout=1.0)  # the CPU engine's process never ends by itself, and holds nothing of value
        await asyncio.sleep(0)  # let cancelled output tasks end
