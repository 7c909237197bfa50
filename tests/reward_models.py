"""Tiny reward models for tests: random sequence classifiers with the tiny model's tokenizer and chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from orchestrator.models import resolve_model

CONTEXT_TOKENS = 512


def write_reward_model(folder: Path, kind: str = "llama", *, seed: int = 0, **changes: Any) -> Path:
    """A float32 classifier of two layers with one label, of transformers' `llama` or `qwen2`; `changes` are to its config.

    The head is large enough for scores that differ by more than rounding.
    """
    import torch
    from transformers import (
        AutoTokenizer,
        LlamaConfig,
        LlamaForSequenceClassification,
        Qwen2Config,
        Qwen2ForSequenceClassification,
    )

    kinds: dict[str, tuple[Any, Any]] = {
        "llama": (LlamaConfig, LlamaForSequenceClassification),
        "qwen2": (Qwen2Config, Qwen2ForSequenceClassification),
    }
    make_config, make_model = kinds[kind]
    tokenizer = AutoTokenizer.from_pretrained(resolve_model("builtin:tiny"))
    config = make_config(
        **{
            "vocab_size": len(tokenizer),
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": CONTEXT_TOKENS,
            "pad_token_id": tokenizer.pad_token_id,
            "num_labels": 1,
            "dtype": "float32",
            **changes,
        }
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make_model(config)
        torch.nn.init.normal_(model.score.weight, std=0.5)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def plain_scores(folder: Path, conversations: Sequence[Sequence[Mapping[str, Any]]]) -> list[float]:
    """What transformers gives for each conversation alone: no batch, no padding, none of Headway's code."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    scores = []
    for messages in conversations:
        text = tokenizer.apply_chat_template(list(messages), tokenize=False)
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        with torch.inference_mode():
            scores.append(float(model(ids).logits[0, 0]))
    return scores
