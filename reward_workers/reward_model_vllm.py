"""A reward model on vLLM's pooling runner: the engine batches by itself, so every text is handed over at once.

The score is the head's output at the text's last token, without vLLM's own activation: in float32 it is that of
transformers up to rounding.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from reward_workers.reward_model import RewardModel

CPU_KV_CACHE_MIB = 512
MAX_TEXTS = 256  # in one step of the engine
GPU_MEMORY_SHARE = 0.85  # of the part of a GPU that is the model's


class ScorerDied(RuntimeError):
    """The engine process is gone; another has to be started."""


class VllmScorer:
    """`device` is `cpu` or `gpu`; `gpus` a share of one, or how many the model is cut over. `pad_id` is the id at which
    transformers' classifier never scores: no text may end with it.
    """

    def __init__(self, model: RewardModel, *, device: str, gpus: float = 1.0) -> None:
        self._settings = model
        self._device = device
        self._gpus = gpus
        self._numbers = itertools.count()
        self._llm: Any = None
        self.pad_id: int | None = None

    async def load(self) -> None:
        """Start the engine. The event loop stands still meanwhile: nothing can be asked before."""
        from transformers import AutoConfig
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        model = self._settings
        self.pad_id = AutoConfig.from_pretrained(model.path).get_text_config().pad_token_id
        options: dict[str, Any] = {
            "model": model.path,
            "runner": "pooling",
            "dtype": model.dtype,
            "max_model_len": model.token_limit(),
            "max_num_seqs": MAX_TEXTS,
            "max_num_batched_tokens": model.batch_tokens,
            "tensor_parallel_size": max(1, int(self._gpus)),
            "gpu_memory_utilization": GPU_MEMORY_SHARE * min(1.0, self._gpus),
            "disable_log_stats": True,
        }
        if self._device == "cpu":
            options |= {
                "tensor_parallel_size": 1,
                "enforce_eager": True,
                "enable_chunked_prefill": False,
                "enable_prefix_caching": False,
                "distributed_executor_backend": "uni",
                "kv_cache_memory_bytes": CPU_KV_CACHE_MIB * 2**20,
            }
        self._llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**options))

    async def score(self, ids: Sequence[int]) -> float:
        """The model's score of one text. Raises ScorerDied when the engine process is gone."""
        from vllm import PoolingParams
        from vllm.inputs import tokens_input
        from vllm.v1.engine.exceptions import EngineDeadError

        parameters = PoolingParams(task="classify", use_activation=False)
        final = None
        try:
            # Whoever asks for a group has a deadline.
            async for output in self._llm.encode(tokens_input(list(ids)), parameters, f"text-{next(self._numbers)}"):
                final = output
        except EngineDeadError as error:
            raise ScorerDied("the vLLM engine process of the reward model died") from error
        if final is None:
            raise RuntimeError("the engine ended a request without a score")
        return float(final.outputs.data[0])

    async def close(self) -> None:
        if self._llm is not None:
            self._llm.shutdown(timeout=1.0)  # the CPU engine's process never ends by itself, and holds nothing of value
