"""Functions of an algorithm tried out on made-up tokens before anything starts: the learner's own and a user's alike.

Each trial raises ConfigError, naming the key, for an option that the function does not have or that is of another type, for
whatever the function raises, and for a result that the learner could not use: of another shape, not finite, without gradient.
"""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Mapping
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from learner.losses import LossTerms
from learner.selection import Tokens
from orchestrator.config import ConfigError

# Two answers, of three and of two tokens with a tool's between them; what is not sampled is 0, as the learner has it.
MASK = torch.tensor([[1, 1, 1, 0], [1, 0, 1, 0]], dtype=torch.bool)
LOGPROBS = torch.tensor([[-0.5, -1.0, -2.0, 0.0], [-0.3, 0.0, -1.2, 0.0]])
MOVED = torch.tensor([[0.1, -0.1, 0.0, 0.0], [-0.02, 0.0, 0.3, 0.0]])
ADVANTAGES = torch.tensor([[1.0], [-2.0]]).expand_as(MASK)


def try_loss(key: str, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """On the policy that wrote the tokens and on one that moved: somewhere there must be a gradient."""
    slopes = []
    for old in (LOGPROBS, LOGPROBS - MOVED):
        logprobs = LOGPROBS.clone().requires_grad_()
        terms = call(key, function, options, logprobs, old, ADVANTAGES, MASK)
        if not isinstance(terms, LossTerms):
            raise ConfigError(f"{key} returned {_kind(terms)}, expected learner.losses.LossTerms(token_loss, clipped)")
        _check_result(key, "token_loss", terms.token_loss, MASK)
        _check_result(key, "clipped", terms.clipped, MASK)
        if not terms.token_loss.requires_grad:
            raise ConfigError(f"{key}: its loss has no gradient, it does not depend on logprobs")
        (slope,) = torch.autograd.grad(terms.token_loss[MASK].sum(), logprobs, allow_unused=True)
        slopes.append(torch.zeros_like(logprobs) if slope is None else slope)
    found = torch.stack(slopes)[:, MASK]
    if not found.isfinite().all():
        raise ConfigError(f"{key}: the gradient of its loss is not finite, {found.tolist()}")
    if not found.any():
        raise ConfigError(f"{key}: the gradient of its loss is 0 for every token")


def try_weights(key: str, function: Callable[..., Any], options: Mapping[str, Any], data: Mapping[str, Tensor]) -> None:
    """A correction."""
    _check_result(key, "weights", call(key, function, options, LOGPROBS, LOGPROBS - MOVED, MASK, **data), MASK)


def try_kl(key: str, function: Callable[..., Any], data: Mapping[str, Tensor]) -> None:
    """A KL estimator."""
    _check_result(key, "a divergence", call(key, function, {}, LOGPROBS, LOGPROBS - MOVED, **data), MASK)


def try_selection(key: str, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
    call(key, function, options, Tokens(*torch.zeros(4, 1)), lambda total: total)


def try_advantage(
    key: str, function: Callable[..., Any], options: Mapping[str, Any], data: Mapping[str, Tensor], answers: int
) -> None:
    """On one group whose rewards differ and one whose rewards are equal."""
    for rewards in (torch.arange(answers, dtype=torch.float64), torch.ones(answers, dtype=torch.float64)):
        found = call(key, function, options, rewards, torch.zeros(answers, dtype=torch.int64), **data)
        check_numbers(key, found, data.get("response_mask", rewards))


def check_numbers(key: str, found: Any, like: Tensor) -> None:
    """ConfigError unless there is one finite number for each of `like`."""
    if not isinstance(found, Tensor) or found.shape != like.shape:
        raise ConfigError(f"{key} returned {_kind(found)}, expected a tensor of shape {list(like.shape)}")
    if not found.isfinite().all():
        raise ConfigError(f"{key} returned numbers that are not finite: {found.tolist()}")


def call(key: str, function: Callable[..., Any], options: Mapping[str, Any], *arguments: Any, **data: Any) -> Any:
    """The function's result. `key` is as in algorithm.loss=NAME; its options are algorithm.loss_options."""
    options_key = f"{key.partition('=')[0]}_options"
    _check_options(options_key, function, options, len(arguments))
    try:
        return function(*arguments, **data, **options)
    except Exception as error:  # a user's function may raise anything
        raise ConfigError(f"{options_key if options else key}: {error or type(error).__name__}") from error


def _check_result(key: str, what: str, found: Any, mask: Tensor) -> None:
    if not isinstance(found, Tensor) or found.shape != mask.shape:
        raise ConfigError(
            f"{key} returned {what} that is {_kind(found)}, expected one number a token, {list(mask.shape)}"
        )
    if not found[mask].isfinite().all():
        raise ConfigError(f"{key} returned {what} that is not finite: {found.tolist()}")


def _check_options(key: str, function: Callable[..., Any], options: Mapping[str, Any], given: int) -> None:
    """`given` arguments are passed by position: what stands behind them may be an option."""
    parameters = inspect.signature(function).parameters
    positional = [name for name, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    named = positional[given:] + [name for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY]
    try:
        hints = get_type_hints(function)
    except (
        NameError,
        TypeError,
        AttributeError,
        SyntaxError,
    ):  # a user's annotations need not mean anything at run time
        hints = {}
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for name, value in options.items():
        if name in named:
            if expected := _unfit(value, hints.get(name)):
                raise ConfigError(f"{key}.{name}={value!r}: expected {expected}")
        elif not takes_all:
            near = difflib.get_close_matches(name, named, n=1)
            hint = f"did you mean {near[0]}?" if near else f"expected {', '.join(named) or 'none'}"
            raise ConfigError(
                f"{key}: {getattr(function, '__name__', repr(function))} got an unexpected keyword argument {name!r}; {hint}"
            )


_KINDS = {float: "a number", int: "a whole number", bool: "true or false", str: "a text", type(None): "null"}


def _unfit(value: Any, hint: Any) -> str | None:
    """What was expected in place of the value; None where it fits, or where the annotation says nothing that is known here."""
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if not set(kinds) <= _KINDS.keys() or any(_fits(value, kind) for kind in kinds):
        return None
    return " or ".join(_KINDS[kind] for kind in kinds)


def _fits(value: Any, kind: type) -> bool:
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def _kind(found: Any) -> str:
    return f"a tensor of shape {list(found.shape)}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
