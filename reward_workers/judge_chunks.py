"""Groups larger than a judge can compare at once: chunks that share anchors, and one scale made of theirs.

Contract: pure. Attempts are numbers from 0. Every attempt is in a chunk, the anchors are in all of them, and no chunk is
larger than CHUNK. A judge's scale shifts from chunk to chunk; the anchors show by how much, and the shift is taken out. What
lies outside 0 to 1 after that is not cut off, which would make unequals equal: the whole scale is drawn together.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from reward_workers.judge_reply import TIE

CHUNK = 8  # attempts that are compared in one request
ANCHORS = 3


@dataclass(frozen=True)
class Plan:
    """`chunks` hold attempts in the order they were drawn; the anchors are the first of each."""

    anchors: tuple[int, ...]
    chunks: tuple[tuple[int, ...], ...]


def plan(count: int, random_: random.Random) -> Plan:
    """One chunk without anchors for up to CHUNK attempts; else as few as possible, of nearly the same size."""
    order = random_.sample(range(count), count)
    if count <= CHUNK:
        return Plan((), (tuple(order),))
    anchors, rest = tuple(order[:ANCHORS]), order[ANCHORS:]
    number = math.ceil(len(rest) / (CHUNK - ANCHORS))
    return Plan(anchors, tuple((*anchors, *rest[start::number]) for start in range(number)))


def align(scores: Sequence[Mapping[int, float]], anchors: Sequence[int]) -> dict[int, float]:
    """One score from 0 to 1 for each attempt, from the scores of each chunk by attempt.

    With q the true quality and b a chunk's shift, a chunk says q + b. The least-squares b, anchors being in every chunk,
    is the chunk's mean over the anchors minus the mean of these means. An anchor's score is the mean over the chunks.
    """
    levels = [fmean(chunk[anchor] for anchor in anchors) if anchors else 0.0 for chunk in scores]
    common = fmean(levels)
    said: dict[int, list[float]] = {}
    for chunk, level in zip(scores, levels, strict=True):
        for attempt, score in chunk.items():
            said.setdefault(attempt, []).append(score - level + common)
    aligned = {attempt: fmean(values) for attempt, values in said.items()}
    low, high = min(0.0, *aligned.values()), max(1.0, *aligned.values())
    return {attempt: min(max((score - low) / (high - low), 0.0), 1.0) for attempt, score in aligned.items()}


def win_shares(outcomes: Mapping[tuple[int, int], int | str], attempts: Sequence[int]) -> dict[int, float] | None:
    """The share of its comparisons that each attempt won, a tie counting half, from the better one of each pair or TIE.

    None if some attempt was compared with fewer than half of the others: such a share would say little.
    """
    won = dict.fromkeys(attempts, 0.0)
    compared = dict.fromkeys(attempts, 0)
    for pair, better in outcomes.items():
        for attempt in pair:
            compared[attempt] += 1
            won[attempt] += 0.5 if better == TIE else float(better == attempt)
    if len(attempts) < 2 or any(2 * number < len(attempts) - 1 or not number for number in compared.values()):
        return None
    return {attempt: won[attempt] / compared[attempt] for attempt in attempts}
