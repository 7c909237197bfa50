"""Estimates from counts and curves: what an evaluation or a monitor may claim from what it saw.

Contract. Pure functions of plain numbers, standard library only. A value that is missing is None or NaN
and is left out, never taken for 0.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass


def mean_and_count(values: Sequence[float | None]) -> tuple[float | None, int]:
    """Mean of the values that are there, and how many those are; (None, 0) if none is."""
    known = [value for value in values if value is not None and not math.isnan(value)]
    return (math.fsum(known) / len(known) if known else None), len(known)


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Chance that k of `samples` answers, drawn without replacement, hold a right one. arXiv:2107.03374.

    1 - C(samples - correct, k) / C(samples, k), unbiased. ValueError unless 1 <= k <= samples.
    """
    if not 1 <= k <= samples or not 0 <= correct <= samples:
        raise ValueError(f"need 1 <= k <= samples and 0 <= correct <= samples, got {k=}, {samples=}, {correct=}")
    return 1 - math.comb(samples - correct, k) / math.comb(samples, k)


def majority_at_k(answers: Sequence[Hashable | None], correct: Sequence[bool], k: int) -> float:
    """Chance that the most frequent of k answers to one prompt is right (maj@k, self-consistency).

    Mean over the consecutive blocks of k answers; a rest that fills no block is left out. None (no answer
    found) does not vote. A tie counts by the share of tied answers that are right, as if drawn by lot; a
    block without votes counts 0. ValueError unless 1 <= k <= number of answers.
    """
    if len(answers) != len(correct) or not 1 <= k <= len(answers):
        raise ValueError(f"need 1 <= k <= answers, got {k=}, {len(answers)} answers, {len(correct)} verdicts")
    verdicts = dict(zip(answers, correct, strict=True))
    scores = []
    for start in range(0, len(answers) - k + 1, k):
        votes = Counter(answer for answer in answers[start : start + k] if answer is not None)
        winners = [answer for answer, count in votes.items() if count == max(votes.values())]
        scores.append(sum(verdicts[answer] for answer in winners) / len(winners) if winners else 0.0)
    return sum(scores) / len(scores)


def wilson_interval(successes: float, trials: int, *, z: float = 1.959963984540054) -> tuple[float, float]:
    """Score interval of a proportion; z = 1.96 is 95%. (0, 1) without trials. Wilson 1927.

    Trials must be independent. Several answers to one prompt are not: count the prompts as trials and the
    sum of their pass rates as (fractional) successes.
    """
    if not 0 <= successes <= trials:
        raise ValueError(f"need 0 <= successes <= trials, got {successes} of {trials}")
    if trials == 0:
        return 0.0, 1.0
    rate, spread = successes / trials, z * z / trials
    centre = rate + spread / 2
    half = math.sqrt(rate * (1 - rate) * spread + spread * spread / 4)
    low, high = (centre - half) / (1 + spread), (centre + half) / (1 + spread)
    # In exact arithmetic the bounds of 0 and of all successes are 0 and 1.
    return (0.0 if successes == 0 else low), (1.0 if successes == trials else high)


def rewards_differ(rewards: Sequence[float], *, tolerance: float = 1e-6) -> bool:
    """Does a group of rewards carry a gradient under a group-relative estimator? DAPO, arXiv:2503.14476,
    eq. 11.
    """
    return len(rewards) > 1 and max(rewards) - min(rewards) > tolerance


def worth_resampling(pass_rate: float, *, threshold: float = 0.9) -> bool:
    """Should a prompt of this past pass rate come up in later epochs? ScaleRL, arXiv:2510.13786."""
    return pass_rate < threshold


@dataclass(frozen=True)
class Confusion:
    """Verdicts of a verifier against the truth. A rate over nothing is NaN."""

    true_positives: int
    false_positives: int
    false_negatives: int
    true_negatives: int

    @classmethod
    def of(cls, truth: Sequence[bool], verdict: Sequence[bool]) -> Confusion:
        counts = Counter((bool(t), bool(v)) for t, v in zip(truth, verdict, strict=True))
        return cls(counts[True, True], counts[False, True], counts[True, False], counts[False, False])

    @property
    def precision(self) -> float:
        return _ratio(self.true_positives, self.true_positives + self.false_positives)

    @property
    def recall(self) -> float:
        return _ratio(self.true_positives, self.true_positives + self.false_negatives)

    @property
    def false_negative_rate(self) -> float:
        return _ratio(self.false_negatives, self.true_positives + self.false_negatives)

    @property
    def false_positive_rate(self) -> float:
        return _ratio(self.false_positives, self.false_positives + self.true_negatives)


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else math.nan


def divergence_onset(proxy: Sequence[float], gold: Sequence[float]) -> int | None:
    """Index of the first value at which the training reward rose while the held-out one fell; None if it
    never did.

    The sign of a hacked reward: what is optimised grows, what was meant does not (Goodhart).
    """
    pairs = list(zip(proxy, gold, strict=True))
    for index in range(1, len(pairs)):
        if pairs[index][0] > pairs[index - 1][0] and pairs[index][1] < pairs[index - 1][1]:
            return index
    return None


def scaling_curve(compute: float, *, start: float, asymptote: float, exponent: float, midpoint: float) -> float:
    """Expected reward after so much compute: R0 + (A - R0) / (1 + (C_mid / C)^B). ScaleRL,
    arXiv:2510.13786, eq. 1.
    """
    return start + (asymptote - start) / (1 + (midpoint / compute) ** exponent)


# Exponents of the hidden size, fitted per model family by the Tinker cookbook.
_LR_EXPONENTS = {"qwen": 0.0775, "llama": 0.781}


def suggested_learning_rate(hidden_size: int, *, family: str, lora: bool) -> float:
    """A first learning rate: 5e-5 (2000 / hidden_size)^p, ten times that with LoRA. Tinker cookbook.

    Known families are qwen and llama; ValueError for others.
    """
    if family not in _LR_EXPONENTS:
        raise ValueError(f"no fit for model family {family!r}, known are {', '.join(_LR_EXPONENTS)}")
    return 5e-5 * (10 if lora else 1) * (2000 / hidden_size) ** _LR_EXPONENTS[family]
