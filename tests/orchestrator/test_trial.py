"""What is refused of an algorithm before anything starts: options, and a user's functions that the learner could not use."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from learner import aggregation, corrections, losses, selection
from learner.losses import LossTerms
from learner.objective import PROXIMAL
from orchestrator.algorithm import check_algorithm, compute_advantages, objective, token_weights
from orchestrator.compose import changed, load
from orchestrator.config import AlgorithmConfig, Config, ConfigError

OWN = __name__


def plain_loss(new: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, *, scale: float = 1.0) -> LossTerms:
    return LossTerms(-scale * advantages * new * mask, torch.zeros_like(mask))


def distance_loss(new: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> LossTerms:
    """Without gradient where the policy has not moved, which is no fault."""
    return LossTerms((new - old).square() * mask, torch.zeros_like(mask))


def only_a_tensor(new: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    return -advantages * new


def one_a_row(new: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> LossTerms:
    return LossTerms((-advantages * new).sum(1), torch.zeros_like(mask))


def a_scalar(new: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> LossTerms:
    return LossTerms((-advantages * new).sum(), torch.zeros_like(mask))


def not_a_number(new: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> LossTerms:
    return LossTerms(new / (new - new.detach()), torch.zeros_like(mask))


def detached(new: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> LossTerms:
    return LossTerms(-advantages * new.detach(), torch.zeros_like(mask))


def flat(new: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> LossTerms:
    return LossTerms(-advantages * (new - new).exp(), torch.zeros_like(mask))


def infinitely_steep(new: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> LossTerms:
    return LossTerms((new - new.detach()).abs().sqrt(), torch.zeros_like(mask))


def of_two_arguments(new: Tensor, old: Tensor) -> LossTerms:
    raise AssertionError("never called")


def breaks(new: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> LossTerms:
    return new.no_such_method()  # type: ignore[no-any-return]


def halved(rewards: Tensor, groups: Tensor, *, share: float = 0.5) -> Tensor:
    return rewards * share


def a_list(rewards: Tensor, groups: Tensor) -> list[float]:
    return rewards.tolist()


def one_a_group(rewards: Tensor, groups: Tensor) -> Tensor:
    return rewards.new_zeros(1)


def unguarded_grpo(rewards: Tensor, groups: Tensor) -> Tensor:
    """NaN for a group of equal rewards."""
    return (rewards - rewards.mean()) / rewards.std()


def by_length(lengths: Tensor, groups: Tensor, *, power: float = 1.0) -> Tensor:
    weights = lengths.double() ** -power
    return weights / weights.sum()


def too_few_weights(lengths: Tensor, groups: Tensor) -> Tensor:
    return torch.ones(1)


def negative_weights(lengths: Tensor, groups: Tensor) -> Tensor:
    return -lengths.double()


def row_weight(old: Tensor, behaviour: Tensor, mask: Tensor) -> Tensor:
    return (old - behaviour).sum(1).exp()


def scalar_kl(new: Tensor, ref: Tensor) -> Tensor:
    return (new - ref).mean()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss": "only_a_tensor"}, r"loss=.*only_a_tensor returned a tensor of shape \[2, 4\], expected .*LossTerms"),
        ({"loss": "one_a_row"}, r"loss=.*one_a_row returned token_loss that is a tensor of shape \[2\]"),
        ({"loss": "a_scalar"}, r"loss=.*a_scalar returned token_loss .* expected one number a token, \[2, 4\]"),
        ({"loss": "not_a_number"}, r"loss=.*not_a_number returned token_loss that is not finite"),
        ({"loss": "detached"}, r"loss=.*detached: its loss has no gradient"),
        ({"loss": "flat"}, r"loss=.*flat: the gradient of its loss is 0"),
        ({"loss": "infinitely_steep"}, r"loss=.*infinitely_steep: the gradient of its loss is not finite"),
        ({"loss": "of_two_arguments"}, r"loss=.*of_two_arguments: .* takes 2 positional arguments but 4 were given"),
        ({"loss": "breaks"}, r"loss=.*breaks: .*no_such_method"),
        ({"loss": "plain_loss", "loss_options": {"scal": 1.0}}, r"loss_options: .*'scal'; did you mean scale"),
        ({"loss": "plain_loss", "loss_options": {"scale": "1"}}, r"loss_options\.scale='1': expected a number"),
        ({"loss": "no_such_loss"}, r"loss=.*no_such_loss"),
        ({"advantage": "a_list"}, r"advantage=.*a_list returned a list, expected a tensor of shape \[4\]"),
        ({"advantage": "one_a_group"}, r"advantage=.*one_a_group returned a tensor of shape \[1\]"),
        ({"advantage": "unguarded_grpo"}, r"advantage=.*unguarded_grpo returned numbers that are not finite"),
        ({"aggregation": "too_few_weights"}, r"aggregation=.*too_few_weights returned a tensor of shape \[1\]"),
        (
            {"aggregation": "negative_weights"},
            r"aggregation=.*negative_weights weighs .* expected weights of at least 0",
        ),
        ({"aggregation": "by_length", "aggregation_options": {"power": None}}, r"aggregation_options\.power=None"),
        ({"correction": "row_weight", "proximal": "recompute"}, r"correction=.*row_weight returned weights .* \[2\]"),
        ({"kl_estimator": "scalar_kl", "kl_coefficient": 0.1}, r"kl_estimator=.*scalar_kl returned a divergence"),
    ],
)
def test_a_users_function_that_can_not_be_used_is_named(changes: dict[str, Any], message: str) -> None:
    named = {
        key: f"{OWN}.{value}" if isinstance(value, str) and key != "proximal" else value
        for key, value in changes.items()
    }
    with pytest.raises(ConfigError, match=message):
        check_algorithm(AlgorithmConfig(**named), 4)


def test_users_functions_that_can() -> None:
    config = AlgorithmConfig(
        loss=f"{OWN}.plain_loss",
        loss_options={"scale": 2},
        advantage=f"{OWN}.halved",
        aggregation=f"{OWN}.by_length",
        aggregation_options={"power": 0.0},
    )
    check_algorithm(config, 4)
    check_algorithm(AlgorithmConfig(loss=f"{OWN}.distance_loss"), 4)
    assert objective(config).loss is plain_loss
    assert compute_advantages(config, [1.0, 3.0], [0, 0], [1, 1]) == [0.5, 1.5]
    assert token_weights(config, [3, 1], [0, 0]) == [0.5, 0.5]


def test_what_a_users_functions_return_in_the_run_is_looked_at_too() -> None:
    with pytest.raises(ConfigError, match="unguarded_grpo returned numbers that are not finite"):
        compute_advantages(AlgorithmConfig(advantage=f"{OWN}.unguarded_grpo"), [1.0, 1.0], [0, 0], [1, 1])
    with pytest.raises(ConfigError, match="by_length returned numbers that are not finite"):
        token_weights(AlgorithmConfig(aggregation=f"{OWN}.by_length"), [0, 0], [0, 0])


def test_a_users_file_reaches_processes_where_it_is_no_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Learner ranks are such; a function that only its module's name stands for would end them at their start."""
    from ray import cloudpickle

    (tmp_path / "mine.py").write_text(
        "import torch\nfrom learner.losses import LossTerms\nSCALE = 2.0\n\n"
        "def helper(x):\n    return SCALE * x\n\n"
        "def loss(new, old, advantages, mask):\n"
        "    return LossTerms(-helper(advantages) * new, torch.zeros_like(mask))\n"
    )
    config = AlgorithmConfig(loss=f"{tmp_path / 'mine.py'}:loss")
    check_algorithm(config, 4)
    sent = cloudpickle.dumps(objective(config))
    monkeypatch.delitem(sys.modules, objective(config).loss.__module__)
    one = torch.ones(1, 1)
    assert cloudpickle.loads(sent).loss(one, one, one, one.bool()).token_loss.item() == -2.0


@functools.cache
def base() -> Config:
    return load()


NUMBER = "expected a number"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("algorithm.loss_options.clip_low=2", "algorithm.loss_options: clip_low must be >= 0 and <= 1, got 2"),
        ("algorithm.loss_options.clip_low=-0.1", "clip_low must be >= 0"),
        ("algorithm.loss_options.clip_high=-0.1", "clip_high must be >= 0"),
        ("algorithm.loss_options.clip_high=nan", "algorithm.loss_options.clip_high=nan: expected a finite number"),
        ("algorithm.loss_options.clip_high=inf", "algorithm.loss_options.clip_high=inf: expected a finite number"),
        ("algorithm.loss_options.clip_high=[1]", f"algorithm.loss_options.clip_high=[1]: {NUMBER}"),
        ("algorithm.loss_options.clip_high=true", f"algorithm.loss_options.clip_high=True: {NUMBER}"),
        ("algorithm.loss_options.clip_high='0.2'", f"algorithm.loss_options.clip_high='0.2': {NUMBER}"),
        ("algorithm.loss_options.clip_high=null", f"algorithm.loss_options.clip_high=None: {NUMBER}"),
        ("algorithm.loss_options.dual_clip=None", f"algorithm.loss_options.dual_clip='None': {NUMBER} or null"),
        ("algorithm.loss_options.dual_clip=1", "dual_clip must be > 1, got 1"),
        ("algorithm.loss_options.cliphigh=0.2", "'cliphigh'; did you mean clip_high?"),
        ("algorithm.advantage_options.std=bessel", "algorithm.advantage_options: std is 'bessel'"),
        ("algorithm.advantage_options.std=1", "algorithm.advantage_options.std=1: expected a text"),
        ("algorithm.advantage_options.eps=-1", "eps must be >= 0, got -1"),
        ("algorithm.kl_coefficient=-0.1", "algorithm.kl_coefficient=-0.1: expected at least 0"),
        ("algorithm.kl_coefficient=nan", "algorithm.kl_coefficient=nan"),
        ("algorithm.kl_coefficient=inf", "algorithm.kl_coefficient=inf"),
        ("algorithm.entropy_coefficient=-0.1", "algorithm.entropy_coefficient=-0.1: expected at least 0"),
        ("algorithm.kl_estimator=k4", "algorithm.kl_estimator=k4: expected one of k1, k2, k3"),
        ("algorithm.loss=cispo algorithm.loss_options={ratio_max:0.28}", "ratio_max must be >= 1, got 0.28"),
        ("algorithm.loss=cispo algorithm.loss_options={ratio_min:1.2}", "ratio_min must be >= 0 and <= 1"),
        ("algorithm.loss=sapo algorithm.loss_options={tau_neg:0}", "tau_neg must be > 0, got 0"),
        (
            "algorithm.loss=gmpo algorithm.aggregation=seq_mean_token_mean algorithm.loss_options={log_clip:-0.4}",
            "log_clip must be >= 0",
        ),
        ("algorithm.loss=vespo algorithm.loss_options={lam_neg:-1}", "lam_neg must be >= 0"),
        ("algorithm.loss=dppo_tv algorithm.loss_options={ratio_max:0}", "ratio_max must be >= 1"),
        ("algorithm.loss=dppo_kl algorithm.loss_options={threshold_low:-1}", "threshold_low must be >= 0"),
        ("algorithm.loss=two_sided_clip algorithm.loss_options.delta=1.1", "delta must be > 1 + clip_high"),
        (
            "algorithm.aggregation=seq_sum_const algorithm.aggregation_options.max_tokens=0",
            "max_tokens must be > 0, got 0",
        ),
        ("algorithm.aggregation=seq_sum_const", "max_tokens is None with seq_sum_const"),
        (
            "algorithm.advantage=reinforce_pp algorithm.advantage_options.gamma=1.1",
            "gamma must be >= 0 and <= 1, got 1.1",
        ),
        (
            "algorithm.selection=clip_cov algorithm.selection_options.share=0",
            "algorithm.selection_options: share must be > 0",
        ),
        (
            "algorithm.selection=top_entropy algorithm.selection_options.fraction=20",
            "fraction must be > 0 and <= 1, got 20",
        ),
        (
            "algorithm.loss=gspo algorithm.aggregation=seq_mean_token_mean algorithm.selection=top_entropy",
            "algorithm.loss=gspo is one loss for the whole answer",
        ),
        (
            "algorithm.correction=token_tis algorithm.proximal=recompute algorithm.correction_options.cap=0.5",
            "algorithm.correction_options: cap must be >= 1, got 0.5",
        ),
        (
            "algorithm.correction=icepop algorithm.proximal=recompute algorithm.correction_options={low:2.0,high:5.0}",
            "low must be >= 0 and <= 1, got 2.0",
        ),
        ("learner.adam_beta1=1", "learner.adam_beta1=1.0: expected less than 1"),
        ("learner.weight_decay=-1", "learner.weight_decay=-1.0: expected at least 0"),
        ("rollout.temperature=nan", "rollout.temperature=nan"),
    ],
)
def test_an_option_that_can_not_be_is_refused_with_its_name(overrides: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        changed(base(), overrides.split())
    assert message in str(raised.value)


@pytest.mark.parametrize("loss", losses.__all__)
def test_a_selection_goes_with_losses_of_tokens(loss: str) -> None:
    permitted, *_ = losses.FIXED_AGGREGATION.get(loss, ("token_mean",))
    for name in selection.__all__:
        config = AlgorithmConfig(loss=loss, aggregation=permitted, selection=name)
        if loss in losses.WHOLE_ROWS and name != "kl_cov":
            with pytest.raises(ConfigError, match=f"algorithm.selection={name} leaves tokens out"):
                check_algorithm(config, 4)
        else:
            check_algorithm(config, 4)


@pytest.mark.parametrize("module", [losses, corrections])
def test_every_number_among_the_options_has_bounds(module: Any) -> None:
    """Not a number of any kind is refused by the function itself, for those who call it without a configuration."""
    one, mask = torch.zeros(1, 1), torch.ones(1, 1)
    for name in module.__all__:
        method: Callable[..., Any] = getattr(module, name)
        arguments = (one, one, one, mask) if module is losses else (one, one, mask)
        data = {"advantages": one} if name == "negative_sequence_mask" else {}
        for option in method.__kwdefaults__ or {}:
            for value in (float("nan"), float("inf"), "1", True, -1.0):
                with pytest.raises(ValueError, match=option):
                    method(*arguments, **data, **{option: value})


def test_all_permitted_combinations_are_accepted() -> None:
    for loss in losses.__all__:
        for aggregated in losses.FIXED_AGGREGATION.get(loss, aggregation.__all__):
            for proximal in losses.FIXED_PROXIMAL.get(loss, PROXIMAL):
                options = {"max_tokens": 8} if aggregated == "seq_sum_const" else {}
                config = AlgorithmConfig(
                    loss=loss, aggregation=aggregated, aggregation_options=options, proximal=proximal
                )
                config.correction = "geometric_mask" if proximal == "behaviour" else "token_tis"
                check_algorithm(config, 4)
