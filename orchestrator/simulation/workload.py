"""Where simulated answers come from: a model of lengths and pass rates, or the groups of a run's journal.

Both give the same thing (`orchestrator.simulation.types.Workload`): lengths and rewards of whole groups, since what
matters to a run is how the answers of one prompt go together. A group is as slow as its longest answer, and without
variance it is filtered.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class SyntheticWorkload:
    """Lognormal lengths and Beta-distributed pass rates.

    A prompt has a factor on its answers' lengths and a pass rate; an answer has a factor of its own and is right (reward
    1, else 0) at that rate:

        length = median_tokens * exp(spread * (sqrt(prompt_share) * z_prompt + sqrt(1 - prompt_share) * z_answer))

    with standard normal z, times `wrong_length_factor` if the answer is wrong, rounded and held within 1 and `max_tokens`. So the
    mean before the limit is median * exp(spread ** 2 / 2), and `prompt_share` is the correlation of two log-lengths of one
    group. The pass rate is from Beta(pass_alpha, pass_beta): mean alpha / (alpha + beta), and the smaller both are, the more
    prompts are always right or always wrong. ValueError, naming the field, for a value that can't be.
    """

    prompt_tokens: int
    median_tokens: float
    spread: float  # standard deviation of the log-length; 0: all alike, 1: the longest of 100 is 10 times the median
    max_tokens: int
    prompt_share: float = 0.5  # of the variance of the log-length: the prompt's; the rest is the answer's
    wrong_length_factor: float = 1.0
    pass_alpha: float = 1.0
    pass_beta: float = 1.0
    failed_ratio: float = 0.0  # answers that get no reward, independently of each other

    def __post_init__(self) -> None:
        least = {
            "prompt_tokens": 0,
            "median_tokens": 1,
            "spread": 0,
            "max_tokens": 1,
            "prompt_share": 0,
            "failed_ratio": 0,
        }
        for name, minimum in least.items():
            if not minimum <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be finite and at least {minimum}, got {getattr(self, name)}")
        for name in ("prompt_share", "failed_ratio"):
            if getattr(self, name) > 1:
                raise ValueError(f"{name} must be at most 1, got {getattr(self, name)}")
        for name in ("wrong_length_factor", "pass_alpha", "pass_beta"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be finite and above 0, got {getattr(self, name)}")

    def sample(self, rng: np.random.Generator, groups: int, answers: int) -> tuple[np.ndarray, np.ndarray]:
        """See `orchestrator.simulation.types.Workload`."""
        shape = (groups, answers)
        pass_rates = rng.beta(self.pass_alpha, self.pass_beta, size=(groups, 1))
        right = rng.random(shape) < pass_rates
        of_prompt = math.sqrt(self.prompt_share) * rng.standard_normal((groups, 1))
        of_answer = math.sqrt(1 - self.prompt_share) * rng.standard_normal(shape)
        tokens = self.median_tokens * np.exp(self.spread * (of_prompt + of_answer))
        tokens *= np.where(right, 1.0, self.wrong_length_factor)
        lengths = np.clip(np.rint(tokens), 1, self.max_tokens).astype(np.int64)
        rewards = np.where(rng.random(shape) < self.failed_ratio, np.nan, right.astype(np.float64))
        return lengths, rewards


@dataclass(frozen=True)
class EmpiricalWorkload:
    """Groups drawn at random, with replacement, from those of a run: whole ones, answers in their order.

    `groups` holds for each group its answers' lengths in tokens and their rewards, NaN where there is none. Where a
    group has another number of answers than is asked for, that many are drawn from its own, with replacement. That is
    the best guess at a group of another size, but a rare right answer is then there several times or not at all.
    ValueError for no groups, an empty one, or lengths and rewards that do not match.
    """

    prompt_tokens: int
    groups: Sequence[tuple[Sequence[int], Sequence[float]]]

    def __post_init__(self) -> None:
        if not self.groups:
            raise ValueError("a workload needs at least one group to draw from")
        for number, (lengths, rewards) in enumerate(self.groups):
            if not len(lengths) or len(lengths) != len(rewards):
                raise ValueError(f"group {number} has {len(lengths)} lengths and {len(rewards)} rewards")
            if min(lengths) < 0:
                raise ValueError(f"group {number} has a length of {min(lengths)} tokens")

    @functools.cached_property
    def _flat(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """All lengths and all rewards, one group after the other; each group's first index and size."""
        sizes = np.array([len(lengths) for lengths, _ in self.groups])
        lengths = np.concatenate([np.asarray(lengths, np.int64) for lengths, _ in self.groups])
        rewards = np.concatenate([np.asarray(rewards, np.float64) for _, rewards in self.groups])
        return lengths, rewards, np.cumsum(sizes) - sizes, sizes

    def sample(self, rng: np.random.Generator, groups: int, answers: int) -> tuple[np.ndarray, np.ndarray]:
        """See `orchestrator.simulation.types.Workload`."""
        lengths, rewards, firsts, sizes = self._flat
        drawn = rng.integers(len(sizes), size=groups)
        size = sizes[drawn, None]
        within = np.where(size == answers, np.arange(answers), (rng.random((groups, answers)) * size).astype(np.int64))
        index = firsts[drawn, None] + within
        return lengths[index], rewards[index]
