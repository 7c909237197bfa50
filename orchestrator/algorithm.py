"""From configured names to the functions that make up an objective, and from a batch's rewards to its advantages.

An algorithm is advantage estimator x policy loss x aggregation x correction x KL term. Each name is a function of the
learner's module for its kind, or a dotted path to a user's. `check_algorithm` resolves all of them and tries them out on made-up
tokens (`orchestrator.trial`), so a wrong name, option, pair or result is refused before anything starts.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from learner import advantages, aggregation, corrections, kl, losses, selection
from learner.objective import CORRECTION_DATA, KL_DATA, Objective, TokenReturns
from orchestrator import trial
from orchestrator.config import AlgorithmConfig, ConfigError
from reward_workers.reward import load_function

# What the loop can supply to an advantage estimator besides rewards and groups.
SUPPLIED = frozenset({"lengths", "component_rewards", "component_weights"})


def _resolve(key: str, name: str, module: ModuleType) -> Callable[..., Any]:
    selectable: Sequence[str] = module.__all__
    if name in selectable:
        return getattr(module, name)
    if "." in name or ":" in name:
        try:
            function = load_function(name)
        except (ValueError, ImportError) as error:
            raise ConfigError(f"{key}={name}: {str(error).removeprefix('reward ')}") from error
        own = getattr(function, "__name__", "")
        if own in selectable and getattr(module, own) is function:  # what is known of it goes by its short name
            raise ConfigError(f"{key}={name}: write {key}={own}")
        _let_travel(function)
        return function
    raise ConfigError(f"{key}={name}: expected one of {', '.join(selectable)}, or a dotted path to a function")


def _let_travel(function: Callable[..., Any]) -> None:
    """Learner ranks are other processes: a user's file is no module there, and his modules need not be on their path."""
    module = inspect.getmodule(function)
    file = getattr(module, "__file__", None)
    if module is None or file is None or module.__name__.startswith("learner."):
        return
    if not Path(file).is_relative_to(sysconfig.get_path("purelib")):
        from ray import cloudpickle

        cloudpickle.register_pickle_by_value(module)


def objective(config: AlgorithmConfig) -> Objective:
    """The composed objective that every learner rank computes."""
    kl_in_loss = config.kl_coefficient != 0 and config.kl_placement == "loss"
    return Objective(
        loss=_resolve("algorithm.loss", config.loss, losses),
        loss_options=dict(config.loss_options),
        proximal=config.proximal,
        correction=_resolve("algorithm.correction", config.correction, corrections) if config.correction else None,
        correction_options=dict(config.correction_options),
        kl=_resolve("algorithm.kl_estimator", config.kl_estimator, kl) if kl_in_loss else None,
        kl_coefficient=config.kl_coefficient if kl_in_loss else 0.0,
        entropy_coefficient=config.entropy_coefficient,
        selection=_selection(config),
        selection_options=dict(config.selection_options),
        returns=_returns(config),
    )


def per_token(config: AlgorithmConfig) -> bool:
    """Whether advantages are per token, and so a matter of the ranks: the driver then passes rewards on."""
    return config.advantage == advantages.reinforce_pp.__name__


def _returns(config: AlgorithmConfig) -> TokenReturns | None:
    if not per_token(config):
        if config.kl_coefficient and config.kl_placement == "reward":
            raise ConfigError(
                f"algorithm.kl_placement=reward charges each token's reward, and algorithm.advantage={config.advantage} has one "
                "reward for the whole answer; set algorithm.advantage=reinforce_pp, or algorithm.kl_placement=loss"
            )
        return None
    options = {field.name for field in dataclasses.fields(TokenReturns)} - {"kl_coefficient"}
    if unknown := sorted(config.advantage_options.keys() - options):
        raise ConfigError(
            f"algorithm.advantage_options.{unknown[0]}: algorithm.advantage={config.advantage} has no such option; expected "
            f"{', '.join(sorted(options))}"
        )
    kl_coefficient = config.kl_coefficient if config.kl_placement == "reward" else 0.0
    return TokenReturns(**config.advantage_options, kl_coefficient=kl_coefficient)


def _selection(config: AlgorithmConfig) -> Callable[..., Any] | None:
    if config.selection is None:
        if config.selection_options:
            raise ConfigError(
                f"algorithm.selection_options={config.selection_options} without algorithm.selection: name one of "
                f"{', '.join(selection.__all__)}"
            )
        return None
    if config.selection not in selection.__all__:
        raise ConfigError(f"algorithm.selection={config.selection}: expected one of {', '.join(selection.__all__)}")
    if config.loss in losses.WHOLE_ROWS and config.selection != selection.kl_cov.__name__:
        raise ConfigError(
            f"algorithm.selection={config.selection} leaves tokens out, and algorithm.loss={config.loss} is one loss for the whole "
            "answer, in which each token's gradient stays whatever is left out; expected a loss of tokens, such as ppo_clip or "
            "gspo_token, or no selection"
        )
    return getattr(selection, config.selection)


def compute_advantages(
    config: AlgorithmConfig,
    rewards: Sequence[float],
    groups: Sequence[int],
    lengths: Sequence[int],
    components: Mapping[str, Sequence[float | None]] | None = None,
    weights: Mapping[str, float] | None = None,
) -> list[float]:
    """One advantage per answer. Rewards are of every scored member, whether it trains or only counts in the baseline.

    `components` are the parts of these rewards by name, None where a part was skipped, and `weights` their weights: for
    estimators that ask for them.
    """
    estimator = _resolve("algorithm.advantage", config.advantage, advantages)
    wanted = advantages.needs(estimator)
    data: dict[str, Any] = {}
    if "lengths" in wanted:
        data["lengths"] = torch.tensor(lengths)
    if "component_rewards" in wanted:
        assert components is not None
        assert weights is not None
        parts = [[math.nan if value is None else value for value in components[name]] for name in weights]
        data["component_rewards"] = torch.tensor(parts, dtype=torch.float64).reshape(len(weights), len(rewards)).T
    if "component_weights" in wanted:
        assert weights is not None
        data["component_weights"] = torch.tensor(list(weights.values()), dtype=torch.float64)
    of = torch.tensor(rewards, dtype=torch.float64)
    values = estimator(of, torch.tensor(groups, dtype=torch.int64), **data, **config.advantage_options)
    trial.check_numbers(f"algorithm.advantage={config.advantage}", values, of)
    return values.tolist()


def wants_components(config: AlgorithmConfig) -> bool:
    """Whether the advantage estimator looks at the parts of a reward."""
    return "component_rewards" in advantages.needs(_resolve("algorithm.advantage", config.advantage, advantages))


def token_weights(config: AlgorithmConfig, lengths: Sequence[int], groups: Sequence[int]) -> list[float]:
    """The weight of each sampled token of every answer in one optimizer update; see learner.aggregation.

    A user's own aggregation is called with lengths and group numbers, int64 [N] each, and returns the weights [N].
    """
    if config.aggregation in aggregation.__all__:
        return aggregation.row_weights(config.aggregation, lengths, groups, **config.aggregation_options)
    key = f"algorithm.aggregation={config.aggregation}"
    of = torch.tensor(lengths, dtype=torch.int64)
    own = _resolve("algorithm.aggregation", config.aggregation, aggregation)
    weights = trial.call(key, own, config.aggregation_options, of, torch.tensor(groups, dtype=torch.int64))
    trial.check_numbers(key, weights, of)
    return weights.tolist()


def check_algorithm(config: AlgorithmConfig, answers_per_group: int) -> None:
    """Raises ConfigError naming the key for a name, option or combination that can't be."""
    estimator = _resolve("algorithm.advantage", config.advantage, advantages)
    missing = advantages.needs(estimator) - SUPPLIED - set(config.advantage_options)
    if missing and not per_token(config):
        raise ConfigError(
            f"algorithm.advantage={config.advantage} needs {', '.join(sorted(missing))}, which this trainer does not have"
        )
    permitted = losses.FIXED_AGGREGATION.get(config.loss, (config.aggregation,))
    if config.aggregation not in permitted:
        raise ConfigError(
            f"algorithm.loss={config.loss} is defined with algorithm.aggregation={' or '.join(permitted)} only, "
            f"got {config.aggregation}"
        )
    _check_proximal(config)
    _check_coefficients(config)
    composed = objective(config)
    trial.try_loss(f"algorithm.loss={config.loss}", composed.loss, config.loss_options)
    if composed.correction is not None:
        key, options = f"algorithm.correction={config.correction}", config.correction_options
        supplied = dict.fromkeys(CORRECTION_DATA, trial.ADVANTAGES)
        trial.try_weights(key, composed.correction, options, _data(key, composed.correction, supplied, options))
    elif config.correction_options:
        raise ConfigError(
            f"algorithm.correction_options={config.correction_options} without algorithm.correction: name one of "
            f"{', '.join(corrections.__all__)}"
        )
    estimate = _resolve(
        "algorithm.kl_estimator", config.kl_estimator, kl
    )  # a wrong name also where nothing asks for it yet
    if composed.kl is not None:
        key, supplied = f"algorithm.kl_estimator={config.kl_estimator}", dict.fromkeys(KL_DATA, trial.LOGPROBS)
        trial.try_kl(key, estimate, _data(key, estimate, supplied, {}))
    if composed.selection is not None:
        trial.try_selection(f"algorithm.selection={config.selection}", composed.selection, config.selection_options)
    stand_ins = {
        "lengths": torch.ones(answers_per_group),
        "component_rewards": torch.zeros(answers_per_group, 1),
        "component_weights": torch.ones(1),
    }
    if per_token(config):
        stand_ins["response_mask"] = torch.ones(answers_per_group, 1)
    data = {name: stand_ins[name] for name in advantages.needs(estimator) & stand_ins.keys()}
    key = f"algorithm.advantage={config.advantage}"
    trial.try_advantage(key, estimator, config.advantage_options, data, answers_per_group)
    _check_aggregation(config)


def _check_aggregation(config: AlgorithmConfig) -> None:
    try:
        weights = token_weights(config, [3, 1, 2], [0, 0, 1])
    except (TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"algorithm.aggregation_options: {error}") from error
    if not all(weight >= 0 for weight in weights) or not any(weights):
        raise ConfigError(
            f"algorithm.aggregation={config.aggregation} weighs the tokens of three answers {weights}, expected weights of at "
            "least 0 that are not all 0"
        )


def _check_coefficients(config: AlgorithmConfig) -> None:
    """A term must pull, and a coefficient can be steered only where it has an effect."""
    target = f"algorithm.kl_target={config.kl_target}"
    if config.kl_target is not None and not config.kl_coefficient > 0:
        raise ConfigError(
            f"{target} multiplies algorithm.kl_coefficient={config.kl_coefficient}: expected a coefficient above 0 to start with"
        )
    if config.kl_coefficient and config.kl_placement == "loss" and config.kl_estimator == kl.k1.__name__:
        raise ConfigError(
            "algorithm.kl_estimator=k1 as a term of the loss pulls nowhere, its expected gradient is 0; expected "
            "algorithm.kl_estimator=k2, k3 or k3_unbiased, or algorithm.kl_placement=reward"
        )
    most = config.entropy_coefficient_max
    if config.entropy_target is not None and not 0 <= config.entropy_coefficient <= most:
        raise ConfigError(
            f"algorithm.entropy_target={config.entropy_target} with algorithm.entropy_coefficient={config.entropy_coefficient}: "
            f"expected a coefficient from 0 to algorithm.entropy_coefficient_max={most} to start with"
        )


def _check_proximal(config: AlgorithmConfig) -> None:
    """The policy ratio and the correction must make up the importance weight once: not twice, not by half."""
    permitted = losses.FIXED_PROXIMAL.get(config.loss, (config.proximal,))
    if config.proximal not in permitted:
        raise ConfigError(
            f"algorithm.loss={config.loss} is defined with algorithm.proximal={' or '.join(permitted)} only, "
            f"got {config.proximal}"
        )
    if config.loss in losses.WHOLE_ROWS and config.correction in corrections.DROP_TOKENS:
        raise ConfigError(
            f"algorithm.correction={config.correction} drops tokens, and algorithm.loss={config.loss} is one loss for the whole "
            "answer, in which each token's gradient stays whatever is dropped; expected a loss of tokens, such as ppo_clip or "
            "gspo_token, or a mask of whole answers: geometric_mask or sequence_k3_mask"
        )
    if config.proximal != "behaviour" or config.correction is None or config.correction in corrections.MASKS:
        return
    others = losses.FIXED_PROXIMAL.get(config.loss, ("recompute", "interpolate"))
    others = tuple(name for name in others if name != "behaviour")
    remedy = f"algorithm.proximal={' or '.join(others)}, or " if others else ""
    masks = corrections.MASKS - (corrections.DROP_TOKENS if config.loss in losses.WHOLE_ROWS else frozenset())
    raise ConfigError(
        f"algorithm.correction={config.correction}: with algorithm.proximal=behaviour the policy ratio already is against the "
        f"engine's logprobs, and an importance weight would count the mismatch twice; set {remedy}one of the masks "
        f"{', '.join(sorted(masks))}, or no correction"
    )


def _data(
    key: str, function: Callable[..., Any], supplied: Mapping[str, torch.Tensor], options: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """Of the data that the learner supplies, what the function asks for. Raises ConfigError for what there is not."""
    wanted = advantages.needs(function) - options.keys()
    if missing := wanted - supplied.keys():
        raise ConfigError(f"{key} needs {', '.join(sorted(missing))}, which this trainer does not have")
    return {name: supplied[name] for name in wanted}
