"""Agreement of a judge with a verifier, and its running value on disk."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_workers.judge_agreement import Agreement, agreement
from reward_workers.judge_store import JudgeStore

VALUES = st.lists(st.tuples(st.none() | st.floats(0, 1), st.none() | st.sampled_from([0.0, 1.0])), max_size=10)


def test_counts_the_pairs_that_the_verifier_tells_apart() -> None:
    assert agreement([0.9, 0.1, 0.5], [1, 0, 0]) == Agreement(2, 2)
    assert agreement([0.1, 0.9, 0.1], [1, 0, 0]) == Agreement(2, 0.5)
    assert agreement([0.9, None, 0.1, 0.3], [1, 0, None, 1]) == Agreement(0, 0)
    assert Agreement().rate is None
    with pytest.raises(ValueError, match="zip"):
        agreement([0.5], [1, 0])


@given(VALUES)
def test_is_between_none_and_all_and_turns_with_the_judge(values: list[tuple[float | None, float | None]]) -> None:
    judged, verified = [j for j, _ in values], [v for _, v in values]
    found = agreement(judged, verified)
    turned = agreement([None if j is None else -j for j in judged], verified)
    assert 0 <= found.agreed <= found.pairs
    assert found.agreed + turned.agreed == found.pairs == turned.pairs
    assert agreement(verified, verified).rate in (None, 1.0)


def test_the_running_value_follows_the_last_pairs_and_is_shared(tmp_path: Path) -> None:
    one, other = JudgeStore(tmp_path, 1), JudgeStore(tmp_path, 1)
    for _ in range(30):
        one.agree(Agreement(10, 10), window_pairs=100)
    running = other.agree(Agreement(), window_pairs=100)
    assert running.rate == pytest.approx(1.0)
    assert 90 < running.pairs <= 100
    for _ in range(10):
        running = other.agree(Agreement(10, 0), window_pairs=100)
    assert running.rate is not None
    assert running.rate < 0.4
