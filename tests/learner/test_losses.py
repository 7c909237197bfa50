"""Policy losses as a whole: what holds for each of them, and for the corrections and KL terms around them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from learner import aggregation, corrections, entropy, kl, losses
from learner.objective import PROXIMAL

MASK = torch.tensor([[1, 1, 0, 1], [1, 0, 0, 0], [0, 0, 0, 0]]).bool()


def batch(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    old = -torch.rand(3, 4, generator=generator, dtype=dtype)
    drift = torch.randn(3, 4, generator=generator, dtype=dtype) / 3
    advantages = torch.tensor([[1.0], [-2.0], [0.5]], dtype=dtype).expand(3, 4)
    return old + drift, old, advantages


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -1e4])
@pytest.mark.parametrize("name", losses.__all__)
def test_masked_positions_are_never_read(name: str, poison: float) -> None:
    method = getattr(losses, name)
    results = []
    for filler in (0.0, poison):
        new, old, advantages = (x.masked_fill(~MASK, filler) for x in batch())
        new.requires_grad_()
        terms = method(new, old, advantages, MASK)
        terms.token_loss.sum().backward()
        assert (terms.token_loss[~MASK] == 0).all()
        assert not terms.clipped[~MASK].any()
        assert new.grad is not None
        assert (new.grad[MASK & ~terms.clipped] != 0).all()
        assert (new.grad[~MASK] == 0).all()
        results.append((terms.token_loss.detach(), new.grad))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("name", losses.__all__)
@pytest.mark.parametrize("gap", [-500.0, 500.0])
@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_extreme_ratios_stay_finite_in_float32(name: str, gap: float, sign: float) -> None:
    old = torch.full((1, 3), -600.0 if gap > 0 else -1.0)
    new = (old + gap).requires_grad_()
    terms = getattr(losses, name)(new, old, torch.full((1, 3), sign), torch.ones(1, 3))
    terms.token_loss.sum().backward()
    assert new.grad is not None
    assert terms.token_loss.isfinite().all()
    assert new.grad.isfinite().all()


@pytest.mark.parametrize("name", sorted(set(losses.__all__) - {"luspo", "vespo"}))
def test_on_policy_every_loss_has_the_policy_gradient(name: str) -> None:
    """At ratio 1 the gradient is -A times the token's weight, whatever the clip."""
    _, old, advantages = batch()
    new = old.clone().requires_grad_()
    terms = getattr(losses, name)(new, old, advantages, MASK)
    (permitted, *_) = losses.FIXED_AGGREGATION.get(name, ("seq_mean_token_mean",))
    weights = getattr(aggregation, permitted)(MASK.double(), torch.arange(3))
    (weights * terms.token_loss).sum().backward()
    torch.testing.assert_close(new.grad, -advantages * weights)
    assert not terms.clipped.any()


@settings(max_examples=60, deadline=None)
@given(ratio=st.floats(0.05, 20), advantage=st.floats(-5, 5), dual_clip=st.one_of(st.none(), st.floats(1.5, 10)))
def test_ppo_clip_is_the_pessimistic_side(ratio: float, advantage: float, dual_clip: float | None) -> None:
    new = torch.tensor([[ratio]], dtype=torch.float64).log().requires_grad_()
    old, one = torch.zeros_like(new), torch.ones_like(new)
    terms = losses.ppo_clip(new, old, one * advantage, one, dual_clip=dual_clip)
    expected = -min(ratio * advantage, min(max(ratio, 0.8), 1.28) * advantage)
    if dual_clip is not None and advantage < 0:
        expected = min(expected, -dual_clip * advantage)
    assert terms.token_loss.item() == pytest.approx(expected)
    terms.token_loss.sum().backward()
    assert new.grad is not None
    assert terms.clipped.item() == (new.grad.item() == 0 and advantage != 0)


@pytest.mark.parametrize("delta", [1.0, 1.2])
def test_a_delta_inside_the_clip_is_refused(delta: float) -> None:
    new, old, advantages = batch()
    with pytest.raises(ValueError, match="delta must be > 1 \\+ clip_high"):
        losses.two_sided_clip(new, old, advantages, MASK, delta=delta)


def test_fixed_proximal_policies_exist() -> None:
    assert set(losses.FIXED_PROXIMAL) <= set(losses.__all__)
    for names in losses.FIXED_PROXIMAL.values():
        assert set(names) <= set(PROXIMAL)


def test_fixed_aggregations_exist() -> None:
    assert set(losses.FIXED_AGGREGATION) <= set(losses.__all__)
    for names in losses.FIXED_AGGREGATION.values():
        assert set(names) <= set(aggregation.__all__)


@pytest.mark.parametrize("name", corrections.__all__)
def test_correction_weights_are_frozen_and_read_no_masked_position(name: str) -> None:
    method = getattr(corrections, name)
    results = []
    for filler in (0.0, float("nan")):
        old, behaviour, advantages = (x.masked_fill(~MASK, filler) for x in batch())
        data = {"advantages": advantages} if name == "negative_sequence_mask" else {}
        weights = method(old.requires_grad_(), behaviour, MASK, **data)
        assert not weights.requires_grad
        assert weights.dtype == torch.float64
        assert (weights[~MASK] == 0).all()
        results.append(weights)
    assert torch.equal(*results)


@pytest.mark.parametrize("name", corrections.__all__)
def test_without_mismatch_every_weight_is_one(name: str) -> None:
    _, old, advantages = batch()
    data = {"advantages": advantages} if name == "negative_sequence_mask" else {}
    assert torch.equal(getattr(corrections, name)(old, old, MASK, **data), MASK.double())


def test_masks_are_the_corrections_without_importance_weights() -> None:
    old, behaviour, advantages = batch()
    for name in corrections.__all__:
        data = {"advantages": advantages} if name == "negative_sequence_mask" else {}
        weights = getattr(corrections, name)(old, behaviour, torch.ones_like(MASK), **data)
        assert (set(weights.flatten().tolist()) <= {0.0, 1.0}) == (name in corrections.MASKS)


@settings(max_examples=60, deadline=None)
@given(d=st.floats(-300, 300, width=32))
def test_kl_estimators_are_finite_and_k2_k3_not_negative(d: float) -> None:
    for name in kl.__all__:
        logprobs = torch.tensor([d], dtype=torch.float32, requires_grad=True)
        data = {"old_logprobs": torch.zeros(1)} if name == "k3_unbiased" else {}
        value = getattr(kl, name)(logprobs, torch.zeros(1), **data)
        value.sum().backward()
        assert logprobs.grad is not None
        assert value.isfinite().all()
        assert logprobs.grad.isfinite().all()
        assert name == "k1" or value.item() >= 0


@pytest.mark.parametrize(("kl_value", "expected"), [(0.0, 0.8), (1.0, 1.0), (9.0, 1.2)])
def test_the_kl_controller_moves_towards_its_target(kl_value: float, expected: float) -> None:
    assert kl.adaptive_coefficient(1.0, kl_value, target=1.0, samples=10, horizon=10) == pytest.approx(expected)


@pytest.mark.parametrize(("before", "value", "after"), [(0.5, 0.2, 0.6), (0.5, 0.3, 0.4), (0.05, 0.3, 0.0), (1, 0, 1)])
def test_the_entropy_controller_stays_in_its_bounds(before: float, value: float, after: float) -> None:
    found = entropy.adaptive_coefficient(before, value, target=0.2, step=0.1, maximum=1.0)
    assert found == pytest.approx(after)


def test_divergences_allow_impossible_tokens() -> None:
    p = torch.tensor([1.0, 0.0]).log()
    q = torch.tensor([0.5, 0.5]).log()
    assert kl.categorical_kl(p, q).item() == pytest.approx(0.693147, abs=1e-6)
    assert kl.jensen_shannon(p, q).isfinite()


def test_entropy_statistics_without_a_token() -> None:
    values, nothing = torch.rand(2, 3), torch.zeros(2, 3)
    assert not entropy.top_fraction_mask(values, nothing).any()
    assert entropy.masked_mean(values, nothing) == 0


def test_a_token_of_the_current_version_is_its_own_proximal() -> None:
    share = corrections.proximal_share(torch.tensor([3, 5, 5]), torch.tensor([4, 5, 4]), torch.tensor([5, 5, 5]))
    assert share.tolist() == [0.5, 0.0, 0.0]
