"""Values and exceptions that are not plain but Python's own: what they are on the wire, and how they are made again.

Contract. Used in confined processes only, on both sides of an assert-style test: what one side describes, the other makes,
of its own types. A description is data of the other side's making: what is none raises, and the result has no methods but
Python's own, so comparing it asks nobody else.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import sys
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any

from reward_workers.sandbox import wire

MAX_MESSAGE_CHARACTERS = 500
MAX_LINEAGE = 30
_DICTS = (Counter, OrderedDict, defaultdict)
_PARTS: dict[type, Callable[[Any], tuple[Any, ...]]] = {
    bytearray: lambda value: (bytes(value),),
    range: lambda value: (value.start, value.stop, value.step),
    deque: lambda value: (list(value), value.maxlen),
    Fraction: lambda value: (value.numerator, value.denominator),
    Decimal: lambda value: (str(value),),
    date: lambda value: (value.isoformat(),),
    time: lambda value: (value.isoformat(),),
    datetime: lambda value: (value.isoformat(),),
    timedelta: lambda value: (value.days, value.seconds, value.microseconds),
}
_MAKERS: dict[str, Callable[..., Any]] = {
    **{kind.__name__: kind for kind in (bytearray, range, deque, Fraction, Decimal, timedelta)},
    **{kind.__name__: kind.fromisoformat for kind in (date, time, datetime)},
}
_BARE = set(vars(namedtuple("_", ()))) | {"__annotations__", "__orig_bases__"}  # what any named tuple has


def as_plain(value: Any) -> Any:
    """Counters, default and ordered dicts as dicts, named tuples as tuples, numpy's numbers and arrays as numbers and lists.

    Raises NotPlainError for anything else.
    """
    kind = type(value)
    if kind in _DICTS:
        return dict(value)
    if kind.__module__ == "numpy" and hasattr(value, "tolist"):
        plain = value.tolist()
        if type(plain) is not kind:
            return plain
    if _is_named_tuple(kind):
        return tuple(value)
    return wire.refuse(value)


def as_standard(value: Any) -> Any:
    """A value of Python's own types, or a class of exceptions, as a `Standard`; what `as_plain` knows as plain values.

    Raises NotPlainError for anything else.
    """
    kind = type(value)
    if kind in _PARTS:
        return wire.Standard(kind.__name__, _PARTS[kind](value))
    if kind.__module__ == "numpy" and kind.__name__ == "ndarray" and value.dtype.kind in "biufc":
        return wire.Standard("ndarray", (value.dtype.str, value.shape, value.tobytes()))
    if _is_named_tuple(kind) and set(vars(kind)) <= _BARE | set(kind._fields):
        return wire.Standard("namedtuple", (kind.__name__, kind._fields, tuple(value)))
    if kind is type and issubclass(value, Exception):
        return wire.Standard("exception", lineage(value))
    return as_plain(value)


def _is_named_tuple(kind: Any) -> bool:
    """Whether it is a bare one: a class that derives from one may compare as it likes."""
    return kind.__bases__ == (tuple,) and hasattr(kind, "_fields") and kind.__eq__ is tuple.__eq__


def make_standard(name: str, arguments: tuple[Any, ...]) -> Any:
    """The value that `as_standard` described; raises whatever its type does for arguments that don't fit."""
    if name == "ndarray":
        import numpy

        kind, shape, data = arguments
        dtype = numpy.dtype(str(kind))
        if dtype.kind not in "biufc":
            raise wire.WireError(f"an array of {dtype}")
        return numpy.frombuffer(data, dtype).reshape(shape).copy()
    if name == "namedtuple":
        title, fields, items = arguments
        return namedtuple(title, fields, rename=True)(*items)
    if name == "exception":
        return exception_class(arguments)
    if name not in _MAKERS:
        raise wire.WireError(f"no type {name!r}")
    return _MAKERS[name](*arguments)


def lineage(kind: type) -> tuple[str, ...]:
    """The names of an exception's classes, from its own to the first that is Python's own."""
    names: list[str] = []
    for ancestor in kind.__mro__:
        names.append(_text(ancestor.__name__))
        if getattr(builtins, names[-1], None) is ancestor:
            break
    return tuple(names)


@functools.cache
def exception_class(names: tuple[str, ...]) -> type[Exception]:
    """A class of that lineage, of this process's own making, whose text is its first argument.

    Raises WireError for what is none; so is StopIteration, with which a call would end whatever loop it was made in.
    """
    if not 0 < len(names) <= MAX_LINEAGE or not all(type(name) is str for name in names):
        raise wire.WireError("a class of exceptions without names")
    first, *others = names
    known = getattr(builtins, first, None)
    if not others:
        if not isinstance(known, type) or not issubclass(known, Exception):
            raise wire.WireError(f"{first} is no builtin exception")
        if issubclass(known, StopIteration | StopAsyncIteration):
            raise wire.WireError(f"{first} outside of an iteration")
        return known
    return type(first, (exception_class(tuple(others)),), {})


class RemoteError(Exception):
    """The other side raised something that is no ordinary exception."""


class IterationEnd(RemoteError):
    """The other side raised StopIteration: the end of a loop only where the next item was asked for."""


def exception(names: tuple[str, ...], text: str, arguments: tuple[Any, ...] | None) -> Exception:
    """The exception that was described, of a class of this process's own making."""
    try:
        kind = exception_class(names)
    except wire.WireError:
        ended = any(name in ("StopIteration", "StopAsyncIteration") for name in names)
        return (IterationEnd if ended else RemoteError)(f"{names[0]}: {text}")
    for given in (arguments, (text,)):
        with contextlib.suppress(TypeError):  # some need more than a text
            if type(given) is tuple:
                raised = kind(*given)
                if given is not arguments or str(raised) == text:
                    return raised
    return RemoteError(f"{names[0]}: {text}")


def describe(error: BaseException) -> bytes:
    """An exception as bytes: its lineage, its text, and its arguments where they are plain and short."""
    try:
        names = lineage(type(error))
        said = (names, _text(str(error)), error.args)
        try:
            return wire.encode(said, max_bytes=8 * MAX_MESSAGE_CHARACTERS)
        except (wire.NotPlainError, wire.TooLargeError):
            return wire.encode((*said[:2], None))
    except BaseException:  # noqa: BLE001  a program's exception may do anything when it is looked at
        return wire.encode((("Exception",), "", None))


def _text(text: str) -> str:
    """Its beginning, as an exact str: a class derived from str may slice as it likes."""
    return str.__getitem__(text, slice(MAX_MESSAGE_CHARACTERS))


def limit_stacks(memory_bytes: int) -> None:
    """Threads' stacks take at most half the memory: programs ask for far more than they use, and address space is what
    is limited."""
    import threading

    stack_size = threading.stack_size

    def limited(size: int = 0) -> int:
        return stack_size(min(size, memory_bytes // 2))

    for module in ("threading", "_thread"):
        sys.modules[module].stack_size = limited  # type: ignore[attr-defined]
