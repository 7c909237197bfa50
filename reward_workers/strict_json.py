"""JSON read strictly: a text that is not one clear value is an error, never a guess.

Contract, beyond what Python's `json` refuses by itself:
- No NaN or Infinity in any spelling, and no number that overflows to infinity (`1e999`) or vanishes (`1e-999` is not 0).
- No key twice in one object: which of the values would count is a matter of luck.
- No half of a surrogate pair: such a string can't be written down as UTF-8.
- At most MAX_CHARACTERS long and MAX_DEPTH deep, so that everything that walks a value ends soon.
- Two values that differ are no answer. The same value twice is one, unless the caller says otherwise.

Every error is a `StrictJsonError` whose message says what is wrong and where, fit to be shown to a model.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

MAX_CHARACTERS = 1_000_000
MAX_DEPTH = 64
THOUGHT_START, THOUGHT_END = "<think>", "</think>"

FENCE_POLICIES = ("allow", "require", "refuse")
_SPACE = re.compile(r"[ \t\n\r]*")
_FENCE_START = re.compile(r"```(?:json)?[ \t]*\r?\n", re.IGNORECASE)
_FENCE_END = "```"
_OBJECT_START = re.compile(r'(\[[ \t\n\r]*)?(\{[ \t\n\r]*["}])')


class StrictJsonError(ValueError):
    """The text is not one clear JSON value; the message says why."""


def loads(text: str) -> Any:
    """The one JSON value that the text is, with whitespace around it. Raises StrictJsonError."""
    value, end = _decode(text, _skip(text, 0))
    if _skip(text, end) != len(text):
        raise StrictJsonError(f"more text after the JSON value, at character {end}: {_shown(text, end)}")
    return value


def only_value(text: str, *, fence: str = "allow", repeats: bool = True) -> Any:
    """The JSON value of a reply that holds nothing else, or (`repeats`) the same value several times.

    `fence`: whether a value may, must or must not stand in a Markdown code fence (of no language or `json`). Raises
    StrictJsonError, also for values that differ.
    """
    if fence not in FENCE_POLICIES:
        raise ValueError(f"fence={fence}: expected one of {', '.join(FENCE_POLICIES)}")
    values: list[Any] = []
    position = _skip(text, 0)
    while position < len(text) or not values:
        opened = _FENCE_START.match(text, position)
        if (opened is None) if fence == "require" else (opened is not None and fence == "refuse"):
            which = "no code fence around the JSON" if opened is None else "a code fence around the JSON"
            raise StrictJsonError(f"{which}, at character {position}: {_shown(text, position)}")
        value, position = _decode(text, _skip(text, opened.end() if opened else position))
        position = _skip(text, position)
        if opened is not None:
            if not text.startswith(_FENCE_END, position):
                raise StrictJsonError(f"the code fence is not closed after the JSON value, at character {position}")
            position = _skip(text, position + len(_FENCE_END))
        values.append(value)
    return _agreed(values, repeats)


def only_object(text: str, *, repeats: bool = True) -> dict[str, Any]:
    """The JSON object within a reply that may hold other text as well, or (`repeats`) the same one several times.

    Braces that don't begin as an object does are other text; one that does and is not whole is an error, so that a part
    of a cut-off object is never taken for the answer. Nor is a part of a list. Raises StrictJsonError, also for no object
    and for objects that differ.
    """
    values = objects_in(text)
    if not values:
        raise StrictJsonError("no JSON object in the text")
    return _agreed(values, repeats)


def objects_in(text: str) -> list[dict[str, Any]]:
    """All outermost JSON objects within a text, in order; see `only_object`. Raises StrictJsonError."""
    values: list[dict[str, Any]] = []
    position = 0
    while start := _OBJECT_START.search(text, position):
        if start[1]:
            _refuse_list(text, start.start())
        value, position = _decode(text, start.start(2))
        values.append(value)
    return values


def _refuse_list(text: str, start: int) -> None:
    """Raises StrictJsonError if a JSON list begins here. Other text may stand in brackets, an object among it."""
    try:
        _decode(text, start)
    except StrictJsonError:
        return
    raise StrictJsonError(
        f"a list of objects where one object is expected, at character {start}: {_shown(text, start)}"
    )


def after_thought(text: str) -> str | None:
    """What follows the last `</think>`: all of a text without one; None when a thought is not finished."""
    answer = text.rpartition(THOUGHT_END)[2]
    return None if THOUGHT_START in answer else answer


def same_value(one: Any, other: Any) -> bool:
    """Whether two JSON values are equal as JSON: true is not 1, but 1.0 is, and the order of keys is of no account."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same_value(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same_value, one, other))
    return bool(one == other)


def _agreed(values: list[Any], repeats: bool) -> Any:
    if len(values) > 1 and not repeats:
        raise StrictJsonError(f"{len(values)} JSON values; expected one")
    if not all(same_value(values[0], value) for value in values[1:]):
        raise StrictJsonError(f"{len(values)} JSON values that differ: which one is meant is not clear")
    return values[0]


def _decode(text: str, start: int) -> tuple[Any, int]:
    """The value that begins at a position and the position after it."""
    if len(text) > MAX_CHARACTERS:
        raise StrictJsonError(f"{len(text)} characters; at most {MAX_CHARACTERS} are read")
    try:
        value, end = _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        raise StrictJsonError(f"{error.msg}, at character {error.pos}: {_shown(text, error.pos)}") from error
    except RecursionError as error:
        raise StrictJsonError(f"nested more than {MAX_DEPTH} deep") from error
    _check(value)
    return value, end


def _check(value: Any) -> None:
    """Depth, and strings that are Unicode text. Without recursion."""
    waiting = [(value, 1)]
    while waiting:
        node, depth = waiting.pop()
        if isinstance(node, str):
            try:
                node.encode()
            except UnicodeEncodeError as error:
                raise StrictJsonError("a string with half of a surrogate pair") from error
        elif isinstance(node, dict | list):
            if depth > MAX_DEPTH:
                raise StrictJsonError(f"nested more than {MAX_DEPTH} deep")
            waiting += [(part, depth + 1) for part in node]  # of an object: its keys
            if isinstance(node, dict):
                waiting += [(part, depth + 1) for part in node.values()]


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise StrictJsonError(f"the key {twice[:80]!r} twice in one object")
    return value


def _float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise StrictJsonError(f"the number {text[:40]} is too large")
    if not number and re.search("[1-9]", text.lower().partition("e")[0]):
        raise StrictJsonError(f"the number {text[:40]} is too small")
    return number


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError as error:  # Python converts a few thousand digits only, because more take long
        raise StrictJsonError(f"a number of {len(text)} digits") from error


def _constant(text: str) -> Any:
    raise StrictJsonError(f"{text} is not JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_float=_float, parse_int=_integer, parse_constant=_constant)


def _skip(text: str, position: int) -> int:
    space = _SPACE.match(text, position)
    return space.end() if space else position


def _shown(text: str, position: int) -> str:
    return repr(text[position : position + 40]) if position < len(text) else "the text ends"
