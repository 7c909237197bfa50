"""From names to the functions of an objective, and from rewards to advantages."""

from __future__ import annotations

import pytest
import torch

from learner import advantages, aggregation, corrections, kl, losses
from learner.objective import PROXIMAL, TokenReturns
from orchestrator.algorithm import SUPPLIED, check_algorithm, compute_advantages, objective, token_weights
from orchestrator.config import AlgorithmConfig, ConfigError


def own_advantage(rewards: torch.Tensor, groups: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
    return rewards * scale


def own_loss(logprobs: torch.Tensor, old_logprobs: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor) -> None:
    raise ValueError("own loss was called")


def needs_values(rewards: torch.Tensor, groups: torch.Tensor, *, values: torch.Tensor) -> torch.Tensor:
    return values


def needs_teacher(
    logprobs: torch.Tensor, others: torch.Tensor, mask: torch.Tensor | None = None, *, teacher: torch.Tensor
) -> torch.Tensor:
    return logprobs * teacher


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
    if missing and name != "reinforce_pp":  # the ranks have its mask
        with pytest.raises(ConfigError, match=rf"algorithm\.advantage={name} needs {', '.join(sorted(missing))}"):
            check_algorithm(config, 4)
    else:
        check_algorithm(config, 4)


@pytest.mark.parametrize("name", sorted(set(corrections.__all__) - corrections.MASKS))
def test_an_importance_weight_needs_another_denominator_than_behaviour(name: str) -> None:
    with pytest.raises(
        ConfigError, match=r"count the mismatch twice; set algorithm\.proximal=recompute or interpolate"
    ):
        check_algorithm(AlgorithmConfig(correction=name), 4)
    for proximal in ("recompute", "interpolate"):
        config = AlgorithmConfig(correction=name, proximal=proximal)
        check_algorithm(config, 4)
        assert objective(config).proximal == proximal
        assert objective(config).correction is getattr(corrections, name)


@pytest.mark.parametrize("proximal", PROXIMAL)
@pytest.mark.parametrize("name", sorted(corrections.MASKS))
def test_a_mask_is_no_importance_weight(name: str, proximal: str) -> None:
    check_algorithm(AlgorithmConfig(correction=name, proximal=proximal), 4)


@pytest.mark.parametrize("loss", ["dppo_tv", "dppo_kl"])
def test_the_trust_region_of_dppo_is_around_behaviour(loss: str) -> None:
    check_algorithm(AlgorithmConfig(loss=loss, correction="geometric_mask"), 4)
    for proximal in ("recompute", "interpolate"):
        with pytest.raises(
            ConfigError, match=rf"loss={loss} is defined with algorithm\.proximal=behaviour only, got {proximal}"
        ):
            check_algorithm(AlgorithmConfig(loss=loss, proximal=proximal, correction="token_tis"), 4)
    with pytest.raises(ConfigError, match="count the mismatch twice; set one of the masks"):
        check_algorithm(AlgorithmConfig(loss=loss, correction="token_tis"), 4)


@pytest.mark.parametrize("loss", ["gmpo", "gspo", "gspo_token"])
@pytest.mark.parametrize("correction", sorted(corrections.__all__))
def test_no_token_of_a_whole_answers_loss_is_dropped(loss: str, correction: str) -> None:
    """Whether the check says what the loss does: the gradient of a token of weight 0."""
    options = {"aggregation": "seq_mean_token_mean", "proximal": "recompute", "correction": correction}
    config = AlgorithmConfig(loss=loss, **options)  # type: ignore[arg-type]
    new = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    old, answer, mask = new.detach(), torch.ones(1, 1), torch.ones(1, 2)
    data = {"advantages": answer} if correction == "negative_sequence_mask" else {}
    weights = getattr(corrections, correction)(old, torch.tensor([[-1.0, -0.1]]), mask, **data)
    (getattr(losses, loss)(new, old, answer, mask).token_loss * weights).sum().backward()
    assert new.grad is not None
    if bool(weights.any()) and bool(new.grad[weights == 0].any()):
        with pytest.raises(
            ConfigError, match=rf"algorithm\.correction={correction} drops tokens, and .*={loss} is one loss"
        ):
            check_algorithm(config, 4)
    else:
        check_algorithm(config, 4)


def test_reinforce_has_no_ratio_to_complete_half_an_importance_weight() -> None:
    check_algorithm(AlgorithmConfig(loss="reinforce", proximal="recompute", correction="token_tis"), 4)
    with pytest.raises(ConfigError, match=r"algorithm\.proximal=behaviour or recompute only, got interpolate"):
        check_algorithm(AlgorithmConfig(loss="reinforce", proximal="interpolate", correction="token_tis"), 4)
    with pytest.raises(ConfigError, match=r"set algorithm\.proximal=recompute, or one of the masks"):
        check_algorithm(AlgorithmConfig(loss="reinforce", correction="token_tis"), 4)


@pytest.mark.parametrize("name", sorted({*kl.__all__} - {"k1"}))  # k1 has no gradient as a loss
def test_every_kl_estimator_that_pulls_is_accepted(name: str) -> None:
    config = AlgorithmConfig(kl_coefficient=0.1, kl_estimator=name)
    check_algorithm(config, 4)
    assert objective(config).kl is getattr(kl, name)


def test_data_that_the_learner_does_not_have_is_refused() -> None:
    own = f"{__name__}.needs_teacher"
    with pytest.raises(
        ConfigError, match=rf"algorithm\.correction={own} needs teacher, which this trainer does not have"
    ):
        check_algorithm(AlgorithmConfig(correction=own, proximal="recompute"), 4)
    check_algorithm(AlgorithmConfig(correction=own, proximal="recompute", correction_options={"teacher": 1.0}), 4)
    with pytest.raises(ConfigError, match=rf"algorithm\.kl_estimator={own} needs teacher"):
        check_algorithm(AlgorithmConfig(kl_coefficient=0.1, kl_estimator=own), 4)


def test_options_without_their_correction_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.correction_options=.* without algorithm\.correction"):
        check_algorithm(AlgorithmConfig(correction_options={"cap": 2.0}), 4)
    with pytest.raises(ConfigError, match=r"algorithm\.correction_options: .*'low'"):
        check_algorithm(
            AlgorithmConfig(correction="token_tis", proximal="recompute", correction_options={"low": 2.0}), 4
        )


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
    with pytest.raises(ConfigError, match=r"algorithm\.loss=.*own_loss: own loss was called"):
        check_algorithm(AlgorithmConfig(loss=f"{__name__}.own_loss"), 4)
    with pytest.raises(ConfigError, match="needs values"):
        check_algorithm(AlgorithmConfig(advantage=f"{__name__}.needs_values"), 4)


@pytest.mark.parametrize(
    ("part", "path", "name"),
    [
        ("loss", "learner.losses.gspo", "gspo"),  # which fixes the aggregation
        ("kl_estimator", "learner.kl.k1", "k1"),  # which pulls nowhere
        ("advantage", "learner.advantages.grpo", "grpo"),  # which wants two answers
        ("aggregation", "learner.aggregation.token_mean", "token_mean"),
        ("correction", "learner.corrections.token_tis", "token_tis"),
    ],
)
def test_a_function_of_ours_goes_by_its_short_name(part: str, path: str, name: str) -> None:
    """What is known of it, and refused with it, is looked up by that."""
    config = AlgorithmConfig(proximal="recompute", kl_coefficient=0.1, **{part: path})
    with pytest.raises(ConfigError, match=rf"algorithm\.{part}={path}: write algorithm\.{part}={name}"):
        check_algorithm(config, 4)


def test_a_batch_without_components_that_count_has_no_advantages() -> None:
    config = AlgorithmConfig(advantage="gdpo")
    assert compute_advantages(config, [1.0, 0.0], [0, 0], [1, 1], {"a": [1.0, 0.0]}, {}) == [0.0, 0.0]
    assert compute_advantages(config, [], [], [], {}, {}) == []


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


def test_advantages_per_token_are_the_ranks_matter() -> None:
    config = AlgorithmConfig(advantage="reinforce_pp", advantage_options={"gamma": 0.9}, kl_coefficient=0.1)
    config.kl_placement = "reward"
    check_algorithm(config, 1)
    made = objective(config)
    assert made.returns == TokenReturns(gamma=0.9, kl_coefficient=0.1)
    assert made.kl is None
    assert made.needs_reference
    config.kl_placement = "loss"
    assert objective(config).returns == TokenReturns(gamma=0.9)
    assert objective(config).kl is kl.k3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kl_coefficient": 0.1, "kl_placement": "reward"}, r"kl_placement=reward .* algorithm\.advantage=grpo"),
        (
            {"advantage": "reinforce_pp", "advantage_options": {"lam": 0.9}},
            r"algorithm\.advantage_options\.lam: .* expected eps, gamma, std",
        ),
        (
            {"advantage": "reinforce_pp", "advantage_options": {"kl_coefficient": 0.9}},
            r"algorithm\.advantage_options\.kl_coefficient: .* has no such option",
        ),
        ({"advantage": "reinforce_pp", "advantage_options": {"std": "robust"}}, "algorithm.advantage_options"),
        ({"selection": "lowest"}, "algorithm.selection=lowest: expected one of clip_cov, kl_cov, top_entropy"),
        ({"selection": "top_entropy", "selection_options": {"fraction": 2}}, "algorithm.selection_options: fraction"),
        ({"selection_options": {"fraction": 0.5}}, "without algorithm.selection"),
    ],
)
def test_what_can_not_be_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_algorithm(AlgorithmConfig(**changes), 4)  # type: ignore[arg-type]
