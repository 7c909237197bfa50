"""From GPUs and a model's size to `Timing`: a roofline, for machines that nobody has measured yet.

The formulas, with P the parameters and A the active ones, b bytes of a parameter, k bytes of keys and values a token, g GPUs
of an engine (or L of the learner), and effective speeds: bandwidth B = memory_gb_per_s * decode_bandwidth_share, compute
F = peak_tflops * decode_mfu on engines and F' = peak_tflops * learner_mfu on the learner.

    decode step, base           P * b / (g * B)                    the weights are read once, by all answers together
    decode step, per answer     c * k / (g * B) + 2 * A / (g * F)  its keys and values are read, one token is computed
    prefill, per prompt token   2 * A / (g * F)
    learning, per token         f * A / (L * F')                   f: `flops_per_parameter`
    publishing                  P * b / network_gb_per_s           every engine receives at once

c is the mean context that a token of an answer is written in: the prompt, and half the answer, long answers counting for more
because they have more tokens: prompt + E[length^2] / (2 E[length]).

Assumptions. Reading and computing add up (a perfect overlap would take the longer of the two). With mixture of experts, a step
touches every expert, as large batches do. An engine's GPUs share its work evenly, as do the learner's; what they lose by talking
to each other, and attention's own share of the computing, is in the efficiencies. Only so many answers decode at once as
`rollout.max_concurrent_answers` and the memory beside the weights allow, each holding c tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from orchestrator.config import Config, ConfigError, SimulateConfig, reference_place
from orchestrator.simulation.types import Timing, Workload
from orchestrator.simulation.workload import SyntheticWorkload

GIGA, TERA = 1e9, 1e12
SAMPLED_GROUPS = 4096  # for mean lengths


@dataclass(frozen=True)
class Layout:
    """Which GPUs do what: some for the engines, some for the learner, or `shared`: the same for both, by turns."""

    rollout_gpus: int
    learner_gpus: int
    gpus_per_engine: int
    shared: bool

    @classmethod
    def of(cls, config: Config) -> Layout:
        """What the keys say. Raises ConfigError where whole engines do not come out even."""
        s, r = config.simulate, config.rollout
        width = s.gpus_per_engine or r.tensor_parallel_size
        rollout_gpus = s.rollout_gpus or r.replicas * width
        if rollout_gpus % width:
            raise ConfigError(
                f"simulate.rollout_gpus={rollout_gpus} does not make whole engines of simulate.gpus_per_engine={width} GPUs "
                "(default: rollout.tensor_parallel_size); expected a multiple"
            )
        return cls(rollout_gpus, s.learner_gpus or config.learner.ranks, width, config.placement.mode == "shared")

    @classmethod
    def of_run(cls, config: Config) -> Layout:
        """What a run with this configuration has; CPU engines and ranks count as one each."""
        r = config.rollout
        width = r.tensor_parallel_size
        return cls(r.replicas * width, config.learner.ranks, width, config.placement.mode == "shared")

    @property
    def engines(self) -> int:
        return self.rollout_gpus // self.gpus_per_engine

    @property
    def total_gpus(self) -> int:
        return max(self.rollout_gpus, self.learner_gpus) if self.shared else self.rollout_gpus + self.learner_gpus

    def split(self, rollout_gpus: int) -> Layout:
        """The same GPUs, so many of them for the engines and the others for the learner."""
        return Layout(rollout_gpus, self.total_gpus - rollout_gpus, self.gpus_per_engine, shared=False)

    def taking_turns(self) -> Layout:
        """The same GPUs, all of them for both sides (as many as make whole engines)."""
        total = self.total_gpus
        return Layout(total - total % self.gpus_per_engine, total, self.gpus_per_engine, shared=True)


class Machines(Protocol):
    """What is known of machines and task: from a roofline (`Roofline`), or fitted to a run (`orchestrator.simulation.fit`)."""

    def workload(self, answers_per_group: int) -> Workload:
        """The answers; the same on any machine."""

    def timing(self, layout: Layout) -> Timing:
        """How long things take on these GPUs. Raises ConfigError where that can't be."""


class Roofline:
    """The machines that the keys under `simulate` describe."""

    def __init__(self, config: Config) -> None:
        self._config = config
        w = config.simulate.workload
        self._workload = SyntheticWorkload(
            prompt_tokens=w.prompt_tokens,
            median_tokens=w.median_response_tokens,
            spread=w.response_spread,
            max_tokens=config.rollout.max_response_tokens,
            prompt_share=w.prompt_share,
            wrong_length_factor=w.wrong_length_factor,
            pass_alpha=w.pass_alpha,
            pass_beta=w.pass_beta,
            failed_ratio=w.failed_ratio,
        )

    def workload(self, answers_per_group: int) -> Workload:
        """Lognormal and Beta, for groups of any size."""
        return self._workload

    @cached_property
    def context_tokens(self) -> float:
        """Mean context of a written token; c in the module's formulas."""
        answers = self._config.sampling.answers_per_group
        lengths, _ = self._workload.sample(np.random.default_rng(0), SAMPLED_GROUPS, answers)
        return self._workload.prompt_tokens + float((lengths.astype(np.float64) ** 2).mean() / (2 * lengths.mean()))

    def timing(self, layout: Layout) -> Timing:
        """See the module's formulas. Raises ConfigError where the model does not fit an engine's memory."""
        s, config = self._config.simulate, self._config
        model, gpu = s.model, s.gpu
        weights_bytes = model.parameters_billion * GIGA * model.bytes_per_parameter
        active = (model.active_parameters_billion or model.parameters_billion) * GIGA
        bandwidth = layout.gpus_per_engine * gpu.memory_gb_per_s * GIGA * gpu.decode_bandwidth_share
        token_s = 2 * active / (layout.gpus_per_engine * gpu.peak_tflops * TERA * gpu.decode_mfu)
        publish_s = s.publish_s if s.publish_s is not None else weights_bytes / (gpu.network_gb_per_s * GIGA)
        engine_speed, learner_speed = speeds(s, layout)
        return Timing(
            decode_base_s=weights_bytes / bandwidth,
            decode_per_answer_s=self.context_tokens * model.kv_bytes_per_token / bandwidth + token_s,
            max_concurrent_answers=self._concurrent_answers(layout, weights_bytes),
            prefill_s_per_token=token_s,
            learn_s_per_token=flops_per_parameter(config)
            * active
            / (layout.learner_gpus * gpu.peak_tflops * TERA * gpu.learner_mfu),
            learn_base_s=s.turn_s if layout.shared else 0.0,
            score_s=s.score_s,
            publish_s=publish_s,
            # In the learner's turn the engines stand still anyway.
            pause_s=publish_s if s.pause_s is None or layout.shared else min(s.pause_s, publish_s),
            between_s=s.between_s,
            engine_speed_while_learning=engine_speed,
            learner_speed_while_generating=learner_speed,
            learner_shares_prefixes=config.learner.share_prefixes is not False,
        )

    def _concurrent_answers(self, layout: Layout, weights_bytes: float) -> int:
        s, r = self._config.simulate, self._config.rollout
        memory = layout.gpus_per_engine * s.gpu.memory_gb * GIGA * r.gpu_memory_utilization
        fitting = (memory - weights_bytes) / (self.context_tokens * s.model.kv_bytes_per_token)
        if fitting < 1:
            raise ConfigError(
                f"simulate.model.parameters_billion={s.model.parameters_billion:g} is {weights_bytes / GIGA:.1f} GB of weights; "
                f"with keys and values of one answer that is more than an engine's {memory / GIGA:.1f} GB (simulate.gpus_per_engine"
                f"={layout.gpus_per_engine} x simulate.gpu.memory_gb={s.gpu.memory_gb:g} x rollout.gpu_memory_utilization="
                f"{r.gpu_memory_utilization}); give an engine more GPUs"
            )
        return min(r.max_concurrent_answers, int(fitting))


def speeds(keys: SimulateConfig, layout: Layout) -> tuple[float, float]:
    """Of the engines while the learner learns, and of the learner while all engines generate."""
    engine = keys.engine_speed_while_learning
    learner = keys.learner_speed_while_generating
    if engine is None:
        engine = 0.0 if layout.shared else 1.0  # turns, or devices of their own
    return engine, 1.0 if learner is None else learner


def flops_per_parameter(config: Config) -> float:
    """Floating-point operations of the learner for one token and active parameter.

    A forward pass takes 2, the gradients of activations and of weights 2 each (Kaplan et al., arXiv:2001.08361, section 2.1). With
    LoRA nearly no weight has a gradient; gradient checkpointing repeats the forward pass. All that in every epoch over a batch. A
    recomputed proximal policy takes one forward pass over what is not in the first update, a KL term to the initial policy one
    over the batch, unless that has devices of its own.
    """
    a = config.algorithm
    epoch = 4 if config.model.lora.rank else 6
    epoch += 2 * config.learner.gradient_checkpointing
    proximal = 2 * (a.updates_per_batch - 1) / a.updates_per_batch if a.proximal == "recompute" else 0.0
    reference = 2 * (a.kl_coefficient > 0 and reference_place(config) != "own")
    return epoch * a.epochs_per_batch + proximal + reference
