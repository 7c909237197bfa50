"""Counts by staleness: what a tally holds, how tallies merge, and that metrics of the mismatch divide once."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from learner import mismatch
from learner.tally import Tally

Token = tuple[int, float, float]  # staleness, logprob, behaviour logprob

TOKENS = st.lists(st.tuples(st.integers(0, 3), st.floats(-30, 0, width=32), st.floats(-30, 0, width=32)), max_size=12)


def count(tokens: list[Token]) -> Tally:
    staleness = torch.tensor([s for s, _, _ in tokens], dtype=torch.int64)
    logprobs, behaviour = (torch.tensor([t[i] for t in tokens], dtype=torch.float32) for i in (1, 2))
    return Tally.of(
        staleness,
        stalenesses=4,
        sums=mismatch.sums(logprobs, behaviour, behaviour.isfinite()),
        maxima=mismatch.maxima(logprobs, behaviour),
    )


def test_each_staleness_has_its_own_sum_and_maximum() -> None:
    values = torch.tensor([1.0, -2.0, 4.0, 8.0])
    tally = Tally.of(torch.tensor([0, 2, 0, 2]), stalenesses=3, sums={"a": values}, maxima={"b": -values})
    assert tally == Tally({"a": (5.0, 0.0, 6.0)}, {"b": (-1.0, -math.inf, 2.0)})
    assert tally.total("a") == 11.0
    assert tally.largest("b") == 2.0
    assert tally.split() == [
        Tally({"a": (5.0,)}, {"b": (-1.0,)}),
        Tally({"a": (0.0,)}, {"b": (-math.inf,)}),
        Tally({"a": (6.0,)}, {"b": (2.0,)}),
    ]


def test_what_was_never_counted_is_nothing() -> None:
    assert Tally().total("a") == 0.0
    assert Tally().largest("b") == -math.inf
    assert Tally().split() == []
    assert mismatch.metrics(Tally()) == {}


def test_sums_are_not_rounded_to_the_type_of_the_tokens() -> None:
    """2^24 + 1 ones are not a float32."""
    ones = torch.ones(2**24 + 1)
    tally = Tally.of(torch.zeros(len(ones), dtype=torch.int64), stalenesses=1, sums={"a": ones}, maxima={})
    assert tally.total("a") == 2**24 + 1


def test_a_merge_keeps_what_only_one_side_counted() -> None:
    tally = Tally({"a": (1.0, 2.0)}, {})
    tally.merge(Tally({"a": (3.0, 4.0), "c": (5.0, 6.0)}, {"b": (7.0, -math.inf)}))
    tally.merge(Tally({}, {"b": (6.0, 8.0)}))
    assert tally == Tally({"a": (4.0, 6.0), "c": (5.0, 6.0)}, {"b": (7.0, 8.0)})


def test_tallies_of_other_lengths_do_not_merge() -> None:
    with pytest.raises(ValueError, match="zip"):
        Tally({"a": (1.0, 2.0)}, {}).merge(Tally({"a": (1.0,)}, {}))


@settings(max_examples=80, deadline=None)
@given(parts=st.lists(TOKENS, min_size=1, max_size=4))
def test_any_split_of_tokens_has_the_metrics_of_the_whole(parts: list[list[Token]]) -> None:
    merged = Tally()
    for part in parts:
        merged.merge(count(part))
    whole = count([token for part in parts for token in part])
    assert mismatch.metrics(merged) == pytest.approx(mismatch.metrics(whole))
    for mine, theirs in zip(merged.split(), whole.split(), strict=True):
        assert mismatch.metrics(mine) == pytest.approx(mismatch.metrics(theirs))


@settings(max_examples=80, deadline=None)
@given(tokens=TOKENS)
def test_metrics_of_a_staleness_are_those_of_its_tokens(tokens: list[Token]) -> None:
    for staleness, part in enumerate(count(tokens).split()):
        own = [token for token in tokens if token[0] == staleness]
        assert mismatch.metrics(part) == pytest.approx(mismatch.metrics(count(own)))


@settings(max_examples=80, deadline=None)
@given(tokens=TOKENS.filter(bool))
def test_bounds_of_the_mismatch(tokens: list[Token]) -> None:
    metrics = mismatch.metrics(count(tokens))
    assert metrics["kl"] >= 0
    assert 1 / len(tokens) <= metrics["ess"] * (1 + 1e-9)
    assert metrics["ess"] <= 1 + 1e-9
    assert metrics["ratio_mean"] <= metrics["ratio_max"] * (1 + 1e-9)
    assert metrics["kl_k1"] ** 2 <= metrics["m2"] * (1 + 1e-9)
    assert 0 <= metrics["probability_gap_max"] <= 1


def test_equal_policies_have_no_mismatch() -> None:
    metrics = mismatch.metrics(count([(0, -1.0, -1.0), (2, -3.0, -3.0)]))
    assert metrics == {
        "kl": 0.0,
        "kl_k1": 0.0,
        "m2": 0.0,
        "ess": 1.0,
        "ratio_mean": 1.0,
        "ratio_max": 1.0,
        "logprob_gap_max": 0.0,
        "probability_gap_max": 0.0,
        "missing_ratio": 0.0,
    }


def test_the_mismatch_by_hand() -> None:
    """Ratios 2 and 1/2."""
    two = math.log(2)
    metrics = mismatch.metrics(count([(0, -1.0, -1.0 - two), (1, -2.0, -2.0 + two)]))
    assert metrics["kl"] == pytest.approx((2 - 1 - two + 0.5 - 1 + two) / 2, rel=1e-6)
    assert metrics["kl_k1"] == pytest.approx(0, abs=1e-7)
    assert metrics["m2"] == pytest.approx(two**2, rel=1e-6)
    assert metrics["ess"] == pytest.approx(2.5**2 / (2 * 4.25), rel=1e-6)
    assert (metrics["ratio_mean"], metrics["ratio_max"]) == pytest.approx((1.25, 2), rel=1e-6)
    assert metrics["logprob_gap_max"] == pytest.approx(two, rel=1e-6)
    assert metrics["probability_gap_max"] == pytest.approx(math.exp(-1) / 2, rel=1e-6)
