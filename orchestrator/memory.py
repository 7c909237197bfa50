"""How much memory a learner rank or a reference actor will need, from the model's shape and the configuration alone.

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
OF_LEARNER = {
    "weights": "learner.zero_stage=3 with more learner.ranks, or model.lora.rank",
    "gradients": "learner.zero_stage=2 with more learner.ranks, or model.lora.rank",
    "optimizer": "learner.offload=true, more learner.ranks, or model.lora.rank",
    "reference": "learner.reference=offload or own, learner.zero_stage=3 with more learner.ranks, or model.lora.rank (the base "
    "is its own reference)",
    "activations": "learner.gradient_checkpointing=true, or a smaller learner.max_tokens_per_microbatch",
    "logits": "a smaller learner.logprob_chunk_tokens",
}
OF_REFERENCE = {
    "weights": "learner.reference=ranks with learner.zero_stage=3, which shards it, or model.lora.rank (the base is its own "
    "reference)",
    "activations": "a smaller learner.max_tokens_per_microbatch",
    "logits": "a smaller learner.logprob_chunk_tokens",
}


@dataclass(frozen=True)
class Memory:
    """Bytes by part that one `process` of a kind needs on its device."""

    process: str
    parts: Mapping[str, float]
    remedies: Mapping[str, str]  # what would make each part smaller

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in self.parts.items() if size / GIB >= 0.05)
        return f"{self.total / GIB:.1f} GiB a {self.process}" + (f" ({parts})" if parts else "")


def learner_memory(shape: ModelShape, config: Config) -> Memory:
    """What a rank of `learner.ranks` will need at its fullest micro-batch."""
    learner, lora_rank = config.learner, config.model.lora.rank
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
    on_cpu = learner.offload and config.placement.device != "cpu"
    gradients = GRADIENT_BYTES * trainable / (ranks if stage >= 2 else 1)
    reference = {
        "ranks": number * shape.parameters / (ranks if stage == 3 else 1),
        # A visitor, before there are gradients and what is kept for them; ZeRO-3 lets it in layer by layer.
        "offload": 0.0 if stage == 3 else max(0.0, number * shape.parameters - gradients - kept),
    }
    return Memory(
        "rank",
        {
            "weights": number * (frozen + trainable) / (ranks if stage == 3 else 1),
            "gradients": gradients,
            "optimizer": 0.0 if on_cpu else OPTIMIZER_BYTES * trainable / (ranks if stage >= 1 else 1),
            "reference": reference.get(reference_place(config) or "", 0.0),
            "activations": kept,
            "logits": _logits_bytes(shape, config, copies=3),  # themselves, their softmax and their gradient
        },
        OF_LEARNER,
    )


def reference_memory(shape: ModelShape, config: Config) -> Memory:
    """What an actor of `learner.reference=own` will need: a whole model that keeps one layer at a time."""
    number = 2 if config.model.dtype == "bfloat16" else 4
    return Memory(
        "reference actor",
        {
            "weights": number * shape.parameters,
            "activations": config.learner.max_tokens_per_microbatch * shape.kept_per_token(number),
            "logits": _logits_bytes(shape, config, copies=2),
        },
        OF_REFERENCE,
    )


def _logits_bytes(shape: ModelShape, config: Config, *, copies: int) -> float:
    """Of one chunk of tokens, and, where a bfloat16 head computes in float32, the head's own copy."""
    fp32_head, bfloat16 = config.model.fp32_head, config.model.dtype == "bfloat16"
    number = 2 if bfloat16 and not fp32_head else 4
    tokens = min(config.learner.max_tokens_per_microbatch, config.learner.logprob_chunk_tokens)
    head = 4 * shape.vocabulary * shape.hidden if fp32_head and bfloat16 else 0
    return copies * number * tokens * shape.vocabulary + head


def check_memory(estimate: Memory, there_bytes: int, where: str) -> None:
    """Raises ConfigError, with the parts and what would make them smaller, when `there_bytes` can't hold the estimate."""
    if estimate.total <= there_bytes:
        return
    largest = max(estimate.parts, key=lambda name: estimate.parts[name])
    raise ConfigError(
        f"the learner needs at least {estimate}; its {where} has {there_bytes / GIB:.1f} GiB. Most of it is {largest}: "
        f"{estimate.remedies[largest]}"
    )
