"""What the learner's tests share: the tiny random model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch


@pytest.fixture(scope="session")
def tiny_path() -> str:
    from orchestrator.models import resolve_model

    return str(resolve_model("builtin:tiny"))


@pytest.fixture(scope="session")
def untied_path(tiny_path: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model whose output head is a tensor of its own."""
    return random_model(tmp_path_factory.mktemp("untied"), tiny_path, tie_word_embeddings=False)


@pytest.fixture(scope="session")
def wide_path(tiny_path: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose matrices have more than 10^5 elements: smaller ones ZeRO-3 never lets go of."""
    changes = {"hidden_size": 352, "num_attention_heads": 11, "num_key_value_heads": 11, "intermediate_size": 480}
    return random_model(tmp_path_factory.mktemp("wide"), tiny_path, **changes)


def random_model(folder: Path, base: str, **changes: Any) -> str:
    """A random model of the base's kind, with its tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    config = AutoConfig.from_pretrained(base, **changes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    return str(folder)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
