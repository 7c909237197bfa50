"""From configured names to the functions that make up an objective, and from a batch's rewards to its advantages.

An algorithm is advantage estimator x policy loss x aggregation x correction x KL term. Each name is a function of the
learner's module for its kind, or a dotted path to a user's. `check_algorithm` resolves and calls all of them once on a
single token, so a wrong name, option or pair is refused before anything starts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch

from learner import advantages, aggregation, corrections, kl, losses
from learner.objective import CORRECTION_DATA, KL_DATA, Objective
from orchestrator.config import AlgorithmConfig, ConfigError
from reward_workers.reward import load_function

# What the loop can supply to an advantage estimator besides rewards and groups.
SUPPLIED = frozenset({"lengths"})


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
    return Objective(
        loss=_resolve("algorithm.loss", config.loss, losses),
        loss_options=dict(config.loss_options),
        proximal=config.proximal,
        correction=_resolve("algorithm.correction", config.correction, corrections) if config.correction else None,
        correction_options=dict(config.correction_options),
        kl=_resolve("algorithm.kl_estimator", config.kl_estimator, kl) if config.kl_coefficient else None,
        kl_coefficient=config.kl_coefficient,
        entropy_coefficient=config.entropy_coefficient,
    )


def compute_advantages(
    config: AlgorithmConfig, rewards: Sequence[float], groups: Sequence[int], lengths: Sequence[int]
) -> list[float]:
    """One advantage per answer. Rewards are of every scored member, whether it trains or only counts in the baseline."""
    estimator = _resolve("algorithm.advantage", config.advantage, advantages)
    data: dict[str, Any] = {}
    if "lengths" in advantages.needs(estimator):
        data["lengths"] = torch.tensor(lengths)
    values = estimator(
        torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups), **data, **config.advantage_options
    )
    return values.tolist()


def token_weights(config: AlgorithmConfig, lengths: Sequence[int], groups: Sequence[int]) -> list[float]:
    """The weight of each sampled token of every answer in one optimizer update; see learner.aggregation."""
    return aggregation.row_weights(config.aggregation, lengths, groups, **config.aggregation_options)


def check_algorithm(config: AlgorithmConfig, answers_per_group: int) -> None:
    """Raises ConfigError naming the key for a name, option or combination that can't be."""
    estimator = _resolve("algorithm.advantage", config.advantage, advantages)
    missing = advantages.needs(estimator) - SUPPLIED - set(config.advantage_options)
    if missing:
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
    groups = torch.zeros(answers_per_group, dtype=torch.int64)
    data = {"lengths": torch.ones(answers_per_group)} if "lengths" in advantages.needs(estimator) else {}
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
