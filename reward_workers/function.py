"""A reward function: a user's plain function, what it takes, and how it is called.

Contract:
- A function takes the arguments it names. One that names `prompt`, `completion`, `messages` or `trajectory`
  judges one trajectory and returns a number, None (it does not judge this one) or a `RewardResult`. One that
  names `prompts`, `completions`, `completion_ids`, `trajectories` or `group` judges a whole group and returns
  a list of these, one per trajectory. It may be async, an instance with `__call__`, or a class, of which
  each process makes one instance from the options.
- Whatever else it names is a data column or one of its options; `**kwargs` receives the remaining columns. In
  a whole-group call columns are lists, repeated once per trajectory, under their own name or its plural,
  and `**kwargs` also receives `prompts`, `completions` and the rest, so that a function written for TRL's
  GRPOTrainer works unchanged.
- A function may build on the verdict of another: with `needs` it is given that function's `RewardResult` of the
  trajectory as `verdict`, or the group's as `verdicts`.
- A function may say which rows it can judge: its `check_row` (`rows_checked_by`) takes the columns and options
  that it names, and raises ValueError for a row whose gold can't be used. It is asked before a run starts.
- A function may say what a right answer to a row is: its `write_gold` (`gold_written_by`) takes the columns and options
  that it names, and returns the whole completion, several that are all right, or None where it knows none. `headway
  check-rewards` judges them, and wrong answers made of them.
- What a function returns is checked. NaN, infinity, another type or a wrong length is an error that names the
  function, never a number.

What can be known before a run starts is raised as `RewardFunctionError`: a path that leads nowhere, an
argument that nothing supplies, an option that the function does not take, a row that it can't judge.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib
import importlib.util
import inspect
import math
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from numbers import Real
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import cloudpickle

from rollout_workers.trajectory import Message, RewardResult, Status, Trajectory, TrajectoryGroup

MEMBER_ARGUMENTS = ("prompt", "completion", "messages", "trajectory")
GROUP_ARGUMENTS = ("prompts", "completions", "completion_ids", "trajectories", "group")
TRL_ARGUMENTS = ("trainer_state", "log_extra", "log_metric")  # supplied in whole-group calls only
VERDICT, VERDICTS = "verdict", "verdicts"  # of the function that is needed, in calls of the two kinds

F = TypeVar("F", bound=Callable[..., Any])
Gold = str | Message  # a right answer: its text, or the assistant message where text alone can't say it (tool calls)


class RewardFunctionError(ValueError):
    """A reward function can't be used as it was given; the message names it and says why."""


def rows_checked_by(check: Callable[..., None]) -> Callable[[F], F]:
    """Decorator: `check` is a reward function's `check_row`."""

    def mark(function: F) -> F:
        function.check_row = check  # type: ignore[attr-defined]
        return function

    return mark


def gold_written_by(write: Callable[..., Gold | Sequence[Gold] | None]) -> Callable[[F], F]:
    """Decorator: `write` is a reward function's `write_gold`."""

    def mark(function: F) -> F:
        function.write_gold = write  # type: ignore[attr-defined]
        return function

    return mark


def load_function(path: str | Callable[..., Any]) -> Callable[..., Any]:
    """The callable at `package.module.name` or `path/to/file.py:name`; a callable is returned as it is.

    Raises RewardFunctionError, naming the path, when there is no such module, file or name in it, or when it
    can't be called. Errors that the user's own module raises while it is imported propagate.
    """
    if callable(path):
        return path
    file, colon, name = path.rpartition(":")
    if colon:
        module = _load_file(path, Path(file))
    else:
        module_name, _, name = path.rpartition(".")
        if not module_name:
            raise RewardFunctionError(
                f"reward function {path!r}: expected package.module.function or path/to/file.py:function"
            )
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
                raise  # the module is there, something that it imports is not
            raise RewardFunctionError(f"reward function {path!r}: there is no module {error.name!r}") from error
    if not hasattr(module, name):
        there = sorted(n for n, value in vars(module).items() if callable(value) and not n.startswith("_"))
        raise RewardFunctionError(f"reward function {path!r}: the module has no {name!r}; it has {there}")
    function = getattr(module, name)
    if not callable(function):
        raise RewardFunctionError(f"reward function {path!r} is a {type(function).__name__}, not a function")
    return function


def _load_file(path: str, file: Path) -> Any:
    """The module in a file, loaded once under a name with a hash: two files may have one name."""
    if file.suffix != ".py" or not file.is_file():
        raise RewardFunctionError(f"reward function {path!r}: there is no Python file {str(file)!r}")
    location = str(file.resolve())
    name = f"reward_file_{file.stem}_{hashlib.sha256(location.encode()).hexdigest()[:8]}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, location)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # dataclasses and pickle look their module up while it loads
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


@dataclass(frozen=True)
class Signature:
    """What a reward function wants to be called with."""

    parameters: tuple[str, ...]
    required: frozenset[str]
    takes_all: bool  # it has **kwargs
    whole_group: bool
    is_async: bool
    is_class: bool  # instances are called, and the options are the constructor's


@dataclass(frozen=True)
class Call:
    """One call of one reward function: its keyword arguments, and how to read what it returns.

    `size` is the number of trajectories of a whole-group call, None when one trajectory is judged. `metrics`
    and `extras` are what a function logged through TRL's `log_metric` and `log_extra`.
    """

    function: str
    size: int | None
    arguments: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    extras: dict[str, Sequence[Any]] = field(default_factory=dict)

    def results(self, returned: Any) -> list[RewardResult]:
        """One checked result per trajectory. Raises TypeError or ValueError, naming the function."""
        if self.size is None:
            return [_as_result(self.function, returned)]
        if hasattr(returned, "tolist"):  # numpy arrays and torch tensors
            returned = returned.tolist()
        if not isinstance(returned, Sequence) or isinstance(returned, str | bytes | bytearray):
            raise TypeError(
                f"reward function {self.function!r} judges whole groups: it must return a list of "
                f"{self.size} results, got {_shown(returned)}"
            )
        for what, values in {"results": returned, **self.extras}.items():
            if len(values) != self.size:
                raise ValueError(
                    f"reward function {self.function!r} gave {len(values)} {what} for a group of {self.size}"
                )
        return [
            dataclasses.replace(
                result,
                metrics={**self.metrics, **result.metrics},
                detail={
                    **{column: _plain(values[row]) for column, values in self.extras.items()},
                    **result.detail,
                },
            )
            for row, result in enumerate(_as_result(self.function, value) for value in returned)
        ]

    def log_metric(self, name: str, value: float) -> None:
        self.metrics[name] = float(value)

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        self.extras[column] = values


@dataclass(frozen=True)
class RewardFunction:
    """A named reward function with its weight and options.

    `gate` is the value that it must reach, or nothing else counts (`RewardSet`); None: it is no gate. `needs` names
    the function whose verdict it is given.

    `function` is a path for `load_function` or a callable. A callable travels between processes by
    cloudpickle, and unpickling imports nothing: only a process that asks for `loaded` runs the user's code.
    A file's path is made absolute, since a worker may run in another folder.

    Raises RewardFunctionError, naming the function, when its signature or its options can't be served.
    """

    name: str
    function: str | bytes | Callable[..., Any]
    weight: float = 1.0
    options: Mapping[str, Any] = field(default_factory=dict)
    gate: float | None = None
    needs: str | None = None
    signature: Signature = field(init=False)

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_.-]+", self.name):
            raise RewardFunctionError(f"a reward's name is letters, digits and _ . -, got {self.name!r}")
        if not math.isfinite(self.weight):
            raise RewardFunctionError(f"reward function {self.name!r}: its weight is {self.weight}")
        if self.gate is not None and not math.isfinite(self.gate):
            raise RewardFunctionError(f"reward function {self.name!r}: the value that it must reach is {self.gate}")
        if isinstance(self.function, str) and ":" in self.function:
            file, _, attribute = self.function.rpartition(":")
            object.__setattr__(self, "function", f"{Path(file).resolve()}:{attribute}")
        object.__setattr__(self, "signature", _inspect(self.name, self._target(), self.options))
        if self.needs is not None and self._verdict_argument not in self.signature.parameters:
            raise RewardFunctionError(
                f"reward function {self.name!r} needs {self.needs!r} and does not name {self._verdict_argument!r}, "
                f"as which it would get the verdict; it takes ({', '.join(self.signature.parameters)})"
            )

    @functools.cached_property
    def loaded(self) -> Callable[..., Any]:
        """What is called: the function, or the instance made of the class. Imported or made at first use."""
        target = self._target()
        return target(**self.options) if self.signature.is_class else target

    def same_as(self, other: RewardFunction) -> bool:
        """Whether both are one function with the same options, whatever their names and weights."""
        return self._target() == other._target() and dict(self.options) == dict(other.options)

    def check_columns(self, columns: Collection[str]) -> None:
        """Raises RewardFunctionError unless rows with these columns supply every argument."""
        signature = self.signature
        own = GROUP_ARGUMENTS + TRL_ARGUMENTS if signature.whole_group else MEMBER_ARGUMENTS
        supplied = {*own, *columns, *self._call_options()}
        if signature.whole_group:
            supplied |= {f"{column}s" for column in columns}
        if self.needs is not None:
            supplied.add(self._verdict_argument)
        if missing := sorted(signature.required - supplied):
            hint = " (`needs` names the function whose verdict it is)" if self._verdict_argument in missing else ""
            raise RewardFunctionError(
                f"reward function {self.name!r} takes {', '.join(missing)}, which nothing supplies{hint}. "
                f"There are {', '.join(own)}; data columns: {', '.join(sorted(columns)) or 'none'}; "
                f"options: {', '.join(sorted(self._call_options())) or 'none'}"
            )

    def check_row(self, columns: Mapping[str, Any]) -> None:
        """Raises RewardFunctionError if the function says that it can't judge a row with these columns."""
        if self._row_check is None:
            return
        given = {**columns, **self.options}
        names = inspect.signature(self._row_check).parameters
        try:
            self._row_check(**{name: given[name] for name in names if name in given})
        except ValueError as error:
            raise RewardFunctionError(f"reward function {self.name!r} can't judge it: {error}") from error

    def golds(self, columns: Mapping[str, Any]) -> tuple[Gold, ...]:
        """Right answers to a row with these columns, as far as the function says them: none where it knows none, or the
        row lacks a column that they are made of. Raises RewardFunctionError for a row whose gold can't be used.
        """
        write = getattr(self._target(), "write_gold", None)
        if write is None:
            return ()
        given = {**columns, **self.options}
        parameters = inspect.signature(write).parameters
        if any(p.default is p.empty and name not in given for name, p in parameters.items()):
            return ()
        try:
            written = write(**{name: given[name] for name in parameters if name in given})
        except ValueError as error:
            raise RewardFunctionError(f"reward function {self.name!r} can't write its gold: {error}") from error
        if written is None:
            return ()
        return (written,) if isinstance(written, str | Mapping) else tuple(written)

    def check_options(self) -> None:
        """Let the function itself say, before a run starts, whether it can work: calls its `check_options` with the
        options where it has one (a judge asks its model for a word). Raises RewardFunctionError.
        """
        check = getattr(self._target(), "check_options", None)
        if check is not None:
            check(**self.options)

    def call(
        self,
        group: TrajectoryGroup,
        text_prompt: str | None,
        member: int | None,
        verdicts: Sequence[RewardResult] | None = None,
    ) -> Call:
        """The call that judges trajectory number `member` of the group, or (None) the whole group.

        `text_prompt` is the row's prompt where that was a string and not messages. `verdicts` are those of the
        function that this one needs, one per trajectory. Raises RewardFunctionError when this row lacks a column
        that the function needs.
        """
        self.check_columns(group.columns)
        options = self._call_options()
        if member is None:
            size = len(group.trajectories)
            call = Call(self.name, size)
            columns = {name: [value] * size for name, value in group.columns.items()}
            own = _group_arguments(group, text_prompt, call)
            if verdicts is not None:
                own[VERDICTS] = list(verdicts)
            given = {**{f"{name}s": values for name, values in columns.items()}, **columns, **own, **options}
            rest = {**columns, **own, **options}
        else:
            call = Call(self.name, None)
            own = _member_arguments(group.trajectories[member], text_prompt)
            if verdicts is not None:
                own[VERDICT] = verdicts[member]
            given = {**group.columns, **own, **options}
            rest = {**group.columns, **options}
        call.arguments.update({name: given[name] for name in self.signature.parameters if name in given})
        if self.signature.takes_all:
            call.arguments.update({name: value for name, value in rest.items() if name not in call.arguments})
        return call

    def _call_options(self) -> Mapping[str, Any]:
        return {} if self.signature.is_class else self.options

    def _target(self) -> Callable[..., Any]:
        return load_function(cloudpickle.loads(self.function) if isinstance(self.function, bytes) else self.function)

    @property
    def _verdict_argument(self) -> str:
        return VERDICTS if self.signature.whole_group else VERDICT

    @functools.cached_property
    def _row_check(self) -> Callable[..., None] | None:
        return getattr(self._target(), "check_row", None)

    def __getstate__(self) -> dict[str, Any]:
        state = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}  # nothing that is cached
        if callable(self.function):
            state["function"] = cloudpickle.dumps(self.function)
        return state


def _inspect(name: str, target: Callable[..., Any], options: Mapping[str, Any]) -> Signature:
    """What a reward function takes. Raises RewardFunctionError when that can't be served."""
    where = f"reward function {name!r}"
    is_class = inspect.isclass(target)
    called = target
    if inspect.isclass(target):
        # Asking the class itself for __call__ would find its metaclass's, which constructs.
        calls = [vars(base)["__call__"] for base in target.__mro__ if "__call__" in vars(base)]
        if not calls:
            raise RewardFunctionError(f"{where} is a class whose instances can't be called: it has no __call__")
        called = calls[0]
        try:
            inspect.signature(target).bind(**options)
        except TypeError as error:
            raise RewardFunctionError(f"{where}: its options don't fit its constructor: {error}") from error
    try:
        parameters = list(inspect.signature(called).parameters.values())[int(is_class) :]
    except ValueError as error:
        raise RewardFunctionError(f"{where} has no signature to read its arguments from: {error}") from error

    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    names = tuple(p.name for p in named)
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    member, group = [n for n in names if n in MEMBER_ARGUMENTS], [n for n in names if n in GROUP_ARGUMENTS]
    if positional := [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY]:
        raise RewardFunctionError(f"{where} takes {', '.join(positional)} by position only; arguments go by name")
    if bool(member) == bool(group):
        raise RewardFunctionError(
            f"{where} takes ({', '.join(names)}): it must name what it judges, either one trajectory "
            f"({', '.join(MEMBER_ARGUMENTS)}) or a whole group ({', '.join(GROUP_ARGUMENTS)})"
        )
    if not is_class:
        reserved = {*MEMBER_ARGUMENTS, *GROUP_ARGUMENTS, *TRL_ARGUMENTS}
        unknown = sorted(o for o in options if o in reserved or not (takes_all or o in names))
        if unknown:
            raise RewardFunctionError(f"{where} has no option {', '.join(unknown)}; it takes ({', '.join(names)})")
    return Signature(
        parameters=names,
        required=frozenset(p.name for p in named if p.default is p.empty),
        takes_all=takes_all,
        whole_group=bool(group),
        is_async=inspect.iscoroutinefunction(called) or inspect.iscoroutinefunction(type(called).__call__),
        is_class=is_class,
    )


def _member_arguments(trajectory: Trajectory, text_prompt: str | None) -> dict[str, Any]:
    return {
        "prompt": list(trajectory.prompt_messages) if text_prompt is None else text_prompt,
        "completion": trajectory.completion,
        "messages": list(trajectory.messages),
        "trajectory": trajectory,
    }


def _group_arguments(group: TrajectoryGroup, text_prompt: str | None, call: Call) -> dict[str, Any]:
    """The arguments of a whole-group call, TRL's included.

    `trainer_state` has `global_step` only: the newest policy version that wrote a token of the group.
    """
    members = group.trajectories
    if text_prompt is None:
        prompts: list[Any] = [list(t.prompt_messages) for t in members]
        completions: list[Any] = [list(t.messages[len(t.prompt_messages) :]) for t in members]
    else:
        prompts, completions = [text_prompt] * len(members), [t.completion for t in members]
    version = max((span.version for t in members for span in t.version_spans), default=group.dispatched_at_version)
    return {
        "prompts": prompts,
        "completions": completions,
        "completion_ids": [t.token_ids[t.response_mask].tolist() for t in members],
        "trajectories": list(members),
        "group": group,
        "trainer_state": SimpleNamespace(global_step=version),
        "log_extra": call.log_extra,
        "log_metric": call.log_metric,
    }


def _as_result(name: str, returned: Any) -> RewardResult:
    """What a function returned for one trajectory, checked, in plain values that any process can read."""
    if isinstance(returned, RewardResult):
        parts = {key: value for key, value in returned.components.items() if value is not None}
        return RewardResult(
            None if returned.value is None else _number(name, returned.value),
            returned.status,
            metrics={str(key): float(value) for key, value in {**parts, **returned.metrics}.items()},
            detail={str(key): _plain(value) for key, value in returned.detail.items()},
            step_values=None
            if returned.step_values is None
            else tuple(_number(name, value) for value in returned.step_values),
        )
    if returned is None:
        return RewardResult(None, Status.UNSCORED)
    return RewardResult(_number(name, returned))


def _number(name: str, value: Any) -> float:
    if hasattr(value, "tolist"):  # numpy and torch scalars
        value = value.tolist()
    if not isinstance(value, Real | Decimal):
        raise TypeError(f"reward function {name!r} must return a number, None or a RewardResult, got {_shown(value)}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    except ValueError:  # Decimal's signalling NaN
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"reward function {name!r} returned {number}; a reward must be finite")
    return number


def _plain(value: Any) -> Any:
    """The value as JSON types; what is none of them becomes its repr, so that detail can be read anywhere."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if value is None or type(value) in (bool, int, float, str):
        return value
    return repr(value)


def _shown(value: Any) -> str:
    return f"{type(value).__name__} {repr(value)[:80]}"
