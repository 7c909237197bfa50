"""What the KL term and the entropy bonus weigh, from batch to batch: fixed, or following the policy.

Contract: coefficients change between batches only, by what the batch just learned says of all its trained tokens on all ranks,
so every rank and every cut of a batch sees the same ones. They are the run's state: a checkpoint holds them, and the journal
those of every batch in which they were adapted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from learner import entropy, kl
from learner.batch import Coefficients
from orchestrator.config import AlgorithmConfig


class CoefficientControl:
    """With `algorithm.kl_target` the KL coefficient is steered towards that KL, by Ziegler et al.'s controller; with
    `algorithm.entropy_target` the entropy bonus is there while the entropy is at or below it, as in Skywork-OR1.
    """

    def __init__(self, config: AlgorithmConfig) -> None:
        self._config = config
        self._kl = config.kl_coefficient
        self._entropy = config.entropy_coefficient
        self._bonus = True  # whether the entropy of the batch before was at or below the target

    @property
    def of_batch(self) -> Coefficients:
        """What the next batch is learned with."""
        a = self._config
        return Coefficients(
            kl=None if a.kl_target is None else self._kl,
            entropy=None if a.entropy_target is None else self._entropy if self._bonus else 0.0,
        )

    def metrics(self) -> dict[str, float]:
        """The coefficients of the next batch; a term that can't be there is absent."""
        a, values = self._config, {}
        if a.kl_coefficient:
            values["actor/kl_coefficient"] = self._kl
        if a.entropy_coefficient or a.entropy_target is not None:
            values["actor/entropy_coefficient"] = self._entropy if self._bonus else 0.0
        return values

    def observe(self, metrics: Mapping[str, float], answers: int) -> None:
        """Take in `actor/kl_ref` and `actor/entropy` of a batch with so many answers; what is absent or not finite is passed
        over."""
        a = self._config
        now = metrics.get("actor/kl_ref", math.nan)
        if a.kl_target is not None and math.isfinite(now):
            self._kl = kl.adaptive_coefficient(
                self._kl, now, target=a.kl_target, samples=answers, horizon=a.kl_horizon_answers
            )
        now = metrics.get("actor/entropy", math.nan)
        if a.entropy_target is not None and math.isfinite(now):
            self._bonus = now <= a.entropy_target
            self._entropy = entropy.adaptive_coefficient(
                self._entropy, now, target=a.entropy_target, step=a.entropy_step, maximum=a.entropy_coefficient_max
            )

    def state(self) -> dict[str, Any]:
        """JSON-able; None for a coefficient that is fixed."""
        a = self._config
        return {
            "kl": None if a.kl_target is None else self._kl,
            "entropy": None if a.entropy_target is None else self._entropy,
            "bonus": self._bonus,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`. A coefficient that is fixed, now or then, is or begins as the configured one."""
        if self._config.kl_target is not None and state["kl"] is not None:
            self._kl = state["kl"]
        if self._config.entropy_target is not None and state["entropy"] is not None:
            self._entropy = min(state["entropy"], self._config.entropy_coefficient_max)
            self._bonus = state["bonus"]
