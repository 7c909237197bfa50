"""Sequences that begin alike, laid out so that what they share stands once.

Contract. The tree's nodes are runs of equal ids. Nodes stand depth first, each once; a token's position is its depth, and it sees
its ancestors and itself. Depth first, all that descends from a token stands right behind it, so one number per token says who sees
it: token k is seen by the tokens k … `subtree_end[k]` - 1 and by no other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class PrefixTree:
    """T tokens that hold all of the sequences. `columns[i][t]` is where token t of sequence i stands."""

    ids: np.ndarray  # int64 [T]
    depths: np.ndarray  # int64 [T]: 0 for a first token
    subtree_end: np.ndarray  # int64 [T]
    columns: tuple[np.ndarray, ...]  # int64 [its length], one for each sequence

    @classmethod
    def of(cls, sequences: Sequence[np.ndarray]) -> PrefixTree:
        """The tree of the given ids, each int [length]."""
        # Sorted, a sequence shares with the one before it at least as much as with any earlier one.
        order = sorted(range(len(sequences)), key=lambda i: sequences[i].astype(">u4").tobytes())
        columns = [np.empty(0, dtype=np.int64)] * len(sequences)
        ids, depths = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int64)]
        previous, path, size = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64), 0
        for i in order:
            sequence = sequences[i]
            shared = common_length(previous, sequence)
            added = len(sequence) - shared
            path = np.concatenate([path[:shared], np.arange(size, size + added)])
            ids.append(sequence[shared:])
            depths.append(np.arange(shared, len(sequence)))
            columns[i], previous, size = path, sequence, size + added
        subtree_end = np.zeros(size, dtype=np.int64)
        for path in columns:
            if len(path):
                subtree_end[path] = np.maximum(subtree_end[path], path[-1] + 1)
        return cls(np.concatenate(ids).astype(np.int64), np.concatenate(depths), subtree_end, tuple(columns))


def common_length(a: np.ndarray, b: np.ndarray) -> int:
    """How many first entries of two arrays are equal."""
    shorter = min(len(a), len(b))
    different = np.flatnonzero(a[:shorter] != b[:shorter])
    return int(different[0]) if len(different) else shorter
