"""How hard each prompt is for the policy: what judged groups said of it, and whether it is worth drawing now.

Contract of `PassRates`: a prompt's pass rate is an exponential average over its judged groups, so it follows the policy.
A group's value is the mean of its answers' `sampling.filter_on` values, held to [0, 1]; answers without a value don't
count, and a group without any changes nothing: a failure is not a zero. Memory and checkpoint are bounded by the
prompts that were judged so far.

Contract of `DifficultySampler`: a prompt is drawn with the chance that its next group teaches something, relative to a
prompt at one half. Nobody knows yet how hard a new prompt is, so it is always drawn. One that became all right or all
wrong is drawn less and less, yet never less often than `sampling.difficulty.retest_share`, because the policy moves on.
The decision depends on `data.seed`, epoch, prompt id and what is remembered of the prompt, and on nothing else: a
resumed run with the memory of its checkpoint decides alike.
"""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from orchestrator.config import Config

EDGE = 0.05  # a remembered rate so close to 0 or 1 counts as all wrong or all right in metrics
DECIMALS = 4  # of a remembered rate, so that a checkpoint stays small


def pass_rate(values: Sequence[float | None]) -> float | None:
    """Of one group: the mean of the values that are there, held to [0, 1]; None where there is none."""
    scored = [value for value in values if value is not None]
    return min(1.0, max(0.0, statistics.fmean(scored))) if scored else None


class PassRate(NamedTuple):
    """What is remembered of a prompt: its rate in [0, 1], judged groups, and the newest epoch it was judged in."""

    rate: float
    visits: int
    epoch: int


class PassRates:
    """The memory. `memory` in (0, 1] is the weight of the newest group; the first one counts whole."""

    def __init__(self, memory: float) -> None:
        self._memory = memory
        self._known: dict[str, PassRate] = {}

    def observe(self, prompt_id: str, epoch: int, values: Sequence[float | None]) -> None:
        """Take in a judged group: the filter_on value of each answer, None where it has none."""
        newest = pass_rate(values)
        if newest is None:
            return
        before = self._known.get(prompt_id)
        if before is None:
            self._known[prompt_id] = PassRate(round(newest, DECIMALS), 1, epoch)
        else:
            rate = self._memory * newest + (1 - self._memory) * before.rate
            self._known[prompt_id] = PassRate(round(rate, DECIMALS), before.visits + 1, max(before.epoch, epoch))

    def get(self, prompt_id: str) -> PassRate | None:
        """What is remembered of a prompt; None before its first judged group."""
        return self._known.get(prompt_id)

    def __len__(self) -> int:
        """Prompts known."""
        return len(self._known)

    def metrics(self) -> dict[str, float]:
        """`data/known_prompts`, and mean and shares over the known prompts where there are any."""
        count = len(self._known)
        values: dict[str, float] = {"data/known_prompts": count}
        if not count:
            return values
        rates = [known.rate for known in self._known.values()]
        right, wrong = sum(rate >= 1 - EDGE for rate in rates), sum(rate <= EDGE for rate in rates)
        return values | {
            "data/pass_rate_mean": statistics.fmean(rates),
            "data/all_right_ratio": right / count,
            "data/all_wrong_ratio": wrong / count,
            "data/between_ratio": (count - right - wrong) / count,
        }

    def state(self) -> dict[str, Any]:
        """Everything remembered, of JSON's types: [rate, visits, epoch] by prompt id."""
        return {"prompts": {prompt_id: list(known) for prompt_id, known in self._known.items()}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Remember exactly what `state` holds. The weight of new groups may differ from before."""
        self._known = {prompt_id: PassRate(*known) for prompt_id, known in state["prompts"].items()}


def variance_chance(rate: float, answers: int) -> float:
    """The chance that `answers` independent answers, each right with probability `rate`, are not all alike."""
    return float(1 - rate**answers - (1 - rate) ** answers)


def draw_weight(known: PassRate | None, *, answers_per_group: int, retest_share: float) -> float:
    """The chance, in (0, 1], to draw a prompt of which `known` is remembered.

    `variance_chance` of its rate over that of one half (the best there is), at least `retest_share`. A rate of 0 or 1
    was seen, not proven: one pseudo-answer of each kind is added to the `visits * answers_per_group` answers that
    were seen (Laplace's rule of succession). So with groups of 8, a prompt that was all right is drawn with the chance
    0.57 after one group, 0.27 after three and 0.10 after ten.
    """
    if known is None:
        return 1.0
    seen = known.visits * answers_per_group
    rate = (known.rate * seen + 1) / (seen + 2)
    best = variance_chance(0.5, answers_per_group)
    return max(retest_share, variance_chance(rate, answers_per_group) / best)


@dataclass(frozen=True)
class DifficultySampler:
    """Whether to draw a prompt in an epoch; what `orchestrator.prompts.PromptStream` asks. `seed` is `data.seed`."""

    rates: PassRates
    seed: int
    answers_per_group: int
    retest_share: float

    @classmethod
    def from_config(cls, config: Config, rates: PassRates) -> DifficultySampler | None:
        """None where `sampling.difficulty.sampler` is off: every prompt is drawn."""
        difficulty = config.sampling.difficulty
        if not difficulty.sampler:
            return None
        return cls(rates, config.data.seed, config.sampling.answers_per_group, difficulty.retest_share)

    def __call__(self, prompt_id: str, epoch: int) -> bool:
        weight = draw_weight(
            self.rates.get(prompt_id), answers_per_group=self.answers_per_group, retest_share=self.retest_share
        )
        # A key of its own: the order of an epoch comes from a hash of the same three, and must not decide this as well.
        key = hashlib.blake2b(f"{self.seed}:{epoch}:{prompt_id}".encode(), digest_size=8, person=b"difficulty")
        return (int.from_bytes(key.digest(), "big") >> 11) / 2**53 < weight
