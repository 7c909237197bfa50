"""How much memory a learner rank will need, from the model's shape and the configuration alone.

Counted are weights, gradients, optimizer state, the frozen reference, what the forward pass of the fullest micro-batch keeps
for the backward pass, and the vocabulary's logits. What a framework needs for itself (a CUDA context, an allocator's gaps,
communication buffers) is not: the total is a lower bound that `scripts/bench_learner.py` holds against what was measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from orchestrator.config import Config, ConfigError, reference_place
from orchestrator.model_shape import ModelShape

GIB = 2**30
GRADIENT_BYTES = 4  # a parameter: added up in float32
OPTIMIZER_BYTES = 12  # a parameter: master weight and AdamW's two moments in float32


@dataclass(frozen=True)
class LearnerMemory:
    """Bytes of one rank by part, on its device."""

    parts: Mapping[str, float]

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in self.parts.items() if size / GIB >= 0.05)
        return f"{self.total / GIB:.1f} GiB a rank" + (f" ({parts})" if parts else "")


def learner_memory(shape: ModelShape, config: Config) -> LearnerMemory:
    """What a rank of `learner.ranks` will need at its fullest micro-batch."""
    learner, lora_rank, fp32_head = config.learner, config.model.lora.rank, config.model.fp32_head
    number = 2 if config.model.dtype == "bfloat16" else 4
    ranks, stage = learner.ranks, learner.zero_stage
    trainable = shape.trainable(lora_rank)
    frozen = shape.parameters if lora_rank else 0
    tokens = learner.max_tokens_per_microbatch
    layer = shape.kept_per_token(number)
    kept = (
        tokens * (shape.layers * number * shape.hidden + layer)
        if learner.gradient_checkpointing
        else tokens * shape.layers * layer
    )
    rows = min(tokens, learner.logprob_chunk_tokens)
    on_cpu = learner.offload and config.placement.device != "cpu"
    gradients = GRADIENT_BYTES * trainable / (ranks if stage >= 2 else 1)
    reference = {
        "ranks": number * shape.parameters / (ranks if stage == 3 else 1),
        # A visitor, before there are gradients and what is kept for them; ZeRO-3 lets it in layer by layer.
        "offload": 0.0 if stage == 3 else max(0.0, number * shape.parameters - gradients - kept),
    }
    return LearnerMemory(
        {
            "weights": number * (frozen + trainable) / (ranks if stage == 3 else 1),
            "gradients": gradients,
            "optimizer": 0.0 if on_cpu else OPTIMIZER_BYTES * trainable / (ranks if stage >= 1 else 1),
            "reference": reference.get(reference_place(config) or "", 0.0),
            "activations": kept,
            # Logits, their softmax and their gradient; of a bfloat16 head that computes in float32, a copy too.
            "logits": 3 * (4 if fp32_head else number) * rows * shape.vocabulary
            + (4 * shape.vocabulary * shape.hidden if fp32_head and number == 2 else 0),
        }
    )


def check_memory(estimate: LearnerMemory, there_bytes: int, where: str) -> None:
    """Raises ConfigError, with the parts and what would make them smaller, when `there_bytes` can't hold the estimate."""
    if estimate.total <= there_bytes:
        return
    remedies = {
        "weights": "learner.zero_stage=3 with more learner.ranks, or model.lora.rank",
        "gradients": "learner.zero_stage=2 with more learner.ranks, or model.lora.rank",
        "optimizer": "learner.offload=true, more learner.ranks, or model.lora.rank",
        "reference": "learner.reference=offload or own, learner.zero_stage=3 with more learner.ranks, or model.lora.rank (the base "
        "is its own reference)",
        "activations": "learner.gradient_checkpointing=true, or a smaller learner.max_tokens_per_microbatch",
        "logits": "a smaller learner.logprob_chunk_tokens",
    }
    largest = max(estimate.parts, key=lambda name: estimate.parts[name])
    raise ConfigError(
        f"the learner needs at least {estimate}; {where} has {there_bytes / GIB:.1f} GiB. Most of it is {largest}: "
        f"{remedies[largest]}"
    )
