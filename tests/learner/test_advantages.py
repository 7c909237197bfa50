"""Advantages as a whole: what holds for every estimator, whatever the groups look like."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from learner import advantages

NAMES = sorted(advantages.GROUP_RELATIVE)
rewards_and_groups = st.lists(
    st.tuples(
        st.one_of(st.sampled_from([0.0, 1.0, 0.1, float("nan")]), st.floats(-10, 10, width=32)),
        st.integers(-2, 3),
    ),
    min_size=1,
    max_size=24,
)


def call(name: str, rewards: Tensor, groups: Tensor, lengths: Tensor) -> Tensor:
    data: dict[str, Any] = {
        "lengths": lengths,
        "component_rewards": torch.stack([rewards, lengths.to(rewards.dtype)], dim=1),
        "component_weights": torch.tensor([1.0, 0.5]),
    }
    method = getattr(advantages, name)
    return method(rewards, groups, **{key: data[key] for key in advantages.needs(method)})


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=30, deadline=None)
@given(rows=rewards_and_groups, order=st.randoms(use_true_random=False))
def test_result_is_finite_zero_where_unscored_and_independent_of_the_order(
    name: str, rows: list[tuple[float, int]], order: Any
) -> None:
    rewards = torch.tensor([reward for reward, _ in rows], dtype=torch.float64)
    groups = torch.tensor([group for _, group in rows])
    lengths = torch.arange(1, len(rows) + 1)
    result = call(name, rewards, groups, lengths)
    assert result.shape == rewards.shape
    assert result.isfinite().all()
    assert (result[rewards.isnan()] == 0).all()
    shuffled = list(range(len(rows)))
    order.shuffle(shuffled)
    again = call(name, rewards[shuffled], groups[shuffled], lengths[shuffled])
    torch.testing.assert_close(again, result[shuffled], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", sorted(advantages.GROUP_RELATIVE - {"gdpo"}))
@settings(max_examples=20, deadline=None)
@given(
    value=st.floats(-100, 100, width=32),
    size=st.integers(1, 9),
    dtype=st.sampled_from(["float32", "float64"]),
)
def test_equal_rewards_give_exactly_zero(name: str, value: float, size: int, dtype: str) -> None:
    # A second group differs, so that statistics over the batch do not vanish.
    rewards = torch.tensor([value] * size + [0.0, 1.0], dtype=getattr(torch, dtype))
    groups = torch.tensor([7] * size + [3, 3])
    result = call(name, rewards, groups, torch.arange(1, size + 3))
    assert result.dtype == rewards.dtype
    assert (result[:size] == 0).all()


@pytest.mark.parametrize("name", sorted(advantages.GROUP_RELATIVE - {"gdpo", "lite_ppo", "reinforce_pp_baseline"}))
def test_a_group_does_not_see_the_others(name: str) -> None:
    rewards = torch.tensor([1.0, 0.0, 0.5, 9.0, -9.0])
    groups, lengths = torch.tensor([4, 4, 4, 1, 1]), torch.tensor([3, 5, 2, 1, 1])
    alone = call(name, rewards[:3], groups[:3], lengths[:3])
    torch.testing.assert_close(call(name, rewards, groups, lengths)[:3], alone)


def test_needs_names_the_data_of_each_method() -> None:
    assert advantages.needs(advantages.grpo) == set()
    assert advantages.needs(advantages.opo) == {"lengths"}
    assert advantages.needs(advantages.gdpo) == {"component_rewards", "component_weights"}
    assert advantages.needs(advantages.gae) == {"values", "response_mask"}
    assert advantages.needs(advantages.reinforce_pp) == {"response_mask"}
    assert set(advantages.__all__) == advantages.GROUP_RELATIVE | {"gae", "reinforce_pp"}


def test_a_skipped_component_is_in_no_mean() -> None:
    rewards, groups = torch.tensor([1.0, 0.0, 1.0]), torch.tensor([0, 0, 0])
    components = torch.tensor([[1.0, torch.nan], [0.0, 2.0], [1.0, 4.0]], dtype=torch.float64)
    weights = torch.tensor([0.0, 1.0])
    result = advantages.gdpo(rewards, groups, component_rewards=components, component_weights=weights)
    assert result[0] == 0
    assert result[1] == -result[2] < 0


@pytest.mark.parametrize("name", ["gae", "reinforce_pp"])
def test_token_level_methods_skip_what_was_not_sampled(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    rewards = torch.tensor([1.0, -0.5, torch.nan], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 0, 0, 1], [0, 1, 1, 1, 0], [1, 1, 1, 1, 1]])
    values = torch.rand(3, 5, generator=generator, dtype=torch.float64)
    method = getattr(advantages, name)
    data: dict[str, Tensor] = {"values": values, "response_mask": mask}
    data = {key: data[key] for key in advantages.needs(method)}
    result = method(rewards, torch.arange(3), **data, gamma=0.9)
    assert (result[mask == 0] == 0).all()
    assert (result[2] == 0).all()  # unscored
    # The same sequences with the unsampled tokens cut out.
    keep = torch.tensor([[0, 1, 4], [1, 2, 3]])
    compact = {key: value[:2].gather(1, keep) for key, value in data.items()}
    expected = method(rewards[:2], torch.arange(2), **compact, gamma=0.9)
    torch.testing.assert_close(result[:2].gather(1, keep), expected)


def test_bad_arguments_are_named() -> None:
    rewards, groups = torch.tensor([1.0, 0.0]), torch.tensor([0, 0])
    with pytest.raises(ValueError, match="std is 'bessel'"):
        advantages.grpo(rewards, groups, std="bessel")
    with pytest.raises(ValueError, match="must both be"):
        advantages.grpo(rewards, groups[:1])
    with pytest.raises(ValueError, match="component_rewards must be"):
        advantages.gdpo(rewards, groups, component_rewards=rewards, component_weights=rewards)
    pairs = torch.stack([rewards, rewards])
    with pytest.raises(ValueError, match=r"component_weights \[K\], got \[2, 2\] and \[2, 1\]"):
        advantages.gdpo(rewards, groups, component_rewards=pairs, component_weights=rewards[:, None])
    with pytest.raises(ValueError, match=r"component_weights must be finite, got \[nan, 1.0\]"):
        advantages.gdpo(rewards, groups, component_rewards=pairs, component_weights=torch.tensor([torch.nan, 1.0]))
    for lengths in ([-3.0, 1.0], [torch.nan, 1.0]):
        with pytest.raises(ValueError, match=r"lengths must be at least 0, got (-3|nan)"):
            advantages.opo(rewards, groups, lengths=torch.tensor(lengths))
