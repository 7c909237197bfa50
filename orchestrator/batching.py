"""From a batch of groups to what the learner does with it: advantages, weights, updates, plans. Pure arithmetic."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from learner.batch import FIXED, Coefficients, RankPlan, Row, plan_updates
from orchestrator.algorithm import compute_advantages, per_token, token_weights, wants_components
from orchestrator.config import Config, RewardConfig, RewardFunctionConfig, RewardModelConfig
from orchestrator.flight import Flight
from orchestrator.sampling_types import Batch


@dataclass(frozen=True)
class LearningPlan:
    """`rows` are the answers in the loss; `advantages` are of all scored members, by (group id, index), and empty where the
    ranks compute them token by token: a row's `advantage` is then its reward."""

    ranks: list[RankPlan]
    rows: list[Row]
    advantages: Mapping[tuple[str, int], float]


def plan_learning(
    config: Config,
    batch: Batch,
    flights: Mapping[str, Flight],
    *,
    ranks: int,
    share_prefixes: bool,
    coefficients: Coefficients = FIXED,
) -> LearningPlan:
    """Cut the batch. The payload number of a group is its place in `batch.groups`."""
    advantages = _advantages(config, batch, flights)
    a = config.algorithm
    groups = [_rows(config, number, batch, flights, advantages) for number in range(len(batch.groups))]
    parts = [part for part in _split(groups, a.updates_per_batch) if any(part)]
    plans = plan_updates(
        [_weighted(config, part) for part in parts],
        version=batch.version,
        max_staleness=config.staleness.max,
        epochs=a.epochs_per_batch,
        ranks=ranks,
        max_tokens=config.learner.max_tokens_per_microbatch,
        share_prefixes=share_prefixes,
    )
    plans = [dataclasses.replace(plan, coefficients=coefficients) for plan in plans]
    rows = [row for group in groups for row in group]
    return LearningPlan(plans, rows, {} if per_token(config.algorithm) else advantages)


def _advantages(config: Config, batch: Batch, flights: Mapping[str, Flight]) -> dict[tuple[str, int], float]:
    scored = [
        (number, group.group_id, m)
        for number, group in enumerate(batch.groups)
        for m in group.members
        if m.reward is not None
    ]
    if per_token(config.algorithm):
        return {(group_id, m.index): m.reward for _, group_id, m in scored if m.reward is not None}
    components, weights = None, None
    if wants_components(config.algorithm):
        parts = [flights[group_id].results[member.index].components for _, group_id, member in scored]
        weights = component_weights(config.reward, {name: None for part in parts for name in part})
        components = {name: [part.get(name) for part in parts] for name in weights}
    values = compute_advantages(
        config.algorithm,
        [member.reward for _, _, member in scored if member.reward is not None],
        [number for number, _, _ in scored],
        [member.response_length for _, _, member in scored],
        components,
        weights,
    )
    return {(group_id, member.index): value for (_, group_id, member), value in zip(scored, values, strict=True)}


def component_weights(config: RewardConfig, names: Iterable[str]) -> dict[str, float]:
    """The weights of the named components that count; those that a Python caller passed weigh 1."""
    configured: dict[str, RewardFunctionConfig | RewardModelConfig] = {**config.functions, **config.models}
    weights = {name: configured[name].weight if name in configured else 1.0 for name in names}
    return {name: weight for name, weight in weights.items() if weight}


def _rows(
    config: Config,
    number: int,
    batch: Batch,
    flights: Mapping[str, Flight],
    advantages: Mapping[tuple[str, int], float],
) -> list[Row]:
    """The trainable answers of one group; their token weights come later, per update."""
    group = batch.groups[number]
    flight = flights[group.group_id]
    rows = []
    for index in group.trainable:
        report = flight.reports[index]
        if config.algorithm.mask_truncated and report.truncated:
            continue
        rows.append(
            Row(
                group_id=group.group_id,
                index=index,
                payload=number,
                position=flight.position(index),
                prompt_length=report.prompt_length,
                response_length=report.response_length,
                advantage=advantages[group.group_id, index],
                token_weight=0.0,
                other_length=report.other_length,
            )
        )
    return rows


def _split(groups: Sequence[list[Row]], parts: int) -> list[Sequence[list[Row]]]:
    """Groups in order, in `parts` shares that differ by at most one group."""
    bounds = [len(groups) * i // parts for i in range(parts + 1)]
    return [groups[low:high] for low, high in itertools.pairwise(bounds) if high > low]


def _weighted(config: Config, groups: Sequence[list[Row]]) -> list[list[Row]]:
    """The rows of one optimizer update with their token weights: all normalisers of this update are in them."""
    rows = [(number, row) for number, group in enumerate(groups) for row in group]
    weights = token_weights(config.algorithm, [row.response_length for _, row in rows], [n for n, _ in rows])
    out: list[list[Row]] = [[] for _ in groups]
    for (number, row), weight in zip(rows, weights, strict=True):
        out[number].append(dataclasses.replace(row, token_weight=weight))
    return out
