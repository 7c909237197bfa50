"""From names to the functions of an objective, and from rewards to advantages."""

from __future__ import annotations

import pytest
import torch

from learner import advantages, aggregation, corrections, kl, losses
from orchestrator.algorithm import SUPPLIED, check_algorithm, compute_advantages, objective, token_weights
from orchestrator.config import AlgorithmConfig, ConfigError


def own_advantage(rewards: torch.Tensor, groups: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
    return rewards * scale


def own_loss(logprobs: torch.Tensor, old_logprobs: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor) -> None:
    raise ValueError("own loss was called")


def needs_values(rewards: torch.Tensor, groups: torch.Tensor, *, values: torch.Tensor) -> torch.Tensor:
    return values


@pytest.mark.parametrize("name", losses.__all__)
def test_every_loss_is_accepted_with_its_aggregation(name: str) -> None:
    permitted = losses.FIXED_AGGREGATION.get(name, ("token_mean",))
    config = AlgorithmConfig(loss=name, aggregation=permitted[0])
    if permitted[0] == "seq_sum_const":
        config.aggregation_options = {"max_tokens": 8}
    check_algorithm(config, 4)
    assert objective(config).loss is getattr(losses, name)


@pytest.mark.parametrize("name", sorted(losses.FIXED_AGGREGATION))
def test_a_loss_that_fixes_its_level_refuses_others(name: str) -> None:
    others = [a for a in aggregation.__all__ if a not in losses.FIXED_AGGREGATION[name]]
    for other in others:
        with pytest.raises(ConfigError, match=rf"algorithm\.loss={name} is defined with algorithm\.aggregation="):
            check_algorithm(AlgorithmConfig(loss=name, aggregation=other), 4)


@pytest.mark.parametrize("name", advantages.__all__)
def test_an_advantage_that_needs_more_than_the_trainer_has_is_refused(name: str) -> None:
    function = getattr(advantages, name)
    config = AlgorithmConfig(advantage=name)
    missing = advantages.needs(function) - SUPPLIED
    if missing:
        with pytest.raises(ConfigError, match=rf"algorithm\.advantage={name} needs {', '.join(sorted(missing))}"):
            check_algorithm(config, 4)
    else:
        check_algorithm(config, 4)


@pytest.mark.parametrize("name", corrections.__all__)
def test_a_correction_needs_a_recomputed_proximal_policy(name: str) -> None:
    with pytest.raises(ConfigError, match=r"set algorithm\.proximal=recompute"):
        check_algorithm(AlgorithmConfig(correction=name), 4)


def test_parts_are_composed() -> None:
    config = AlgorithmConfig(
        loss_options={"clip_low": 0.1}, kl_coefficient=0.1, kl_estimator="k1", entropy_coefficient=0.2
    )
    made = objective(config)
    assert (made.loss, made.kl, made.correction) == (losses.ppo_clip, kl.k1, None)
    assert (dict(made.loss_options), made.kl_coefficient, made.entropy_coefficient) == ({"clip_low": 0.1}, 0.1, 0.2)
    assert objective(AlgorithmConfig(kl_coefficient=0.0)).kl is None


def test_functions_of_the_users_own() -> None:
    config = AlgorithmConfig(advantage=f"{__name__}.own_advantage", advantage_options={"scale": 2.0})
    check_algorithm(config, 4)
    assert compute_advantages(config, [1.0, 0.0], [0, 0], [1, 1]) == [2.0, 0.0]
    with pytest.raises(ConfigError, match=r"algorithm\.loss_options: own loss was called"):
        check_algorithm(AlgorithmConfig(loss=f"{__name__}.own_loss"), 4)
    with pytest.raises(ConfigError, match="needs values"):
        check_algorithm(AlgorithmConfig(advantage=f"{__name__}.needs_values"), 4)


def test_advantages_know_groups_by_number_not_by_place() -> None:
    config = AlgorithmConfig(advantage="dr_grpo")
    assert compute_advantages(config, [1.0, 4.0, 0.0, 2.0], [0, 1, 0, 1], [1] * 4) == [0.5, 1.0, -0.5, -1.0]


def test_lengths_are_supplied_where_an_estimator_needs_them() -> None:
    """OPO's baseline is weighted by length (arXiv:2505.23585): (1*10 + 0*30) / 40 = 0.25."""
    config = AlgorithmConfig(advantage="opo")
    assert compute_advantages(config, [1.0, 0.0], [0, 0], [10, 30]) == pytest.approx([0.75, -0.25])


def test_token_weights_pass_options_on() -> None:
    config = AlgorithmConfig(aggregation="seq_sum_const", aggregation_options={"max_tokens": 10})
    assert token_weights(config, [5, 5], [0, 0]) == pytest.approx([1 / 20] * 2)
