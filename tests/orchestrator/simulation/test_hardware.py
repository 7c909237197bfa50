"""The roofline: formulas by hand, what follows from ordinary keys, and what can't be."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from orchestrator.checks import validate_simulation
from orchestrator.compose import load
from orchestrator.config import Config, ConfigError
from orchestrator.simulation.hardware import Layout, Roofline, flops_per_parameter

pytestmark = pytest.mark.thorough

# Round numbers: 10 GB of weights at 1,000 GB/s, 100 TFLOP/s; every answer has 1,000 tokens.
ROUND = (
    "simulate.model={parameters_billion:5,bytes_per_parameter:2,kv_bytes_per_token:1e5}",
    "simulate.gpu={memory_gb:80,memory_gb_per_s:2000,decode_bandwidth_share:0.5,peak_tflops:100,decode_mfu:0.5}",
    "simulate.gpu={learner_mfu:0.25,network_gb_per_s:5}",
    "simulate.workload={prompt_tokens:100,median_response_tokens:1000,response_spread:0}",
    "simulate.rollout_gpus=8",
    "simulate.learner_gpus=4",
)


def configured(*overrides: str) -> Config:
    return load(["experiment=simulation", *ROUND, *overrides], validate_simulation)


def timing_of(config: Config) -> dict[str, float]:
    return dataclasses.asdict(Roofline(config).timing(Layout.of(config)))


def test_the_formulas() -> None:
    timing = timing_of(configured())
    context = 100 + 1000**2 / (2 * 1000)
    assert timing["decode_base_s"] == pytest.approx(10e9 / 1e12)
    assert timing["decode_per_answer_s"] == pytest.approx(context * 1e5 / 1e12 + 2 * 5e9 / 50e12)
    assert timing["prefill_s_per_token"] == pytest.approx(2 * 5e9 / 50e12)
    assert timing["learn_s_per_token"] == pytest.approx(8 * 5e9 / (4 * 25e12))  # gradient checkpointing
    assert timing["publish_s"] == timing["pause_s"] == pytest.approx(2.0)
    assert timing["engine_speed_while_learning"] == timing["learner_speed_while_generating"] == 1


def test_a_wider_engine_is_faster_in_all_it_does() -> None:
    one, two = timing_of(configured()), timing_of(configured("simulate.gpus_per_engine=2"))
    for name in ("decode_base_s", "decode_per_answer_s", "prefill_s_per_token"):
        assert two[name] == pytest.approx(one[name] / 2)
    assert two["learn_s_per_token"] == one["learn_s_per_token"]


def test_experts_are_read_in_whole_and_computed_in_part() -> None:
    dense, sparse = timing_of(configured()), timing_of(configured("simulate.model.active_parameters_billion=0.5"))
    assert sparse["decode_base_s"] == dense["decode_base_s"]
    assert sparse["prefill_s_per_token"] == pytest.approx(dense["prefill_s_per_token"] / 10)
    assert sparse["learn_s_per_token"] == pytest.approx(dense["learn_s_per_token"] / 10)


def test_long_answers_count_more_in_the_context() -> None:
    config = configured("simulate.workload.response_spread=1", "rollout.max_response_tokens=1000000")
    # Of a lognormal, E[L^2] / (2 E[L]) = median / 2 * exp(1.5 * spread^2).
    assert Roofline(config).context_tokens == pytest.approx(100 + 500 * np.exp(1.5), rel=0.1)


def test_turns() -> None:
    timing = timing_of(configured("placement=shared", "simulate.turn_s=7", "simulate.pause_s=0.5"))
    assert timing["engine_speed_while_learning"] == 0
    assert timing["learn_base_s"] == 7
    assert timing["pause_s"] == timing["publish_s"]  # engines stand still in the learner's turn, whatever the key says


def test_keys_replace_what_would_follow() -> None:
    keys = ("publish_s=9", "pause_s=3", "score_s=4", "between_s=5", "engine_speed_while_learning=0.5")
    timing = timing_of(configured(*(f"simulate.{key}" for key in keys)))
    names = ("publish_s", "pause_s", "score_s", "between_s", "engine_speed_while_learning")
    assert [timing[name] for name in names] == [9, 3, 4, 5, 0.5]


def test_answers_at_once_are_what_memory_and_configuration_allow() -> None:
    fitting = int((80e9 * 0.85 - 10e9) / (600 * 1e5))
    assert timing_of(configured("rollout.max_concurrent_answers=10000"))["max_concurrent_answers"] == fitting
    assert timing_of(configured("rollout.max_concurrent_answers=7"))["max_concurrent_answers"] == 7


def test_a_model_that_does_not_fit_is_refused() -> None:
    config = configured("simulate.model.parameters_billion=40")
    with pytest.raises(ConfigError, match=r"simulate.model.parameters_billion=40 is 80.0 GB of weights.*68.0 GB"):
        timing_of(config)
    assert timing_of(configured("simulate.model.parameters_billion=40", "simulate.gpus_per_engine=2"))


@pytest.mark.parametrize(
    ("overrides", "flops"),
    [
        ((), 8),
        (("learner.gradient_checkpointing=false",), 6),
        (("learner.gradient_checkpointing=false", "model.lora.rank=8"), 4),
        (("algorithm=grpo", "algorithm.epochs_per_batch=2"), 8 * 2 + 2),  # with a KL term
        (("algorithm=grpo", "learner.reference=own"), 8),
        (("algorithm.epochs_per_batch=2",), 16),
        (("algorithm.proximal=recompute", "algorithm.updates_per_batch=4"), 8 + 2 * 3 / 4),
    ],
)
def test_operations_follow_from_the_algorithm(overrides: tuple[str, ...], flops: float) -> None:
    assert flops_per_parameter(configured(*overrides)) == flops


class TestLayout:
    def test_of_ordinary_keys(self) -> None:
        ordinary = ("simulate.rollout_gpus=null", "simulate.learner_gpus=null", "rollout.replicas=3", "learner.ranks=5")
        layout = Layout.of(configured(*ordinary, "rollout.tensor_parallel_size=2"))
        assert layout == Layout(6, 5, 2, shared=False)
        assert (layout.engines, layout.total_gpus) == (3, 11)

    def test_engines_must_come_out_even(self) -> None:
        with pytest.raises(ConfigError, match=r"simulate.rollout_gpus=8 does not make whole engines of .*=3 GPUs"):
            Layout.of(configured("simulate.gpus_per_engine=3"))

    def test_the_same_gpus_otherwise(self) -> None:
        layout = Layout(8, 4, 1, shared=False)
        assert layout.split(3) == Layout(3, 9, 1, shared=False)
        assert layout.taking_turns() == Layout(12, 12, 1, shared=True)
        assert layout.taking_turns().total_gpus == 12


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("simulate.steps=0", "simulate.steps=0: expected at least 1"),
        ("simulate.gpu.learner_mfu=1.5", "simulate.gpu.learner_mfu=1.5: expected at most 1"),
        ("simulate.model.parameters_billion=0", "simulate.model.parameters_billion=0.0: expected more than 0"),
        ("rollout.max_response_tokens=500", "simulate.workload.median_response_tokens=1000 is above"),
        ("simulate.pause_s=2 simulate.publish_s=1", "simulate.pause_s=2.0 is the part of simulate.publish_s=1.0"),
    ],
)
def test_refused(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        configured(*override.split())
