"""Selections mark the same tokens however these are spread over ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from learner_data import batch_of, plans_of
from thread_ranks import Ranks

from learner import entropy, losses
from learner.objective import Objective, micro_batch_loss
from learner.selection import Marked, Tokens, clip_cov, draws, kl_cov, largest, top_entropy
from learner.tensors import build_tensors


def alone(values: torch.Tensor) -> torch.Tensor:
    return torch.as_tensor(values)


def tokens(count: int, seed: int, *, coarse: bool = False) -> Tokens:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(4, count, generator=generator)
    if coarse:  # equal values
        values = values.round()
    return Tokens(values[0].abs(), -values[1].abs(), 2 * values[2], torch.rand(count, generator=generator))


def part(of: Tokens, where: torch.Tensor) -> Tokens:
    return Tokens(of.entropy[where], of.logprobs[where], of.advantages[where], of.draws[where])


METHODS = {
    "top_entropy": lambda t, total: top_entropy(t, total, fraction=0.3).tokens,
    "clip_cov": lambda t, total: clip_cov(t, total, share=0.1, low=0.2, high=3.0).tokens,
    "kl_cov": lambda t, total: kl_cov(t, total, share=0.1).tokens,
}


@pytest.mark.parametrize("name", METHODS)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(count=st.integers(1, 60), ranks=st.integers(2, 4), seed=st.integers(0, 999), coarse=st.booleans())
def test_ranks_mark_what_one_process_marks(name: str, count: int, ranks: int, seed: int, coarse: bool) -> None:
    whole = tokens(count, seed, coarse=coarse)
    expected = METHODS[name](whole, alone)
    owner = torch.randint(ranks, (count,), generator=torch.Generator().manual_seed(seed + 1))
    owner[owner == 1] = 0  # a rank without tokens
    marked = Ranks(ranks).run(lambda rank, total: METHODS[name](part(whole, owner == rank), total))
    for rank in range(ranks):
        assert torch.equal(marked[rank], expected[owner == rank])


@settings(max_examples=100, deadline=None)
@given(
    values=st.lists(st.floats(width=32, allow_nan=True), min_size=1, max_size=30),
    place=st.integers(1, 31),
)
def test_the_largest_is_found_exactly(values: list[float], place: int) -> None:
    given_ = torch.tensor(values)
    finite = sorted(given_[given_.isfinite()].tolist(), reverse=True)
    expected = finite[place - 1] if place <= len(finite) else -torch.inf
    assert largest(given_, place, alone) == expected


@given(count=st.integers(1, 50), seed=st.integers(0, 99), fraction=st.floats(0.01, 1.0))
def test_top_entropy_leaves_the_mask_of_the_formula(count: int, seed: int, fraction: float) -> None:
    of = tokens(count, seed)
    kept = entropy.top_fraction_mask(of.entropy, torch.ones(count), fraction=fraction)
    assert torch.equal(~top_entropy(of, alone, fraction=fraction).tokens, kept)


def test_kl_cov_marks_the_highest_covariances() -> None:
    of = tokens(1000, 3)
    covariance = entropy.covariance(of.logprobs[None], of.advantages[None], torch.ones(1, 1000))[0]
    assert set(kl_cov(of, alone, share=0.01).tokens.nonzero()[:, 0].tolist()) == set(
        covariance.topk(10).indices.tolist()
    )


def test_clip_cov_marks_at_random_and_only_between_its_bounds() -> None:
    of = tokens(1000, 4)
    covariance = entropy.covariance(of.logprobs[None], of.advantages[None], torch.ones(1, 1000))[0]
    marked = clip_cov(of, alone, share=0.02, low=0.5, high=2.0).tokens
    assert marked.sum() == 20
    assert ((covariance > 0.5) & (covariance < 2.0))[marked].all()
    highest = set(covariance.masked_fill(covariance >= 2.0, -9).topk(20).indices.tolist())
    assert set(marked.nonzero()[:, 0].tolist()) != highest
    assert not clip_cov(of, alone, low=1000.0, high=2000.0).tokens.any()


def test_draws_belong_to_the_answer_and_the_step() -> None:
    together = draws([("a", 0), ("b", 1)], [3, 4], step=5)
    assert torch.equal(together, torch.cat([draws([("a", 0)], [3], 5), draws([("b", 1)], [4], 5)]))
    assert not torch.equal(together, draws([("a", 0), ("b", 1)], [3, 4], step=6))
    assert len(draws([], [], 0)) == 0


@pytest.mark.parametrize(
    ("method", "options", "problem"),
    [
        (top_entropy, {"fraction": 0.0}, "fraction"),
        (clip_cov, {"share": 1.5}, "share"),
        (clip_cov, {"low": 2.0, "high": 1.0}, "low must be below high"),
        (clip_cov, {"high": float("inf")}, "high must be a number, got inf"),
        (clip_cov, {"low": True}, "low must be a number, got True"),
        (kl_cov, {"coefficient": -1.0}, "coefficient"),
    ],
)
def test_bad_options_are_refused(method: Callable[..., Marked], options: dict[str, float], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        method(tokens(3, 0), alone, **options)


def test_only_kl_cov_penalises_what_it_marks() -> None:
    of = tokens(100, 5)
    assert kl_cov(of, alone, coefficient=0.3).penalty == 0.3
    assert (top_entropy(of, alone).penalty, clip_cov(of, alone).penalty) == (None, None)


def test_what_becomes_of_marked_tokens() -> None:
    rows, payloads = batch_of((2,), seed=5)
    [plan] = plans_of([rows], ranks=1, max_tokens=1000, share_prefixes=True)
    batch = build_tensors(plan.updates[0][0], payloads)
    logprobs = batch.behaviour_logprobs.nan_to_num(-5.0) + 0.1 * batch.response_mask
    selected = torch.zeros_like(batch.response_mask)
    selected[0, 0] = True

    def loss(**penalty: float | None) -> float:
        marked = Marked(selected, **penalty) if penalty else None
        return micro_batch_loss(
            Objective(losses.reinforce),
            batch,
            logprobs,
            torch.zeros_like(logprobs),
            version=3,
            max_staleness=2,
            selected=marked,
        )[0].item()

    weight = batch.token_weights[0, 0].item()
    own = -weight * (batch.advantages[0, 0] * logprobs[0, 0]).item()
    assert loss(penalty=None) == pytest.approx(loss() - own, abs=1e-6)
    reported = bool(batch.behaviour_logprobs[0, 0].isfinite())
    penalty = weight * 3.0 * (0.1 if reported else 0.0)
    assert loss(penalty=3.0) == pytest.approx(loss() + penalty, abs=1e-6)
