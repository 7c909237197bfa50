"""Where what answers share may be computed once."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import MistralConfig, PretrainedConfig, Qwen2Config

from orchestrator.config import ConfigError
from orchestrator.derived import prefix_sharing


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
