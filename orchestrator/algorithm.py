"""From configured names to the functions that make up an objective, and from a batch's rewards to its advantages.

An algorithm is advantage estimator x policy loss x aggregation x correction x KL term. Each name is a function of the
learner's module for its kind, or a dotted path to a user's. `check_algorithm` resolves and calls all of them once on a
single token, so a wrong name, option or pair is refused before anything starts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch

from learner import advantages, aggregation, corrections, kl, losses, selection
from learner.objective import CORRECTION_DATA, KL_DATA, Objective, TokenReturns
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
            return load_function(name)
        except (ValueError, ImportError) as error:
            raise ConfigError(f"{key}={name}: {error}") from error
    raise ConfigError(f"{key}={name}: expected one of {', '.join(selectable)}, or a dotted path to a function")


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
    kl_coefficient = config.kl_coefficient if config.kl_placement == "reward" else 0.0
    try:
        return TokenReturns(**config.advantage_options, kl_coefficient=kl_coefficient)
    except TypeError as error:
        raise ConfigError(f"algorithm.advantage_options={config.advantage_options}: {error}") from error


def _selection(config: AlgorithmConfig) -> Callable[..., Any] | None:
    """Not a dotted path: what becomes of the tokens is said in `learner.selection.EFFECT`."""
    if config.selection is None:
        if config.selection_options:
            raise ConfigError(
                f"algorithm.selection_options={config.selection_options} without algorithm.selection: name one of "
                f"{', '.join(selection.__all__)}"
            )
        return None
    if config.selection not in selection.__all__:
        raise ConfigError(f"algorithm.selection={config.selection}: expected one of {', '.join(selection.__all__)}")
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
        data["component_rewards"] = torch.tensor(parts, dtype=torch.float64).T
    if "component_weights" in wanted:
        assert weights is not None
        data["component_weights"] = torch.tensor(list(weights.values()), dtype=torch.float64)
    values = estimator(
        torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups), **data, **config.advantage_options
    )
    return values.tolist()


def wants_components(config: AlgorithmConfig) -> bool:
    """Whether the advantage estimator looks at the parts of a reward."""
    return "component_rewards" in advantages.needs(_resolve("algorithm.advantage", config.advantage, advantages))


def token_weights(config: AlgorithmConfig, lengths: Sequence[int], groups: Sequence[int]) -> list[float]:
    """The weight of each sampled token of every answer in one optimizer update; see learner.aggregation."""
    return aggregation.row_weights(config.aggregation, lengths, groups, **config.aggregation_options)


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
    composed = objective(config)
    one, mask = torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool)
    _try("algorithm.loss_options", config.loss_options, composed.loss, one, one, one, mask)
    if composed.correction is not None:
        options = config.correction_options
        data = _data(f"algorithm.correction={config.correction}", composed.correction, CORRECTION_DATA, options)
        _try("algorithm.correction_options", {**data, **options}, composed.correction, one, one, mask)
    elif config.correction_options:
        raise ConfigError(
            f"algorithm.correction_options={config.correction_options} without algorithm.correction: name one of "
            f"{', '.join(corrections.__all__)}"
        )
    if composed.kl is not None:
        data = _data(f"algorithm.kl_estimator={config.kl_estimator}", composed.kl, KL_DATA, {})
        _try("algorithm.kl_estimator", data, composed.kl, one, one)
    if composed.selection is not None:
        tokens = selection.Tokens(*torch.zeros(4, 1))
        _try("algorithm.selection_options", config.selection_options, composed.selection, tokens, lambda total: total)
    groups = torch.zeros(answers_per_group, dtype=torch.int64)
    stand_ins = {
        "lengths": torch.ones(answers_per_group),
        "component_rewards": torch.zeros(answers_per_group, 1),
        "component_weights": torch.ones(1),
    }
    if per_token(config):
        stand_ins["response_mask"] = torch.ones(answers_per_group, 1)
    data = {name: stand_ins[name] for name in advantages.needs(estimator) & stand_ins.keys()}
    rewards = torch.arange(answers_per_group, dtype=torch.float64)
    _try("algorithm.advantage_options", {**data, **config.advantage_options}, estimator, rewards, groups)
    _try(
        "algorithm.aggregation_options",
        config.aggregation_options,
        aggregation.row_weights,
        config.aggregation,
        [1],
        [0],
    )


def _check_proximal(config: AlgorithmConfig) -> None:
    """The policy ratio and the correction must make up the importance weight once: not twice, not by half."""
    permitted = losses.FIXED_PROXIMAL.get(config.loss, (config.proximal,))
    if config.proximal not in permitted:
        raise ConfigError(
            f"algorithm.loss={config.loss} is defined with algorithm.proximal={' or '.join(permitted)} only, "
            f"got {config.proximal}"
        )
    if config.proximal != "behaviour" or config.correction is None or config.correction in corrections.MASKS:
        return
    others = losses.FIXED_PROXIMAL.get(config.loss, ("recompute", "interpolate"))
    others = tuple(name for name in others if name != "behaviour")
    remedy = f"algorithm.proximal={' or '.join(others)}, or " if others else ""
    raise ConfigError(
        f"algorithm.correction={config.correction}: with algorithm.proximal=behaviour the policy ratio already is against the "
        f"engine's logprobs, and an importance weight would count the mismatch twice; set {remedy}one of the masks "
        f"{', '.join(sorted(corrections.MASKS))}, or no correction"
    )


def _data(
    key: str, function: Callable[..., Any], supplied: frozenset[str], options: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """Stand-ins for the data that the learner supplies by name. Raises ConfigError for what it does not have."""
    wanted = advantages.needs(function) - options.keys()
    if missing := wanted - supplied:
        raise ConfigError(f"{key} needs {', '.join(sorted(missing))}, which this trainer does not have")
    return dict.fromkeys(wanted, torch.zeros(1, 1))


def _try(key: str, options: Mapping[str, Any], function: Callable[..., Any], *arguments: Any) -> None:
    try:
        function(*arguments, **options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{key}: {error}") from error
