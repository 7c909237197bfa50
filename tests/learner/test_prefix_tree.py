"""Sequences that begin alike, laid out as a tree."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.prefix_tree import PrefixTree, common_length

# Of few ids: they branch early and late, some are beginnings of others, some are equal.
SEQUENCES = st.lists(st.lists(st.integers(1, 2), max_size=7), max_size=7)


def tree_of(sequences: list[list[int]]) -> PrefixTree:
    return PrefixTree.of([np.array(sequence, dtype=np.int32) for sequence in sequences])


@settings(max_examples=300, deadline=None)
@given(sequences=SEQUENCES)
def test_a_tree_holds_every_beginning_once_and_lets_it_see_its_own_text(sequences: list[list[int]]) -> None:
    tree = tree_of(sequences)
    beginnings = {tuple(sequence[: n + 1]) for sequence in sequences for n in range(len(sequence))}
    assert len(tree.ids) == len(tree.depths) == len(tree.subtree_end) == len(beginnings)
    place = np.arange(len(tree.ids))
    for sequence, columns in zip(sequences, tree.columns, strict=True):
        assert tree.ids[columns].tolist() == sequence
        assert tree.depths[columns].tolist() == list(range(len(sequence)))
        for t, column in enumerate(columns):
            seen = (place <= column) & (column < tree.subtree_end)
            assert place[seen].tolist() == columns[: t + 1].tolist()


def test_ids_are_told_apart_by_their_value_not_their_bytes() -> None:
    tree = tree_of([[256, 1], [1, 256], [65536], [256, 1, 1]])
    assert tree.ids.tolist() == [1, 256, 256, 1, 1, 65536]
    assert tree.subtree_end.tolist() == [2, 2, 5, 5, 5, 6]


def test_common_length() -> None:
    a = np.array([1, 2, 3])
    assert [common_length(a, np.array(b)) for b in ([1, 2, 3], [1, 2], [1, 5, 3], [], [1, 2, 3, 4])] == [3, 2, 1, 0, 3]
