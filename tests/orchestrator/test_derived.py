"""Settings that follow from others: where what answers share may be computed once, and the user's filter."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers import MistralConfig, PretrainedConfig, Qwen2Config

from orchestrator.compose import load
from orchestrator.config import ConfigError
from orchestrator.derived import prefix_sharing, queue_settings


def prepared(folder: Path, model: PretrainedConfig, share_prefixes: bool | None = None) -> Any:
    model.save_pretrained(folder)
    learner = SimpleNamespace(share_prefixes=share_prefixes)
    return SimpleNamespace(model_path=str(folder), config=SimpleNamespace(learner=learner))


@pytest.mark.parametrize(
    ("model", "possible"),
    [
        (MistralConfig(sliding_window=None), True),
        (MistralConfig(sliding_window=4096), False),  # of all layers, which the configuration does not name
        (Qwen2Config(), True),
        (Qwen2Config(num_hidden_layers=4, use_sliding_window=True, max_window_layers=2), False),
    ],
    ids=["no window", "one window for all", "unused window", "window in some layers"],
)
def test_prefixes_are_shared_only_where_every_layer_sees_the_whole_text(
    tmp_path: Path, model: PretrainedConfig, possible: bool
) -> None:
    assert prefix_sharing(prepared(tmp_path, model)) is possible
    assert not prefix_sharing(prepared(tmp_path, model, False))
    if possible:
        assert prefix_sharing(prepared(tmp_path, model, True))
        return
    with pytest.raises(ConfigError, match="layers of kind sliding_attention"):
        prefix_sharing(prepared(tmp_path, model, True))


async def keep_later(members: Any) -> bool:
    return False


def keep_promised(members: Any) -> Any:
    return asyncio.get_running_loop().create_future()


def keep_each(members: Any) -> np.ndarray:
    return np.array([True, False])


def keep_nothing_said(members: Any) -> None:
    pass


def keep_all(members: Any) -> np.bool_:
    return np.True_


class TestFilter:
    def asked(self, name: str) -> bool:
        keep = queue_settings(load([f"sampling.keep={__name__}.{name}"])).keep
        assert keep is not None

        async def ask() -> bool:
            return keep([])

        return asyncio.run(ask())

    def test_its_answer_is_a_truth(self) -> None:
        assert self.asked("keep_all") is True

    @pytest.mark.parametrize(
        ("name", "words"),
        [
            ("keep_later", "is an async function"),
            ("keep_promised", "returned <Future pending>; expected true"),
            ("keep_each", "raised ValueError: The truth value of an array"),
            ("keep_nothing_said", "returned None; expected true"),
        ],
    )
    def test_what_is_no_answer_is_refused_by_name(self, name: str, words: str) -> None:
        with pytest.raises(ConfigError, match=f"sampling.keep={__name__}.{name}: {words}"):
            self.asked(name)
