"""Plain values as bytes, and frames: the only things that pass between a confined process and the one that judges it.

Contract. Exact builtin types only: None, bool, int, float, complex, str, bytes, list, tuple, set, frozenset, dict. An
object whose type merely derives from one of these is refused, so nothing that arrives has methods of the sender's. Between
confined processes `Reference` and `Standard` stand for what is none of these. Nothing is ever executed, imported or looked
up while decoding, and every malformed input is a `WireError`.

The judging process must not build a set or a dict from a program's values: colliding keys would cost it quadratic time. It
receives `SetItems` and `DictPairs`, and compares those (`reward_workers.code_compare`). A process that is confined itself
asks for real ones (`build=True`).

A frame is a little-endian header (payload bytes: uint32, kind: one byte, number: uint32) and its payload. An answer has
the number of its question.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MAX_DEPTH = 200
HEADER = struct.Struct("<IcI")

# Kinds of frames. To a confined process:
SETUP, LOAD, CALL, GET, PROGRAM, CHECK, TEST = b"S", b"L", b"C", b"G", b"P", b"K", b"T"
# From it; CALL and GET too, from the process that holds tests, and CALL from the program, of functions that a test gave it:
READY, VALUE, RAISED, NOT_PLAIN, TOO_LARGE, OUT_OF_MEMORY = b"R", b"V", b"X", b"N", b"B", b"O"
RETURNED = b"Y"  # what such a function gave; what it raised is RAISED

Frame = tuple[bytes, int, bytes]  # kind, number, payload
_COUNT = struct.Struct("<I")
_DOUBLE = struct.Struct("<d")
_COMPLEX = struct.Struct("<dd")
_SEQUENCES: dict[type, bytes] = {list: b"l", tuple: b"t", set: b"e", frozenset: b"E"}


class WireError(ValueError):
    """Bytes that are no value."""


class NotPlainError(TypeError):
    """A value that is not made of exact builtin types, or has no end; the message names the fault."""


class TooLargeError(ValueError):
    """A value whose encoding is over the limit."""


@dataclass(frozen=True)
class SetItems:
    """A set or frozenset as it arrived: its items in the sender's order, perhaps with repetitions."""

    items: tuple[Any, ...]


@dataclass(frozen=True)
class DictPairs:
    """A dict as it arrived: its items in the sender's order, perhaps with repeated keys."""

    pairs: tuple[tuple[Any, Any], ...]


@dataclass(frozen=True)
class Reference:
    """An object that stayed where it is, by number."""

    number: int


@dataclass(frozen=True)
class Standard:
    """A value of a type that is Python's own, by a name for the type and what to make it of."""

    name: str
    arguments: tuple[Any, ...]


def refuse(value: Any) -> Any:
    """What becomes of an object that is not plain, by default."""
    raise NotPlainError(f"{type(value).__name__} is not a plain value")


def encode(value: Any, *, max_bytes: int = 1 << 30, convert: Callable[[Any], Any] = refuse) -> bytes:
    """The value as bytes. `convert` makes a plain value, a `Reference` or a `Standard` of what is none, or raises NotPlainError.

    Raises NotPlainError (also for what is nested deeper than MAX_DEPTH), TooLargeError (more than `max_bytes`).
    """
    parts: list[bytes] = []
    size = 0

    def put(part: bytes) -> None:
        nonlocal size
        size += len(part)
        if size > max_bytes:
            raise TooLargeError(f"the value needs more than {max_bytes} bytes")
        parts.append(part)

    def write(item: Any, depth: int) -> None:
        kind = type(item)
        if item is None:
            put(b"N")
        elif kind is bool:
            put(b"T" if item else b"F")
        elif kind is int:
            length = (item.bit_length() + 8) // 8
            if length > max_bytes:
                raise TooLargeError(f"an integer needs {length} bytes")
            put(b"i" + _COUNT.pack(length) + item.to_bytes(length, "little", signed=True))
        elif kind is float:
            put(b"f" + _DOUBLE.pack(item))
        elif kind is complex:
            put(b"c" + _COMPLEX.pack(item.real, item.imag))
        elif kind is str or kind is bytes:
            if len(item) > max_bytes:
                raise TooLargeError(f"a text of {len(item)} characters is over {max_bytes} bytes")
            data = item.encode("utf-8", "surrogatepass") if kind is str else item
            put((b"s" if kind is str else b"b") + _COUNT.pack(len(data)) + data)
        elif kind in _SEQUENCES or kind is dict:
            if depth >= MAX_DEPTH:
                raise NotPlainError(f"a value that is nested deeper than {MAX_DEPTH}")
            put((b"d" if kind is dict else _SEQUENCES[kind]) + _COUNT.pack(len(item)))
            if kind is dict:
                for key, entry in item.items():
                    write(key, depth + 1)
                    write(entry, depth + 1)
            else:
                for entry in item:
                    write(entry, depth + 1)
        elif kind is Reference:
            put(b"r" + _COUNT.pack(item.number))
        elif kind is Standard:
            put(b"m")
            write(item.name, depth + 1)
            write(item.arguments, depth + 1)
        else:
            if depth >= MAX_DEPTH:
                raise NotPlainError(f"a value that is nested deeper than {MAX_DEPTH}")
            write(convert(item), depth + 1)

    write(value, 0)
    return b"".join(parts)


def decode(
    data: bytes,
    *,
    build: bool = False,
    resolve: Callable[[int], Any] = Reference,
    make: Callable[[str, tuple[Any, ...]], Any] = Standard,
) -> Any:
    """The value in `data`, all of it. `build`: real sets and dicts (see above); `resolve` and `make` make something of
    references and standard values.

    Raises WireError, and what `resolve` and `make` raise.
    """
    at = 0

    def take(count: int) -> bytes:
        nonlocal at
        if count > len(data) - at:
            raise WireError(f"{count} bytes wanted at {at}, {len(data) - at} are left")
        at += count
        return data[at - count : at]

    def count() -> int:
        number: int = _COUNT.unpack(take(4))[0]
        return number

    def items(number: int, depth: int) -> list[Any]:
        if number > len(data) - at:  # every item takes a byte
            raise WireError(f"{number} items announced, {len(data) - at} bytes are left")
        return [read(depth) for _ in range(number)]

    def read(depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise WireError(f"nested deeper than {MAX_DEPTH}")
        tag = take(1)
        if tag == b"N":
            return None
        if tag in b"TF":
            return tag == b"T"
        if tag == b"i":
            return int.from_bytes(take(count()), "little", signed=True)
        if tag == b"f":
            return _DOUBLE.unpack(take(8))[0]
        if tag == b"c":
            return complex(*_COMPLEX.unpack(take(16)))
        if tag == b"s":
            try:
                return take(count()).decode("utf-8", "surrogatepass")
            except UnicodeDecodeError as error:
                raise WireError(f"not UTF-8: {error}") from error
        if tag == b"b":
            return take(count())
        if tag == b"r":
            return resolve(count())
        if tag == b"m":
            name, arguments = read(depth + 1), read(depth + 1)
            if type(name) is not str or type(arguments) is not tuple:
                raise WireError("a standard value without a name or arguments")
            return make(name, arguments)
        if tag in b"lteE":
            found = items(count(), depth + 1)
            if tag == b"l":
                return found
            if tag == b"t":
                return tuple(found)
            if not build:
                return SetItems(tuple(found))
            return _hashed(set if tag == b"e" else frozenset, found)
        if tag == b"d":
            flat = items(2 * count(), depth + 1)
            pairs = list(zip(flat[::2], flat[1::2], strict=True))
            return _hashed(dict, pairs) if build else DictPairs(tuple(pairs))
        raise WireError(f"unknown tag {tag!r}")

    value = read(0)
    if at != len(data):
        raise WireError(f"{len(data) - at} bytes after the value")
    return value


def _hashed(kind: Callable[[Any], Any], items: list[Any]) -> Any:
    try:
        return kind(items)
    except TypeError as error:
        raise WireError(f"not hashable: {error}") from error


def read_frame(read: Callable[[int], bytes]) -> Frame | None:
    """Kind, number and payload of the next frame of a trusted peer; None at the end. `read(n)` gives up to n bytes."""

    def exactly(count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            part = read(count - len(data))
            if not part:
                return b""
            data += part
        return bytes(data)

    header = exactly(HEADER.size)
    if not header:
        return None
    length, kind, number = HEADER.unpack(header)
    return kind, number, exactly(length)


def frame(kind: bytes, number: int = 0, payload: bytes = b"") -> bytes:
    return HEADER.pack(len(payload), kind, number) + payload
