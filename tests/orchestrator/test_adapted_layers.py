"""What a LoRA adapter is put on, and what it can't be put on."""

from __future__ import annotations

import pytest

from orchestrator.adapted_layers import adapted_layers
from orchestrator.config import ConfigError
from orchestrator.models import resolve_model


@pytest.fixture(scope="module")
def tiny() -> str:
    return str(resolve_model("builtin:tiny"))


def test_every_linear_layer_of_every_block_by_default(tiny: str) -> None:
    names = adapted_layers(tiny, "all-linear")
    assert len(names) == 2 * 7
    assert names[:2] == ("model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj")


def test_a_regular_expression_chooses_layers(tiny: str) -> None:
    assert adapted_layers(tiny, r".*layers\.1\..*(q|v)_proj") == (
        "model.layers.1.self_attn.q_proj",
        "model.layers.1.self_attn.v_proj",
    )


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (r".*(q_proj|lm_head)", "lm_head can't be adapted"),
        (r".*embed_tokens", "model.embed_tokens can't be adapted"),
        ("nothing_here", "nothing_here"),
        (r".*(q_proj", "unterminated subpattern"),
        (r".*norm", "not supported"),
    ],
)
def test_what_can_not_be_adapted_is_refused_by_name(tiny: str, targets: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"model\.lora\.targets=.*{message}"):
        adapted_layers(tiny, targets)
