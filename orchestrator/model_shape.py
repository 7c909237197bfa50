"""A language model's sizes, read from its configuration: no weights are loaded."""

from __future__ import annotations

import functools
from dataclasses import dataclass


@dataclass(frozen=True)
class ModelShape:
    """`linear` are the (inputs, outputs) of the layers that LoRA adapts."""

    parameters: int
    layers: int
    hidden: int
    queries: int  # width of all query heads
    keys: int  # width of all key heads, and of all value heads
    intermediate: int
    vocabulary: int
    linear: tuple[tuple[int, int], ...]

    @classmethod
    @functools.cache  # a large model takes a while even without weights, and several ask
    def of(cls, model_path: str) -> ModelShape:
        """Read from the model's configuration; no weights are loaded."""
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(model_path)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        text, head = config.get_text_config(), model.get_output_embeddings()
        head_width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        key_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        linear = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head]
        return cls(
            parameters=sum(p.numel() for p in model.parameters()),
            layers=text.num_hidden_layers,
            hidden=text.hidden_size,
            queries=text.num_attention_heads * head_width,
            keys=key_heads * head_width,
            intermediate=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
            vocabulary=text.vocab_size,
            linear=tuple((m.in_features, m.out_features) for m in linear),
        )

    def trainable(self, lora_rank: int) -> int:
        return lora_rank * sum(i + o for i, o in self.linear) if lora_rank else self.parameters

    def kept_per_token(self, number_bytes: int) -> int:
        """Bytes that one layer keeps of each token for the backward pass: both norms' outputs and their float32 copies,
        queries, keys, values, attention's output, and the gated MLP's four products."""
        numbers = 2 * self.hidden + 2 * self.queries + 2 * self.keys + 4 * self.intermediate
        return number_bytes * numbers + 4 * 2 * self.hidden * (2 if number_bytes < 4 else 1)
