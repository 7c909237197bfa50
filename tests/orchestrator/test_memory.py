"""The learner's memory, from sizes alone: each key that should make it smaller does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from orchestrator.config import Config, ConfigError
from orchestrator.memory import GIB, Memory, check_memory, learner_memory, reference_memory
from orchestrator.model_shape import ModelShape
from orchestrator.models import resolve_model

SEVEN_B = ModelShape(
    parameters=7_000_000_000,
    layers=32,
    hidden=4096,
    queries=4096,
    keys=1024,
    intermediate=14336,
    vocabulary=128_000,
    linear=((4096, 4096), (4096, 1024), (4096, 1024), (4096, 4096), (4096, 14336), (4096, 14336), (14336, 4096)) * 32,
)


def config(change: Callable[[Config], None] = lambda _: None) -> Config:
    made = Config()
    made.model.dtype = "bfloat16"
    made.learner.ranks = 8
    made.learner.zero_stage = 2
    change(made)
    return made


def test_the_shape_is_the_models() -> None:
    shape = ModelShape.of(str(resolve_model("builtin:tiny")))
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(resolve_model("builtin:tiny")))
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    assert len(shape.linear) == 7 * shape.layers
    assert shape.trainable(0) == shape.parameters
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    assert shape.trainable(4) == sum(p.numel() for p in adapted.parameters() if p.requires_grad)


def test_parts_of_full_fine_tuning() -> None:
    parts = learner_memory(SEVEN_B, config()).parts
    assert parts["weights"] == 14e9
    assert parts["gradients"] == 28e9 / 8
    assert parts["optimizer"] == 84e9 / 8
    assert parts["reference"] == 0
    assert parts["logits"] == 3 * 2 * 1024 * 128_000


def offload(c: Config) -> None:
    c.learner.offload = True
    c.placement.device = "gpu"


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("weights", lambda c: setattr(c.learner, "zero_stage", 3)),
        ("gradients", lambda c: setattr(c.model.lora, "rank", 16)),
        ("optimizer", offload),
        ("optimizer", lambda c: setattr(c.learner, "ranks", 16)),
        ("activations", lambda c: setattr(c.learner, "gradient_checkpointing", True)),
        ("activations", lambda c: setattr(c.learner, "max_tokens_per_microbatch", 2048)),
        ("logits", lambda c: setattr(c.learner, "logprob_chunk_tokens", 128)),
    ],
)
def test_what_makes_a_part_smaller(part: str, change: Callable[[Config], None]) -> None:
    before, after = learner_memory(SEVEN_B, config()), learner_memory(SEVEN_B, config(change))
    assert after.parts[part] < before.parts[part]
    assert after.total < before.total


def test_a_reference_is_a_second_model_unless_the_policy_is_an_adapter() -> None:
    def with_kl(c: Config) -> None:
        c.algorithm.kl_coefficient = 0.1

    def with_both(c: Config) -> None:
        with_kl(c)
        c.model.lora.rank = 8

    assert learner_memory(SEVEN_B, config(with_kl)).parts["reference"] == 14e9
    assert learner_memory(SEVEN_B, config(with_both)).parts["reference"] == 0


def test_a_reference_weighs_where_it_lives() -> None:
    def part(place: str, zero_stage: int, *, checkpointing: bool = False) -> float:
        def change(c: Config) -> None:
            c.algorithm.kl_coefficient = 0.1
            c.learner.reference, c.learner.zero_stage = place, zero_stage
            c.learner.gradient_checkpointing = checkpointing

        return learner_memory(SEVEN_B, config(change)).parts["reference"]

    assert part("ranks", 3) == 14e9 / 8
    assert part("own", 2) == part("own", 3) == part("offload", 3) == 0
    # What it takes of the device beyond what gradients and activations take there later.
    there = learner_memory(SEVEN_B, config(lambda c: setattr(c.learner, "gradient_checkpointing", True))).parts
    assert part("offload", 2, checkpointing=True) == 14e9 - there["gradients"] - there["activations"] > 0
    assert part("offload", 2) == 0


def test_too_much_is_refused_with_what_would_help() -> None:
    estimate = learner_memory(SEVEN_B, config())
    check_memory(estimate, int(estimate.total) + 1, "GPU")
    with pytest.raises(
        ConfigError, match=r"at least .* GiB a rank .*its GPU has 16\.0 GiB.*activations: learner\.grad"
    ):
        check_memory(estimate, 16 * GIB, "GPU")
    small = replace(estimate, parts={**estimate.parts, "activations": 0.0})
    with pytest.raises(ConfigError, match=r"Most of it is weights: learner\.zero_stage=3"):
        check_memory(small, 16 * GIB, "GPU")


def test_a_reference_actor_holds_a_whole_model_and_no_more_than_a_layer() -> None:
    estimate = reference_memory(SEVEN_B, config())
    tokens, logits = Config().learner.max_tokens_per_microbatch, learner_memory(SEVEN_B, config()).parts["logits"]
    assert estimate.parts == {
        "weights": 14e9,
        "activations": tokens * SEVEN_B.kept_per_token(2),
        "logits": pytest.approx(2 / 3 * logits),
    }
    with pytest.raises(
        ConfigError, match=r"GiB a reference actor .*its GPU has 10\.0 GiB.*weights: learner\.reference=ranks"
    ):
        check_memory(estimate, 10 * GIB, "GPU")


def test_a_part_of_nothing_is_not_told() -> None:
    assert str(Memory("rank", {"weights": 2.5 * GIB, "reference": 0.0}, {})) == "2.5 GiB a rank (weights 2.5)"
    assert replace(SEVEN_B, parameters=1).trainable(0) == 1
