"""Chunks with shared anchors, their common scale, and shares of won comparisons."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_workers.judge_chunks import ANCHORS, CHUNK, align, plan, win_shares


@given(st.integers(1, 70), st.integers(0, 1000))
def test_every_attempt_is_in_a_chunk_and_anchors_in_all(count: int, seed: int) -> None:
    found = plan(count, random.Random(seed))
    seen = Counter(attempt for chunk in found.chunks for attempt in chunk)
    assert sorted(seen) == list(range(count))
    assert all(len(set(chunk)) == len(chunk) <= CHUNK for chunk in found.chunks)
    assert {attempt for attempt, times in seen.items() if times > 1} <= set(found.anchors)
    assert all(set(found.anchors) <= set(chunk) for chunk in found.chunks)
    assert len(found.anchors) == (ANCHORS if count > CHUNK else 0)
    assert max(map(len, found.chunks)) - min(map(len, found.chunks)) <= 1
    assert len(found.chunks) == (1 if count <= CHUNK else -(-(count - ANCHORS) // (CHUNK - ANCHORS)))


@given(st.lists(st.floats(0.3, 0.7), min_size=9, max_size=40), st.integers(0, 1000))
def test_shifts_of_the_judge_are_taken_out(quality: list[float], seed: int) -> None:
    source = random.Random(seed)
    found = plan(len(quality), source)
    said = []
    for chunk in found.chunks:
        shift = source.uniform(-0.3, 0.3)
        said.append({attempt: quality[attempt] + shift for attempt in chunk})
    scores = align(said, found.anchors)
    assert all(0 <= score <= 1 for score in scores.values())
    for a, b in itertools.combinations(range(len(quality)), 2):
        if abs(quality[a] - quality[b]) > 1e-9:
            assert (scores[a] > scores[b]) == (quality[a] > quality[b])


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_one_chunk_is_left_as_it_is(quality: list[float]) -> None:
    assert align([dict(enumerate(quality))], ()) == dict(enumerate(quality))


def test_what_leaves_the_range_is_drawn_together_not_cut_off() -> None:
    scores = align([{0: 0.0, 1: 0.5, 2: 1.0}, {0: 0.5, 1: 1.0, 3: 0.0, 4: 0.25}], anchors=(0, 1))
    assert scores[3] < scores[4] < scores[0] < scores[1] < scores[2]
    assert (min(scores.values()), max(scores.values())) == (0.0, 1.0)
    assert scores[1] - scores[0] == pytest.approx(2 * (scores[4] - scores[3]))


class TestWinShares:
    def test_are_the_share_of_comparisons_won(self) -> None:
        assert win_shares({(0, 1): 0, (0, 2): 0, (1, 2): "tie"}, [0, 1, 2]) == {0: 1.0, 1: 0.25, 2: 0.25}

    def test_do_without_a_few_of_them(self) -> None:
        assert win_shares({(0, 1): 0, (0, 2): 0}, [0, 1, 2]) == {0: 1.0, 1: 0.0, 2: 0.0}

    def test_but_not_without_many(self) -> None:
        assert win_shares({(0, 1): 0}, [0, 1, 2]) is None
        assert win_shares({}, [0, 1]) is None
        assert win_shares({}, [0]) is None
