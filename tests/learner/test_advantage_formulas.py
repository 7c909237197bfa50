"""Every advantage estimator, whitening, returns and weights of tokens against plain Python, and what must not change them."""

from __future__ import annotations

import functools
import math
import random
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from learner import advantages, aggregation, entropy, losses

seeds = given(seed=st.integers(0, 2**32))
few = settings(max_examples=12, deadline=None, derandomize=True)
SCALES = [1.0, 1.0, 1e-6, 1e6, 1e30]


class Batch:
    """Answers of a few groups in any order, some unscored, some groups of equal rewards or of one scored member."""

    def __init__(self, seed: int, *, scale: float | None = None) -> None:
        draw = random.Random(seed)
        self.groups = [draw.randrange(-2, 3) for _ in range(draw.randrange(13))]
        self.scale = draw.choice(SCALES) if scale is None else scale
        equal = {group for group in set(self.groups) if draw.random() < 0.2}
        self.rewards = [
            math.nan
            if draw.random() < 0.15
            else self.scale * (0.7 if group in equal else draw.choice([0.0, 1.0, 0.3, -0.5, draw.uniform(-2, 2)]))
            for group in self.groups
        ]
        self.lengths = [draw.randrange(5) for _ in self.groups]
        self.components = [[draw.choice([0.0, 1.0, math.nan]), draw.uniform(-1, 1)] for _ in self.groups]

    def call(self, name: str, dtype: torch.dtype = torch.float64, **options: Any) -> Tensor:
        data = {
            "lengths": torch.tensor(self.lengths),
            "component_rewards": torch.tensor(self.components, dtype=torch.float64).reshape(-1, 2),
            "component_weights": torch.tensor([1.0, -0.5], dtype=torch.float64),
        }
        method = getattr(advantages, name)
        wanted = {key: data[key] for key in advantages.needs(method)}
        rewards = torch.tensor(self.rewards, dtype=dtype)
        return method(rewards, torch.tensor(self.groups, dtype=torch.int64), **wanted, **options)

    def members(self, group: int) -> list[int]:
        return [i for i, g in enumerate(self.groups) if g == group and not math.isnan(self.rewards[i])]

    def centred(self, values: Sequence[float]) -> list[float]:
        """Values minus their group's mean, over the scored members that have one; 0 where these are all equal."""
        out = [0.0] * len(values)
        for group in set(self.groups):
            there = [i for i in self.members(group) if not math.isnan(values[i])]
            if len({values[i] for i in there}) > 1:
                mean = math.fsum(values[i] for i in there) / len(there)
                for i in there:
                    out[i] = values[i] - mean
        return out


def deviation(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def per_group(of: Batch, values: Sequence[float], formula: Callable[[float, list[float]], float]) -> list[float]:
    """`formula(value, the values of its group)` of every scored member of a group whose values differ."""
    out = [0.0] * len(values)
    for group in set(of.groups):
        there = [i for i in of.members(group) if not math.isnan(values[i])]
        if len({values[i] for i in there}) > 1:
            for i in there:
                out[i] = formula(values[i], [values[j] for j in there])
    return out


def grpo(of: Batch, values: Sequence[float], eps: float = 1e-6) -> list[float]:
    return per_group(of, values, lambda r, all_: (r - math.fsum(all_) / len(all_)) / (statistics.stdev(all_) + eps))


def others(r: float, all_: list[float]) -> list[float]:
    rest = list(all_)
    rest.remove(r)
    return rest


def over_batch(of: Batch, values: Sequence[float], eps: float, of_values: Sequence[float]) -> list[float]:
    scored = [of_values[i] for i, r in enumerate(of.rewards) if not math.isnan(r)]
    return [value / (deviation(scored) + eps) for value in values]


def maxrl(r: float, all_: list[float]) -> float:
    mean = math.fsum(all_) / len(all_)
    return (r - mean) / mean if mean > 0 else 0.0


def opo(of: Batch) -> list[float]:
    out = [0.0] * len(of.rewards)
    for group in set(of.groups):
        there = of.members(group)
        length = sum(of.lengths[i] for i in there)
        baseline = sum(of.lengths[i] * of.rewards[i] for i in there) / max(length, 1)
        if length and len({of.rewards[i] for i in there}) > 1:
            for i in there:
                out[i] = of.rewards[i] - baseline
    return out


def gdpo(of: Batch) -> list[float]:
    parts = [grpo(of, [c[k] for c in of.components], eps=1e-4) for k in (0, 1)]
    total = [a - 0.5 * b for a, b in zip(*parts, strict=True)]
    return over_batch(of, total, 1e-4, total)


REFERENCES: dict[str, Callable[[Batch], list[float]]] = {
    "grpo": lambda of: grpo(of, of.rewards),
    "dr_grpo": lambda of: of.centred(of.rewards),
    "rloo": lambda of: per_group(of, of.rewards, lambda r, all_: r - statistics.fmean(others(r, all_))),
    "lite_ppo": lambda of: over_batch(of, of.centred(of.rewards), 1e-4, of.rewards),
    "reinforce_pp_baseline": lambda of: over_batch(of, of.centred(of.rewards), 1e-8, of.centred(of.rewards)),
    "maxrl": lambda of: per_group(of, of.rewards, maxrl),
    "opo": opo,
    "gdpo": gdpo,
}


@pytest.mark.parametrize("name", sorted(advantages.GROUP_RELATIVE))
@few
@seeds
def test_an_estimator_is_its_formula(name: str, seed: int) -> None:
    of = Batch(seed)
    expected = torch.tensor(REFERENCES[name](of), dtype=torch.float64)
    scale = max(1.0, expected.abs().max().item() if len(expected) else 1.0)
    torch.testing.assert_close(of.call(name), expected, rtol=1e-9, atol=1e-12 * scale)
    short = of.call(name, torch.float32)
    assert short.dtype == torch.float32
    assert short.isfinite().all()


@pytest.mark.parametrize("name", sorted(advantages.GROUP_RELATIVE - {"gdpo"}))
@few
@seeds
def test_what_does_not_change_an_advantage(name: str, seed: int) -> None:
    """A shift of all rewards, a scale where the estimator divides by one, a copy of the batch under other group numbers."""
    of = Batch(seed, scale=1.0)
    before = of.call(name, **({"eps": 0.0} if "eps" in options_of(name) else {}))
    doubled = Batch(seed, scale=1.0)
    doubled.groups, doubled.rewards = [*of.groups, *[g + 10 for g in of.groups]], of.rewards * 2
    doubled.lengths, doubled.components = of.lengths * 2, of.components * 2
    twice = doubled.call(name, **({"std": "population"} if "std" in options_of(name) else {}))
    once = of.call(name, **({"std": "population"} if "std" in options_of(name) else {}))
    torch.testing.assert_close(twice, torch.cat([once, once]), rtol=1e-6, atol=1e-9)
    if name != "maxrl":
        of.rewards = [r + 1000 for r in of.rewards]
        shifted = of.call(name, **({"eps": 0.0} if "eps" in options_of(name) else {}))
        torch.testing.assert_close(shifted, before, rtol=1e-6, atol=1e-9)
    of.rewards = [(r - 1000 if name != "maxrl" else r) * 1e4 for r in of.rewards]
    scaled = of.call(name, **({"eps": 0.0} if "eps" in options_of(name) else {}))
    linear = name in {"dr_grpo", "rloo", "opo"}
    torch.testing.assert_close(scaled, before * 1e4 if linear else before, rtol=1e-5, atol=1e-5)


def options_of(name: str) -> set[str]:
    return (
        {} if name == "rloo" else (getattr(advantages, name).__kwdefaults__ or {}).keys()
    )  # rloo divides only if asked to


@pytest.mark.parametrize("name", sorted(advantages.GROUP_RELATIVE - {"gdpo", "opo"}))
def test_rounding_is_no_difference(name: str) -> None:
    """d05's kin: 0.1 + 0.2 is not 0.3, and a deviation of 1e-17 would blow that up to an advantage of 1."""
    of = Batch(0)
    of.groups, of.rewards = [0, 0, 0], [0.3, 0.1 + 0.2, 0.3]
    assert of.rewards[0] != of.rewards[1]
    options = {"eps": 0.0} if "eps" in options_of(name) else {"normalise": True, "eps": 0.0} if name == "rloo" else {}
    assert (of.call(name, **options) == 0).all()


@pytest.mark.parametrize("name", sorted(advantages.GROUP_RELATIVE - {"gdpo", "opo"}))
@pytest.mark.parametrize("options", [{}, {"eps": 0.0}])
def test_rounding_of_float32_sums_is_no_difference(name: str, options: dict[str, float]) -> None:
    """The same components, added up from either end; in a batch of nothing else the deviation is that of the rounding."""
    parts = torch.tensor([0.7, 0.5, 0.05, 0.1])
    forward, backward = (functools.reduce(torch.add, ordered) for ordered in (parts, parts.flip(0)))
    assert forward != backward
    options = options if set(options) <= set(options_of(name)) else {}
    rewards = torch.stack([forward, backward, forward, backward])
    assert (getattr(advantages, name)(rewards, torch.tensor([0, 0, 1, 1]), **options) == 0).all()
    assert getattr(advantages, name)(rewards * torch.tensor([1, 1.001, 1, 1]), torch.tensor([0, 0, 1, 1]))[1] > 0


@pytest.mark.parametrize("eps", [1e-4, 0.0])
def test_components_that_cancel_out_teach_nothing(eps: float) -> None:
    """What rounding leaves of their sum is not divided by its own deviation."""
    components = torch.tensor([[0.1, 0.3], [0.3, 0.1], [0.2, 0.2]], dtype=torch.float64)
    rewards, weights = torch.full((3,), 0.4, dtype=torch.float64), torch.ones(2, dtype=torch.float64)
    result = advantages.gdpo(rewards, torch.zeros(3), component_rewards=components, component_weights=weights, eps=eps)
    assert (result == 0).all()
    nothing = advantages.gdpo(
        rewards, torch.zeros(3), component_rewards=components[:, :0], component_weights=weights[:0]
    )
    assert (nothing == 0).all()


def test_maxrl_does_not_divide_by_what_rounding_left_of_a_mean() -> None:
    rewards = torch.tensor([0.1, 0.2, -0.3], dtype=torch.float64)
    assert rewards.sum() != 0
    assert (advantages.maxrl(rewards, torch.zeros(3)) == 0).all()
    assert advantages.maxrl(torch.tensor([1.0, 0.0]), torch.zeros(2)).tolist() == [1.0, -1.0]


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float16, torch.bfloat16])
def test_rewards_of_other_types(dtype: torch.dtype) -> None:
    """Of whole numbers the advantages are not: returned as integers they would all be 0."""
    rewards, groups = torch.tensor([1, 0, 0, 0]).to(dtype), torch.zeros(4, dtype=torch.int32)
    for name in ("dr_grpo", "grpo", "rloo"):
        result = getattr(advantages, name)(rewards, groups)
        torch.testing.assert_close(
            result.double(), getattr(advantages, name)(rewards.double(), groups), rtol=1e-6, atol=0
        )
    of_tokens = advantages.reinforce_pp(rewards, groups, response_mask=torch.ones(4, 2))
    assert of_tokens.dtype in (torch.float32, torch.float64)
    assert of_tokens[0, 0] > 0 > of_tokens[1, 0]


def test_no_gradient_and_no_infinity() -> None:
    rewards = torch.tensor([1.0, 0.0], requires_grad=True)
    assert not advantages.grpo(rewards, torch.zeros(2)).requires_grad
    values = torch.zeros(2, 3, requires_grad=True)
    for result in advantages.gae_and_returns(torch.ones(2, 3), values, torch.ones(2, 3)):
        assert not result.requires_grad
    bad = torch.tensor([1.0, torch.inf])
    for name in ("grpo", "lite_ppo"):
        with pytest.raises(ValueError, match="rewards must be finite"):
            getattr(advantages, name)(bad, torch.zeros(2))
    with pytest.raises(ValueError, match="rewards must be finite"):
        advantages.reinforce_pp(bad, torch.zeros(2), response_mask=torch.ones(2, 2))


# Per token


def returns_of(row: Sequence[tuple[float, float]], gamma: float, lam: float) -> tuple[list[float], list[float]]:
    """Generalised advantages and returns of (reward, value) of each sampled token."""
    out, carry, after = [], 0.0, 0.0
    for reward, value in reversed(row):
        carry = reward + gamma * after - value + gamma * lam * carry
        after = value
        out.append(carry)
    out.reverse()
    return out, [a + v for a, (_, v) in zip(out, row, strict=True)]


@few
@seeds
def test_returns_and_generalised_advantages(seed: int) -> None:
    draw = random.Random(seed)
    rows, width = draw.randrange(5), draw.randrange(6)
    mask = torch.tensor([[draw.random() < 0.6 for _ in range(width)] for _ in range(rows)]).reshape(rows, width).bool()
    gamma, lam = draw.choice([1.0, 0.9, 0.0]), draw.choice([1.0, 0.95, 0.0])
    rewards = torch.tensor([draw.choice([math.nan, 1.0, -0.5, 1e4]) for _ in range(rows)], dtype=torch.float64)
    penalty, values = (torch.full((rows, width), math.nan, dtype=torch.float64) for _ in range(2))
    penalty[mask], values[mask] = (torch.randn(int(mask.sum()), dtype=torch.float64) for _ in range(2))
    expected, expected_returns = torch.zeros(rows, width).double(), torch.zeros(rows, width).double()
    whole = torch.zeros(rows, width).double()
    for i in range(rows):
        places = mask[i].nonzero()[:, 0].tolist()
        if math.isnan(rewards[i]) or not places:
            continue
        per_token = [penalty[i, t].item() + (rewards[i].item() if t == places[-1] else 0.0) for t in places]
        of_row, targets = returns_of(list(zip(per_token, values[i, places].tolist(), strict=True)), gamma, lam)
        expected[i, places] = torch.tensor(of_row, dtype=torch.float64)
        expected_returns[i, places] = torch.tensor(targets, dtype=torch.float64)
        undiscounted, _ = returns_of([(r, 0.0) for r in per_token], gamma, 1.0)
        whole[i, places] = torch.tensor(undiscounted, dtype=torch.float64)
    scored = mask & ~rewards.isnan()[:, None]
    data: dict[str, Any] = {"response_mask": mask.long(), "token_rewards": penalty, "gamma": gamma}
    groups = torch.zeros(rows)
    result = advantages.gae(rewards, groups, values=values, lam=lam, whitened=False, **data)
    torch.testing.assert_close(result, expected)
    per_token_rewards = torch.where(scored, penalty, torch.nan) + advantages.at_last_token(rewards, scored)
    _, targets = advantages.gae_and_returns(per_token_rewards, values, scored, gamma=gamma, lam=lam)
    torch.testing.assert_close(targets, expected_returns)
    for method, before in (
        (advantages.gae(rewards, groups, values=values, lam=lam, **data), expected),
        (advantages.reinforce_pp(rewards, groups, **data), whole),
    ):
        kept = before[scored].tolist()
        spread = math.sqrt(statistics.variance(kept) + 1e-8) if len(kept) > 1 else math.inf
        centre = statistics.fmean(kept) if kept else 0.0
        torch.testing.assert_close(method, torch.where(scored, (before - centre) / spread, 0.0), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("shift", [0.0, 1e4, 1e8, -1e12])
def test_whitening_does_not_feel_a_shift(shift: float) -> None:
    """Sums of squares of large returns that differ little hold nothing of their variance."""
    values = torch.tensor([[0.0, 1.0, 3.0], [-2.0, 5.0, torch.nan]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    torch.testing.assert_close(
        advantages.whiten(values + shift, mask), advantages.whiten(values, mask), rtol=1e-4, atol=1e-4
    )
    short = advantages.whiten((values + 4096).float(), mask)
    torch.testing.assert_close(short.double(), advantages.whiten(values, mask), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("value", [0.1, 1 / 3, 0.7])
@pytest.mark.parametrize("count", [3, 7, 11])
@pytest.mark.parametrize("eps", [1e-8, 0.0])
def test_whitened_equal_values_are_zero(value: float, count: int, eps: float) -> None:
    """Their mean is rounded: without eps, what is left of each would be as large as its deviation."""
    rewards = torch.full((count,), value, dtype=torch.float64)
    assert (advantages.whiten(rewards, torch.ones(count), eps=eps) == 0).all()
    mask = torch.ones(count, 5)
    assert (advantages.reinforce_pp(rewards, torch.zeros(count), response_mask=mask, eps=eps) == 0).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_value_that_is_not_finite_does_not_silence_a_batch(bad: float) -> None:
    """A reference that answers NaN: mean and variance are NaN, and every advantage of the batch was 0."""
    rewards, mask = torch.tensor([1.0, 0.0]), torch.tensor([[1, 1], [1, 0]])
    data = torch.tensor([[bad, 0.0], [0.0, 0.0]])
    with pytest.raises(ValueError, match="values to be whitened must be finite"):
        advantages.reinforce_pp(rewards, torch.zeros(2), response_mask=mask, token_rewards=data)
    with pytest.raises(ValueError, match="values to be whitened must be finite"):
        advantages.gae(rewards, torch.zeros(2), response_mask=mask, values=data)
    data = data.flip(0).flip(1)  # where nothing was sampled
    assert advantages.gae(rewards, torch.zeros(2), response_mask=mask, values=data).isfinite().all()


def test_a_value_model_learns_and_its_targets_do_not() -> None:
    new, old, returns = (torch.tensor([[0.5, 2.0]], requires_grad=True) for _ in range(3))
    losses.value_clip(new, old, returns + 1, torch.ones(1, 2)).token_loss.sum().backward()
    assert (old.grad, returns.grad) == (None, None)
    assert new.grad is not None
    assert new.grad.tolist() == [[-1.0, -1.0]]


# Weights of tokens, and statistics over them


@pytest.mark.parametrize("name", aggregation.__all__)
@few
@seeds
def test_weights_are_their_formula(name: str, seed: int) -> None:
    draw = random.Random(seed)
    lengths = [draw.choice([0, 0, 1, 2, 20000]) for _ in range(draw.randrange(8))]
    groups = [draw.randrange(3) for _ in lengths]
    options = {"max_tokens": 4096} if name == "seq_sum_const" else {}
    actual = aggregation.row_weights(name, lengths, groups, **options)
    tokens = {g: sum(n for n, h in zip(lengths, groups, strict=True) if h == g) for g in groups}
    for n, g, weight in zip(lengths, groups, actual, strict=True):
        below = {
            "token_mean": sum(lengths),
            "seq_mean_token_mean": sum(m > 0 for m in lengths) * n,
            "seq_sum_const": len(lengths) * 4096,
            "prompt_mean": sum(t > 0 for t in tokens.values()) * tokens[g],
        }[name]
        assert weight == (1 / below if n else 0.0)


def test_weights_of_half_a_float_are_none() -> None:
    mask = torch.ones(64, 2000, dtype=torch.float16)
    weights = aggregation.seq_sum_const(mask, torch.zeros(64), max_tokens=20480)
    assert weights[0, 0].item() == pytest.approx(1 / (64 * 20480), rel=1e-6)


def test_means_of_many_short_numbers() -> None:
    values = torch.full((100, 1000), 2.0, dtype=torch.float16)
    assert entropy.masked_mean(values, torch.ones_like(values)) == 2.0
    assert entropy.masked_mean(values[:0], values[:0]) == 0.0


@pytest.mark.parametrize("fraction", [0.1, 0.3, 0.5, 0.7, 0.9, 1.0])
@pytest.mark.parametrize("count", [1, 2, 11, 21, 101])
def test_a_top_fraction_that_falls_on_a_token_keeps_it(fraction: float, count: int) -> None:
    """(1 - 0.7) * 10 is 3.0000000000000004 in floating point."""
    values = torch.arange(count, dtype=torch.float64).flip(0)
    values = torch.cat([values, torch.tensor([math.nan])])
    mask = torch.ones_like(values)
    kept = entropy.top_fraction_mask(values, mask, fraction=fraction)
    exact = (10 - round(10 * fraction)) * (count - 1)  # tenths of a place
    assert kept.sum() == count - -(-exact // 10)
    assert not kept[-1]
