"""Does the judge order answers as a verifier does? The check on a judge that is being gamed.

Contract: pure. Within one group, of two answers that the verifier tells apart, the judge agrees when it puts the same one
first; a tie of the judge counts half. 1 is full agreement, 0.5 is what a judge without any idea reaches.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

TOLERANCE = 1e-9


@dataclass(frozen=True)
class Agreement:
    """Of `pairs` pairs of answers that a verifier tells apart, the judge ordered `agreed` as it did."""

    pairs: float = 0.0
    agreed: float = 0.0

    @property
    def rate(self) -> float | None:
        return self.agreed / self.pairs if self.pairs else None

    def __add__(self, other: Agreement) -> Agreement:
        return Agreement(self.pairs + other.pairs, self.agreed + other.agreed)

    def __mul__(self, weight: float) -> Agreement:
        return Agreement(self.pairs * weight, self.agreed * weight)


def agreement(judged: Sequence[float | None], verified: Sequence[float | None]) -> Agreement:
    """Of one group's scores and verified values in the same order; answers that lack one of them are left out.

    Raises ValueError if the two are not equally many.
    """
    both = [(j, v) for j, v in zip(judged, verified, strict=True) if j is not None and v is not None]
    pairs, agreed = 0.0, 0.0
    for (judged_a, verified_a), (judged_b, verified_b) in itertools.combinations(both, 2):
        if abs(verified_a - verified_b) <= TOLERANCE:
            continue
        pairs += 1
        if abs(judged_a - judged_b) <= TOLERANCE:
            agreed += 0.5
        else:
            agreed += (judged_a > judged_b) == (verified_a > verified_b)
    return Agreement(pairs, agreed)
