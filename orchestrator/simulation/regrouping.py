"""Groups of another size out of those of a run: the best guess at what its prompts would have given.

A smaller group is a random part of a recorded one. A larger one is a recorded one of n answers, and more answers to its prompt:

- Their length may exceed all of its own, because the longest of many is longer than the longest of few: exp(m + r), where m is
  the mean log-length of its own answers and r how far an answer of any group was from its group's mean, times
  sqrt(n / (n - 1)) since a mean over n answers lies too close to each of them.
- Their reward is that of one of its own answers, or with probability 1 / (n + 1) that of any answer of the run: n equal rewards
  do not make the next one certain (Blackwell and MacQueen's urn, 1973, with one observation's weight on the prior).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

Group = tuple[Sequence[int], Sequence[float]]  # lengths and rewards of its answers

LEAST_GROUPS = 2000  # that are made: each recorded one gives several, if there are few


def regrouped(groups: Sequence[Group], answers: int, most_tokens: int, seed: int = 0) -> list[Group]:
    """Groups of `answers` answers of at most `most_tokens` tokens. Those that have this size already stay as they are."""
    if all(len(lengths) == answers for lengths, _ in groups):
        return list(groups)
    rng = np.random.default_rng(seed)
    distances = _distances(groups)
    rewards = np.concatenate([np.asarray(rewards, dtype=float) for _, rewards in groups])
    copies = math.ceil(LEAST_GROUPS / len(groups))

    def resized(group: Group) -> Group:
        lengths, own = np.asarray(group[0]), np.asarray(group[1], dtype=float)
        kept = rng.permutation(len(lengths))[:answers]
        more = answers - len(kept)
        logs = np.log(np.maximum(lengths, 1)).mean() + rng.choice(distances, more)
        written = np.clip(np.rint(np.exp(logs)), 1, most_tokens).astype(int)
        others = rng.random(more) < 1 / (len(own) + 1)
        earned = np.where(others, rng.choice(rewards, more), rng.choice(own, more))
        return ([*lengths[kept].tolist(), *written.tolist()], [*own[kept].tolist(), *earned.tolist()])

    return [resized(group) for group in groups for _ in range(copies)]


def _distances(groups: Sequence[Group]) -> np.ndarray:
    """Of the answers' log-lengths from the mean of their group."""
    all_distances = [np.zeros(1)]  # where no group has two answers
    for lengths, _ in groups:
        logs = np.log(np.maximum(lengths, 1))
        if len(logs) > 1:
            all_distances.append((logs - logs.mean()) * math.sqrt(len(logs) / (len(logs) - 1)))
    return np.concatenate(all_distances[1:] or all_distances)
