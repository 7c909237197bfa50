"""What the learner's tests share: the tiny random model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="session")
def tiny_path() -> str:
    from orchestrator.models import resolve_model

    return str(resolve_model("builtin:tiny"))


@pytest.fixture(scope="session")
def untied_path(tiny_path: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model whose output head is a tensor of its own."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path_factory.mktemp("untied")
    config = AutoConfig.from_pretrained(tiny_path)
    config.tie_word_embeddings = False
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_path).save_pretrained(folder)
    return str(folder)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
