"""Is what a program gave what was expected? Decided here, in the judging process, on plain data.

Policy. Values: types must agree, with these exceptions: a tuple is equal to a list of the same items; an int may stand where
a float is expected and the reverse, by value; a float where either side is one need only be close (`rtol`, `atol`); a
dict's integer keys may have been written as strings, as JSON does. A bool is no int. NaN equals NaN. Items of sets and keys
of dicts are compared exactly.

Text: trailing blanks of lines and empty lines at the end are dropped, and then lines must agree in number and order. Within a
line words are compared exactly, unless a decimal number is expected: then any decimal number that is close.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from reward_workers.sandbox.wire import DictPairs, SetItems, encode

_DECIMAL = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?")
_INTEGER = re.compile(r"[+-]?[0-9]+")
MAX_NUMBER_CHARACTERS = 400


@dataclass(frozen=True)
class Tolerance:
    """Numbers a and b are close if |a - b| <= max(rtol * max(|a|, |b|), atol), as in `math.isclose`."""

    rtol: float = 1e-6
    atol: float = 1e-9

    def close(self, found: float, expected: float) -> bool:
        return math.isclose(found, expected, rel_tol=self.rtol, abs_tol=self.atol)


def values_equal(found: Any, expected: Any, tolerance: Tolerance) -> bool:
    """Whether a decoded value (sets and dicts as `SetItems` and `DictPairs`) is the expected one.

    `expected` is plain, or decoded as well.
    """
    if type(expected) is bool or expected is None or type(expected) in (str, bytes):
        return type(found) is type(expected) and bool(found == expected)
    if type(expected) in (int, float, complex):
        return _numbers_equal(found, expected, tolerance)
    if type(expected) in (list, tuple):
        return (
            type(found) in (list, tuple)
            and len(found) == len(expected)
            and all(values_equal(a, b, tolerance) for a, b in zip(found, expected, strict=True))
        )
    if isinstance(expected, SetItems | set | frozenset):
        wanted = expected.items if isinstance(expected, SetItems) else tuple(expected)
        return isinstance(found, SetItems) and Counter(map(_key, found.items)) == Counter(map(_key, wanted))
    if isinstance(expected, DictPairs | Mapping):
        pairs = expected.pairs if isinstance(expected, DictPairs) else tuple(expected.items())
        return isinstance(found, DictPairs) and _pairs_equal(found.pairs, pairs, tolerance)
    return False


def _numbers_equal(found: Any, expected: Any, tolerance: Tolerance) -> bool:
    if type(found) not in (int, float, complex):
        return False
    if complex in (type(found), type(expected)):
        a, b = _complex(found), _complex(expected)
        return (
            a is not None and b is not None and _close(a.real, b.real, tolerance) and _close(a.imag, b.imag, tolerance)
        )
    if type(found) is int and type(expected) is int:
        return found == expected
    if type(expected) is int:
        return bool(found == expected)  # a whole number is expected: 8.999999 is none
    try:
        return _close(float(found), expected, tolerance)
    except OverflowError:
        return False


def _close(found: float, expected: float, tolerance: Tolerance) -> bool:
    return tolerance.close(found, expected) or (math.isnan(found) and math.isnan(expected))


def _complex(number: Any) -> complex | None:
    try:
        return complex(number)
    except OverflowError:
        return None


def _pairs_equal(found: tuple[Any, ...], expected: tuple[Any, ...], tolerance: Tolerance) -> bool:
    if len(found) != len(expected):
        return False
    values = {_key(key): value for key, value in expected}
    if all(type(key) is str for key, _ in expected):
        found = tuple((_written(key), value) for key, value in found)
    seen = {_key(key): value for key, value in found}
    return seen.keys() == values.keys() and all(
        values_equal(value, values[key], tolerance) for key, value in seen.items()
    )


def _written(key: Any) -> Any:
    """An integer key as JSON would write it."""
    return str(key) if type(key) is int and key.bit_length() < 1024 else key


def _key(value: Any) -> bytes:
    """A hashable value as bytes that are equal for what Python holds equal: hashing those can't be made to collide."""
    return encode(_normal(value))


def _normal(value: Any) -> Any:
    if type(value) is float and value.is_integer():
        return int(value)
    if type(value) in (tuple, list):
        return tuple(_normal(item) for item in value)
    if isinstance(value, SetItems | set | frozenset):
        items = value.items if isinstance(value, SetItems) else tuple(value)
        return (b"set", *sorted(_key(item) for item in items))
    if isinstance(value, DictPairs | dict):
        return (b"a dict is no key",)
    return value


def outputs_equal(found: str, expected: str, tolerance: Tolerance) -> bool:
    """Whether what a program wrote is the expected text."""
    ours, theirs = _lines(found), _lines(expected)
    return len(ours) == len(theirs) and all(_line_equal(a, b, tolerance) for a, b in zip(ours, theirs, strict=True))


def _lines(text: str) -> list[str]:
    lines = [line.rstrip() for line in text.split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _line_equal(found: str, expected: str, tolerance: Tolerance) -> bool:
    if found == expected:
        return True
    ours, theirs = re.split(r"(\s+)", found), re.split(r"(\s+)", expected)
    return len(ours) == len(theirs) and all(_word_equal(a, b, tolerance) for a, b in zip(ours, theirs, strict=True))


def _word_equal(found: str, expected: str, tolerance: Tolerance) -> bool:
    if found == expected:
        return True
    if max(len(found), len(expected)) > MAX_NUMBER_CHARACTERS or _INTEGER.fullmatch(expected):
        return False
    if not (_DECIMAL.fullmatch(found) and _DECIMAL.fullmatch(expected)):
        return False
    a, b = float(found), float(expected)
    return math.isfinite(a) and math.isfinite(b) and tolerance.close(a, b)
