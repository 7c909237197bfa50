"""Rewards: several components, reward functions and reward models, make one verdict on each trajectory.

Contract: the total is the sum of weight times value over the components that gave a value. A failure is not a
zero: a trajectory with an errored or timed-out component has no value, only a status; its other components
are kept to be seen. When a gate is not passed, nothing but the gates that were not passed counts. What a single
function may be is said in `reward_workers.function`, what a model is in `reward_workers.reward_model`.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from reward_workers.function import (
    Gold,
    RewardFunction,
    RewardFunctionError,
    gold_written_by,
    load_function,
    rows_checked_by,
)
from reward_workers.reward_model import RewardModel
from rollout_workers.trajectory import RewardResult, Status

__all__ = [
    "Gold",
    "RewardFunction",
    "RewardFunctionError",
    "RewardModel",
    "RewardResult",
    "RewardSet",
    "Status",
    "gold_written_by",
    "load_function",
    "rows_checked_by",
]

FAILED = (Status.ERRORED, Status.TIMED_OUT)  # the verifier's fault: worth another try, and an alarm
# One such component voids the total, which takes the status that comes first here.
VOID = (*FAILED, Status.UNPARSEABLE_ANSWER)

Component = RewardFunction | RewardModel


@dataclass(frozen=True)
class RewardSet:
    """The reward functions and models of a run. The total is the weighted sum of the components that are not None.

    A component with a `gate` must reach that value before the others count: below it, their weighted values are 0,
    penalties included. A gate that gave no value (None) stops nothing. A function that needs another component's
    verdict is judged after it.

    `primary` names the correctness-like component; empty becomes the first function, or the first model where there
    is none. `search_path` is where Python looked for modules when the set was made: worker processes look there as well.

    Raises RewardFunctionError for no component, two of one name, no weight at all, an unknown primary, or a need
    that can't be met.
    """

    functions: Sequence[RewardFunction]
    primary: str = ""
    search_path: Sequence[str] = field(default_factory=lambda: tuple(sys.path))
    models: Sequence[RewardModel] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "functions", tuple(self.functions))
        object.__setattr__(self, "models", tuple(self.models))
        names = [component.name for component in self.components]
        if not names:
            raise RewardFunctionError("a run needs at least one reward function or reward model")
        if len(set(names)) != len(names):
            raise RewardFunctionError(f"reward functions and models need different names, got {', '.join(names)}")
        if all(component.weight == 0 for component in self.components):
            raise RewardFunctionError(f"all reward functions and models ({', '.join(names)}) have weight 0")
        object.__setattr__(self, "primary", self.primary or names[0])
        if self.primary not in names:
            raise RewardFunctionError(f"the primary reward {self.primary!r} is none of {', '.join(names)}")
        free = [component.name for component in self.components if component.needs is None]
        for function in self.functions:
            if function.needs is not None and function.needs not in free:
                raise RewardFunctionError(
                    f"reward function {function.name!r} needs {function.needs!r}, which is none of those that need no "
                    f"other: {', '.join(free) or 'there are none'}"
                )

    @classmethod
    def of(cls, functions: Callable[..., Any] | Sequence[Callable[..., Any]]) -> RewardSet:
        """A set of plain functions, each under its own name and with weight 1; the first is primary."""
        return cls([RewardFunction(_name(f), f) for f in ([functions] if callable(functions) else functions)])

    @property
    def components(self) -> tuple[Component, ...]:
        """Functions first, then models."""
        return (*self.functions, *self.models)

    def select(self, names: Collection[str] | None = None) -> tuple[Component, ...]:
        """The named components in the set's order; None: all.

        Raises RewardFunctionError for an unknown name, for none, and for a function without the one it needs.
        """
        if names is None:
            return self.components
        known = [component.name for component in self.components]
        if unknown := [name for name in names if name not in known]:
            raise RewardFunctionError(f"there is no reward function {', '.join(unknown)}; there are {', '.join(known)}")
        if not names:
            raise RewardFunctionError(f"an empty set of reward functions; there are {', '.join(known)}")
        chosen = tuple(component for component in self.components if component.name in names)
        for component in chosen:
            if component.needs is not None and component.needs not in names:
                raise RewardFunctionError(f"reward function {component.name!r} needs {component.needs!r} beside it")
        return chosen

    def select_functions(self, names: Collection[str] | None = None) -> tuple[RewardFunction, ...]:
        """Those of `select` that are functions."""
        return tuple(component for component in self.select(names) if isinstance(component, RewardFunction))

    def select_models(self, names: Collection[str] | None = None) -> tuple[RewardModel, ...]:
        """Those of `select` that are models."""
        return tuple(component for component in self.select(names) if isinstance(component, RewardModel))

    def only(self, names: Collection[str]) -> RewardSet:
        """A set of the named components alone. Raises RewardFunctionError as `select`, and where none has a weight."""
        return RewardSet(self.select_functions(names), search_path=self.search_path, models=self.select_models(names))

    def check_columns(self, columns: Collection[str], names: Collection[str] | None = None) -> None:
        """Raises RewardFunctionError unless rows with these columns supply what the named functions take."""
        for function in self.select_functions(names):
            function.check_columns(columns)

    def check_row(self, columns: Mapping[str, Any], names: Collection[str] | None = None) -> None:
        """Raises RewardFunctionError unless the named functions can judge a row with these columns."""
        for function in self.select_functions(names):
            function.check_columns(columns)
            function.check_row(columns)

    def combine(self, results: Mapping[str, RewardResult]) -> RewardResult:
        """One trajectory's verdict from its results by component name.

        Metrics are renamed `<component>/<metric>`, details are kept by component. Where there are several, the metric
        `<component>/weighted` is what one adds to the total, after weight and gates; `<component>/passed` says of a
        gate whether it was. Components of weight 0 are shown and do not count: when none of the others gave a value, the
        trajectory is unscored.
        """
        chosen = self.select(list(results))
        weights = {component.name: component.weight for component in chosen}
        components = {name: results[name].value for name in weights}
        metrics = {f"{name}/{key}": value for name in weights for key, value in results[name].metrics.items()}
        detail = {name: dict(results[name].detail) for name in weights if results[name].detail}
        statuses = {result.status for result in results.values()}
        failure = next((status for status in VOID if status in statuses), None)
        counted = any(value is not None and weights[name] for name, value in components.items())
        if failure is not None or not counted:
            return RewardResult(None, failure or Status.UNSCORED, components, metrics, detail)
        passed = {
            component.name: value >= component.gate
            for component in chosen
            if component.gate is not None and (value := components[component.name]) is not None
        }
        if not all(passed.values()):
            weights = {name: weight if passed.get(name) is False else 0.0 for name, weight in weights.items()}
        weighted = {name: weights[name] * value for name, value in components.items() if value is not None}
        own = {f"{name}/weighted": value for name, value in weighted.items()} if len(self.components) > 1 else {}
        own |= {f"{name}/passed": float(of_gate) for name, of_gate in passed.items()}
        try:
            return RewardResult(
                sum(weighted.values()),
                components=components,
                metrics={**metrics, **own},
                detail=detail,
                step_values=_steps(weights, results),
            )
        except ValueError as error:  # the sum overflows, or per-turn rewards don't fit each other
            detail["total"] = {"error": str(error)}
            return RewardResult(None, Status.ERRORED, components, metrics, detail)


def _name(function: Callable[..., Any]) -> str:
    """What a callable is called: a function's own name (`lambda` without its brackets), an object's class."""
    if isinstance(function, functools.partial):
        return _name(function.func)
    return re.sub(r"[<>]", "", getattr(function, "__name__", type(function).__name__))


def _steps(weights: Mapping[str, float], results: Mapping[str, RewardResult]) -> tuple[float, ...] | None:
    """The weighted sum of the per-turn rewards of those functions that give them; None if none does."""
    given = {name: results[name].step_values for name in weights if results[name].step_values is not None}
    if not given:
        return None
    if len({len(steps or ()) for steps in given.values()}) > 1:
        counts = ", ".join(f"{name}: {len(steps or ())}" for name, steps in given.items())
        raise ValueError(f"reward functions gave different numbers of per-turn rewards ({counts})")
    return tuple(
        sum(weights[name] * value for name, value in zip(given, turn, strict=True))
        for turn in zip(*(steps or () for steps in given.values()), strict=True)
    )
