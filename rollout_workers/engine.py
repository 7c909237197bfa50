"""One vLLM engine: exact tokens out, numbered weights in.

`Engine` asks vLLM's `AsyncLLM` for exactly what training needs and nothing that would distort it: sampled ids, the
sampled token's own logprob after temperature (`processed_logprobs`), and the spans of weight versions that vLLM itself
recorded. Sampling is never truncated here (no top_p, top_k, min_p), and a model's own generation defaults are ignored.

A request's `cache_salt` is the version it was dispatched under, so its prompt never meets keys and values of another
version. Requests in flight survive an update (`pause` keeps them) and go on under the new weights, either with the keys
and values that they have or, with `recompute_kv`, with new ones of the whole text.

An engine with an adapter (`AdapterSettings`) serves the base model that it is started with and one LoRA adapter, which every
request names, and an update replaces the adapter alone. Before the first one the adapter is zero.

`park` interrupts requests: each returns what was sampled so far, complete with logprobs and versions, and leaves nothing
in the engine. An answer is finished or parked; one that the engine itself gave up is an error.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from rollout_workers.trajectory import VersionSpan
from rollout_workers.weights.vllm_plugin import ENGINE_EXTENSION, NCCL_BACKEND, SHARED_MEMORY_BACKEND

logger = logging.getLogger(__name__)

T = TypeVar("T")

CPU_KV_CACHE_MIB = 512
CPU_STEP_TOKENS = 8192  # of one engine step, prompts included
CPU_BLOCK_TOKENS = 32  # prompts shorter than a block never meet the prefix cache; vLLM's CPU default is 128

PARKED = "parked"  # the finish reason of an answer that was interrupted, to be continued
FINISHED = ("stop", "length")  # vLLM's others, like `abort` and `error`, are no answers
FIRST = -1  # priority before every answer's
ABORT_ROUND_S = 0.01
DEATH_CHECK_S = 0.2


@dataclass(frozen=True)
class AdapterSettings:
    """A LoRA adapter on `modules`, the names of layers in the Hugging Face model; it adds alpha / rank x B A to them."""

    rank: int
    alpha: float
    modules: tuple[str, ...]


@dataclass(frozen=True)
class EngineSettings:
    """What an engine is started with. `transport` is `shared_memory` or `nccl`; an adapter travels through shared memory."""

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
    fp32_head: bool = False  # logits in float32 whatever `dtype` is
    recompute_kv: bool = False  # at an update, recompute keys and values of requests in flight under the new weights
    adapter: AdapterSettings | None = None  # None: updates bring the weights of the whole model
    engine_options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """What the engine sampled for one request. Spans count from the first sampled token.

    `finish_reason` is `stop` or `length`, or `parked`: then there may be no token at all.
    """

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


class AdapterNotServed(ValueError):
    """vLLM can't put the adapter on some of its layers; the message names them."""


class EngineDied(RuntimeError):
    """The engine process is gone; the actor around it is of no more use."""


@dataclass(eq=False)
class _Request:
    """One answer being written. `ended` is whether it was interrupted, once it is not written any more."""

    name: str
    ended: asyncio.Future[bool]
    parked: bool = False


class Engine:
    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._probe_numbers = itertools.count()
        self._requests: set[_Request] = set()
        self._lora_request: Any = None
        self.version = 0

    async def start(self, version: int) -> None:
        """Start the engine; its weights count as `version` until the first update. Raises AdapterNotServed."""
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
            "scheduling_policy": "priority",
            "logprobs_mode": "processed_logprobs",
            "generation_config": "vllm",  # never a model's own top_p or temperature
            "worker_extension_cls": ENGINE_EXTENSION,
            "disable_log_stats": True,
        }
        if s.adapter is None:
            backend = NCCL_BACKEND if s.transport == "nccl" else SHARED_MEMORY_BACKEND
            options["weight_transfer_config"] = {"backend": backend}
        else:
            options |= _adapter_options(s.adapter)
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
        if s.fp32_head:
            options["hf_overrides"] = {**options.get("hf_overrides", {}), "head_dtype": "float32"}
        self._llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**options))
        await self._llm.update_weight_version(str(version))
        if s.adapter is not None:
            await self._begin_adapter(s.adapter)
        self.version = version

    async def _begin_adapter(self, adapter: AdapterSettings) -> None:
        from rollout_workers.weights.adapter import request

        answers = await self._llm.collective_rpc("headway_begin_adapter", args=(list(adapter.modules),))
        if missing := sorted(set().union(*answers)):
            raise AdapterNotServed(
                f"model.lora.targets: vLLM's class for {self._settings.model_path} can't serve an adapter on "
                f"{', '.join(missing[:3])}{f' and {len(missing) - 3} more' if len(missing) > 3 else ''}; adapt other layers, or "
                "let the adapter be merged (rollout.weights.transport=auto)"
            )
        self._lora_request = request()

    async def generate(
        self,
        name: str,
        prompt_ids: Sequence[int],
        *,
        temperature: float,
        max_tokens: int,
        eos_ids: Sequence[int],
        seed: int | None,
        priority: int = 0,
    ) -> Answer:
        """Sample one answer; `park` finds it by `name`, which several requests may share.

        Of requests that wait for a place, those with the lowest `priority` come first, and of these the earliest.
        Raises EngineDied when the engine process is gone, RuntimeError when the engine gave the request up.
        """
        from vllm import SamplingParams
        from vllm.inputs import tokens_input
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
        prompt = tokens_input(list(prompt_ids), cache_salt=f"v{self.version}")
        request = _Request(name, asyncio.get_running_loop().create_future())
        self._requests.add(request)
        interrupted = False
        try:
            output = (await self._run(name, prompt, parameters, priority)).outputs[0]
            interrupted = request.parked and output.finish_reason == "abort"
        finally:
            self._requests.discard(request)
            request.ended.set_result(interrupted)
        if not interrupted and output.finish_reason not in FINISHED:
            raise RuntimeError(f"the engine gave a request up: {output.finish_reason}")
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
        return Answer(ids, logprobs, spans, PARKED if interrupted else output.finish_reason)

    async def park(self, names: Collection[str]) -> int:
        """Interrupt the answers being written under these names; returns how many were.

        Their `generate` calls return at once, and when this returns, the engine process holds nothing of them. Works
        for requests that wait in the engine's queue and during an update as well. Raises EngineDied.
        """
        requests = [request for request in self._requests if request.name in names]
        mine = [request for request in requests if not request.parked]
        for request in mine:
            request.parked = True
        await self._watched(self._abort(requests))
        return sum(request.ended.result() for request in mine)

    async def _abort(self, requests: Sequence[_Request]) -> None:
        pending = {request.ended for request in requests}
        while pending:
            # vLLM aborts every request of a name. One that it is only just being given is met by the next round.
            await self._llm.abort({request.name for request in requests if request.ended in pending})
            _, pending = await asyncio.wait(pending, timeout=ABORT_ROUND_S)
        # The engine process takes its messages in order: when it answers this one, it has dropped the requests.
        await self._llm.get_weight_version()

    async def logprobs(self, token_ids: Sequence[int]) -> np.ndarray:
        """Logprobs (temperature 1) of tokens 1… of a given text under the current weights: float32 [T-1]."""
        from vllm import SamplingParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        parameters = SamplingParams(
            temperature=0.0, max_tokens=1, prompt_logprobs=0, output_kind=RequestOutputKind.FINAL_ONLY
        )
        name = f"probe-{next(self._probe_numbers)}"
        # A salt of its own: a probe must be computed anew each time.
        prompt = tokens_input(list(token_ids), cache_salt=name)
        # The loop waits for a probe: it must not wait behind hundreds of answers.
        entries = (await self._run(name, prompt, parameters, priority=FIRST)).prompt_logprobs
        return np.asarray(
            [entry[int(t)].logprob for t, entry in zip(token_ids[1:], entries[1:], strict=True)],
            dtype=np.float32,
        )

    async def _run(self, name: str, prompt: Any, parameters: Any, priority: int) -> Any:
        from vllm.v1.engine.exceptions import EngineDeadError

        final = None
        try:
            async for output in self._llm.generate(
                prompt, parameters, name, priority=priority, lora_request=self._lora_request
            ):
                final = output
        except EngineDeadError as error:
            raise EngineDied("the vLLM engine process died") from error
        if final is None:
            raise RuntimeError("the engine ended a request without any output")
        return final

    async def _watched(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of work that waits for the engine process; EngineDied when that is gone.

        vLLM never answers the calls that were under way when its engine process died.
        """
        from vllm.v1.engine.exceptions import EngineDeadError

        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                if self._llm.errored:
                    raise EngineDied("the vLLM engine process died")
                await asyncio.wait([task], timeout=DEATH_CHECK_S)
            return task.result()
        except EngineDeadError as error:
            raise EngineDied("the vLLM engine process died") from error
        finally:
            task.cancel()

    async def connect(self, init_info: Mapping[str, Any]) -> None:
        """Join a weight-transfer group (NCCL); returns when every member has joined."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        request = WeightTransferInitRequest(init_info=dict(init_info))
        await self._watched(self._llm.init_weight_transfer_engine(request))

    async def disconnect(self) -> None:
        await self._watched(self._llm.shutdown_weight_transfer_engine())

    async def update(self, version: int, update_infos: Sequence[Mapping[str, Any]]) -> UpdateReport:
        """Load a weight version while requests in flight wait, and report what arrived.

        An engine whose update failed stays paused. Raises EngineDied when the engine process is gone.
        """
        began = time.monotonic()
        received = await self._watched(self._load(version, update_infos))
        if any(other != received[0] for other in received[1:]):
            raise RuntimeError(f"tensor-parallel workers received different weights of version {version}")
        return UpdateReport(version, received[0], time.monotonic() - began)

    async def _load(self, version: int, update_infos: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, int]]:
        """What each tensor-parallel worker received: checksums by tensor name."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        # Keys and values of the old version stay for the requests in flight; new requests can't meet them (salt).
        await self._llm.pause_generation(mode="keep", clear_cache=False)
        received: Sequence[Mapping[str, int]]
        if (adapter := self._settings.adapter) is not None:
            buckets = [dict(info) for info in update_infos]
            received = await self._llm.collective_rpc(
                "headway_install_adapter", args=(buckets, adapter.rank, adapter.alpha)
            )
            await self._llm.update_weight_version(str(version))
        else:
            await self._llm.start_weight_update()
            for info in update_infos:
                await self._llm.update_weights(WeightTransferUpdateRequest(update_info=dict(info)))
            received = await self._llm.collective_rpc("headway_received")
            await self._llm.finish_weight_update(weight_version=str(version))
        if self._settings.recompute_kv:
            await self._drop_keys_and_values()
        self.version = version
        # Not in a `finally`: after a failed update the weights are half loaded, and no token may come from them.
        await self._llm.resume_generation()
        return received

    async def _drop_keys_and_values(self) -> None:
        """Of everything, requests in flight included: they are computed anew when generation is resumed."""
        if not await self._llm.reset_prefix_cache(reset_running_requests=True):
            raise RuntimeError("the engine could not drop the keys and values of requests in flight (recompute_kv)")

    async def sleep(self) -> None:
        """Give the device's memory to the learner: weights go to the host, keys and values are dropped."""
        await self._watched(self._llm.sleep(level=1))

    async def wake(self) -> None:
        """Take the memory back; the weights are those from before `sleep`, until the next update."""
        await self._watched(self._llm.wake_up())

    async def close(self) -> None:
        self._llm.shutdown(timeout=1.0)  # the CPU engine's process never ends by itself, and holds nothing of value
        await asyncio.sleep(0)  # let cancelled output tasks end


def _adapter_options(adapter: AdapterSettings) -> dict[str, Any]:
    """vLLM's engine arguments for one adapter, which is always there."""
    from typing import get_args

    from vllm.config.lora import MaxLoRARanks

    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": min(rank for rank in get_args(MaxLoRARanks) if rank >= adapter.rank),
        # Else vLLM also prepares and computes the layers that have none, the output head among them.
        "lora_target_modules": sorted({name.rpartition(".")[2] for name in adapter.modules}),
    }
