"""The policy network of a learner rank: a Hugging Face causal model that answers one question, «how likely are these
tokens?», with full fine-tuning or LoRA. A LoRA policy without its adapter is the frozen base.

It is one `nn.Module` whose `forward` does everything, because DeepSpeed's ZeRO-3 gathers parameters in hooks around
forward calls.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from learner.attention import tree_mask, use_tree_attention
from learner.logprobs import chunks_of, logit_transform, token_logprobs, use_float32
from learner.tensors import MicroBatchTensors


@dataclass(frozen=True)
class PolicySettings:
    """`lora_rank` 0 is full fine-tuning. `dtype` is the compute type, `fp32_head` excepts the output head from it; master
    weights are the optimizer's matter."""

    model_path: str
    dtype: str
    lora_rank: int = 0
    lora_alpha: float = 32.0
    lora_targets: str = "all-linear"
    gradient_checkpointing: bool = False
    chunk_tokens: int = 1024
    entropy_gradient: bool = False
    fp32_head: bool = False
    seed: int = 0


class Policy(torch.nn.Module):
    def __init__(self, settings: PolicySettings) -> None:
        super().__init__()
        from transformers import AutoModelForCausalLM

        torch.manual_seed(settings.seed)  # LoRA's A matrices are random: equal on all ranks
        # Asked for by name, SDPA is refused by most models whose attention it can't compute; the trees' attention rests on it.
        model = AutoModelForCausalLM.from_pretrained(
            settings.model_path, dtype=getattr(torch, settings.dtype), attn_implementation="sdpa"
        )
        use_tree_attention(model)
        if settings.gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self._transform = logit_transform(model.config.get_text_config())
        if settings.fp32_head:
            use_float32(model.get_output_embeddings())
        self.is_lora = settings.lora_rank > 0
        if self.is_lora:
            from peft import LoraConfig, get_peft_model

            if settings.gradient_checkpointing:
                model.enable_input_require_grads()  # else nothing before the first adapter needs a gradient
            lora = LoraConfig(
                r=settings.lora_rank,
                lora_alpha=settings.lora_alpha,
                lora_dropout=0.0,  # the ratio to the behaviour policy would be noise
                target_modules=settings.lora_targets,
                task_type="CAUSAL_LM",
            )
            model = get_peft_model(model, lora)
        model.train()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        self.model: Any = model
        self._settings = settings
        # With ZeRO-3 every call of the head gathers it from all ranks, in the forward pass and where that is repeated in the
        # backward pass: all ranks must call it equally often. This gives the largest number of calls that any rank needs.
        self.agree: Callable[[int], int] | None = None

    @property
    def causal_lm(self) -> Any:
        """The Hugging Face model, without peft's wrapper around it."""
        return self.model.get_base_model() if self.is_lora else self.model

    def forward(self, batch: MicroBatchTensors, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Logprobs and entropies, both float32 [R, L], of the sampled tokens; 0 where `response_mask` is False.

        Every parameter takes part, also where nothing is sampled: ranks without data stand in all collectives.
        """
        causal_lm = self.causal_lm
        backbone = getattr(causal_lm, causal_lm.base_model_prefix)
        hidden = backbone(
            input_ids=batch.input_ids,
            attention_mask=tree_mask(batch.subtree_end),
            position_ids=batch.position_ids,
            use_cache=False,
        ).last_hidden_state
        chunks = chunks_of(len(batch.target_ids), self._settings.chunk_tokens)
        logprobs, entropy = token_logprobs(
            hidden[batch.source_row, batch.source_position],
            batch.target_ids,
            causal_lm.get_output_embeddings(),
            self._transform,
            temperature=temperature,
            chunk_tokens=self._settings.chunk_tokens,
            entropy_gradient=self._settings.entropy_gradient,
            least_chunks=chunks if self.agree is None else self.agree(chunks),
        )
        where = (batch.answer, batch.offset)
        empty = torch.zeros(batch.response_mask.shape, dtype=torch.float32, device=logprobs.device)
        logprobs, entropy = logprobs[batch.prediction], entropy[batch.prediction]
        return empty.index_put(where, logprobs), empty.index_put(where, entropy)

    @contextlib.contextmanager
    def as_reference(self) -> Iterator[None]:
        """Within this context a LoRA policy computes as its frozen base."""
        with self.model.disable_adapter():
            yield
