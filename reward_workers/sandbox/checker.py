"""Assert-style tests, in a confined process of their own that never holds the program.

Contract. The tests run here as they are written; the names that they take from the program are stand-ins, whose calls
travel to the program's process and come back as plain values, or as values of Python's own types that are made here. So
the comparison is out of the program's reach. Objects of the program's classes arrive as `Remote`, which a test can call,
ask for attributes and items, change, and turn into text or a number. What would have the program judge, or show it what
is expected (comparing, truth, arithmetic, hashing), is an error, never a pass; `in` looks through the items, here.

A function of the test's own can be given to the program, which may call it. It runs here, on plain values; an assertion
that fails in it fails the test, whatever the program makes of it.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib
import os
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from reward_workers.sandbox import wire
from reward_workers.sandbox.candidate import write_all
from reward_workers.sandbox.values import (
    MAX_MESSAGE_CHARACTERS,
    IterationEnd,
    as_standard,
    describe,
    exception,
    make_standard,
)

# What reaches anything from anywhere: no program may be given it.
_KEPT = frozenset(
    {"eval", "exec", "compile", "getattr", "setattr", "delattr", "globals", "locals", "vars", "open", "type"}
)


class Remote:
    """An object of the program's, by number (None: the program's module), and what was asked of it."""

    __slots__ = ("_checker", "_name", "_owner")

    def __init__(self, checker: Checker, owner: int | None, name: str) -> None:
        for slot, value in zip(("_checker", "_owner", "_name"), (checker, owner, name), strict=True):
            object.__setattr__(self, slot, value)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._checker.call(self._owner, self._name, list(arguments), keywords)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._checker.get(self._reference(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._ask("__setattr__", name, value)

    def __iter__(self) -> Iterator[Any]:
        iterator = self._ask("__iter__")
        if not isinstance(iterator, Remote):
            raise TypeError("iter() returned a value that is no iterator")
        return iterator

    def __next__(self) -> Any:
        try:
            return self._ask("__next__")
        except IterationEnd:
            raise StopIteration from None

    def __contains__(self, item: Any) -> bool:
        return any(found is item or found == item for found in self)

    def _ask(self, method: str, *arguments: Any) -> Any:
        """What a special method of the object's gives."""
        reference = self._reference()
        owner = None if reference is None else reference.number
        try:
            return self._checker.call(owner, method, list(arguments), {})
        except AttributeError as error:
            if method == "__setattr__":
                raise
            raise TypeError(str(error)) from error  # what Python raises for an object that lacks the method

    def _reference(self) -> wire.Reference | None:
        if self._name:
            found = self._checker.get(None if self._owner is None else wire.Reference(self._owner), self._name)
            return found._reference() if isinstance(found, Remote) else None
        return None if self._owner is None else wire.Reference(self._owner)


def _passed_on(method: str) -> Callable[..., Any]:
    def ask(self: Remote, *arguments: Any) -> Any:
        return self._ask(method, *arguments)

    return ask


def _refused(method: str) -> Callable[..., Any]:
    def refuse(self: Remote, *_: Any) -> NoReturn:
        raise TypeError(f"a test can't use {method} on an object of the program's, only on plain values")

    return refuse


for _operation in ("len", "getitem", "setitem", "delitem", "str", "repr", "format", "int", "float", "index", "round"):
    setattr(Remote, f"__{_operation}__", _passed_on(f"__{_operation}__"))
for _operation in (
    *("eq", "ne", "lt", "le", "gt", "ge", "bool", "hash", "complex", "neg", "pos", "abs", "invert", "enter", "exit"),
    *(
        f"{side}{name}"
        for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
        for side in ("", "r", "i")
    ),
    *(f"{side}{name}" for name in ("and", "or", "xor", "lshift", "rshift", "matmul") for side in ("", "r", "i")),
    *("divmod", "rdivmod", "reversed", "instancecheck", "subclasscheck"),
):
    setattr(Remote, f"__{_operation}__", _refused(f"__{_operation}__"))


class Checker:
    """Runs tests whose calls are answered over the channel."""

    def __init__(self, channel: int, max_bytes: int) -> None:
        self._channel = channel
        self._max_bytes = max_bytes
        self._asked = 0
        self._functions: list[Any] = []  # that the program was given
        self._numbers: dict[int, int] = {}  # of those, by id
        self._failed: AssertionError | None = None  # in one of those
        self._names: dict[str, Any] = {"__name__": "tests", "__builtins__": builtins}

    def serve(self, question: wire.Frame | None) -> None:
        """Answer `CHECK` and `TEST` until the other side hangs up: None if it went well, else what was raised."""
        while question is not None:
            kind, number, payload = question
            asked = wire.decode(payload, build=True)
            self._failed = None
            try:
                if kind == wire.CHECK:
                    self._prepare(*asked)
                else:
                    exec(compile(asked, "<test>", "exec", dont_inherit=True), self._names)
                said = None
                if self._failed is not None:
                    raise self._failed
            except BaseException as error:  # noqa: BLE001  a test fails by raising, whatever it is
                said = f"{type(error).__name__}: {error}"[:MAX_MESSAGE_CHARACTERS]
            write_all(self._channel, wire.frame(wire.VALUE, number, wire.encode(said)))
            question = self._read()

    def call(self, owner: int | None, name: str, arguments: list[Any], keywords: dict[str, Any]) -> Any:
        by = None if owner is None else wire.Reference(owner)
        result, changed = self._ask(wire.CALL, (by, name, arguments, keywords, True))
        if type(changed) is list:
            for mine, theirs in zip(arguments, changed, strict=False):
                _update(mine, theirs)
        return result

    def get(self, owner: wire.Reference | None, name: str) -> Any:
        return self._ask(wire.GET, (owner, name))

    def _prepare(self, setup: str, names: list[str], modules: dict[str, str], entry_point: str) -> None:
        for name, module in modules.items():
            with contextlib.suppress(ImportError):  # the test that uses it says so
                self._names[name] = importlib.import_module(module)
        taken: dict[str, Any] = {}
        for name in names:
            try:
                value = self.get(None, name)
            except Exception:  # noqa: BLE001  the program has no such name: the test that uses it says so
                continue
            taken[name] = Remote(self, None, name) if isinstance(value, Remote) else value
        self._names.update(taken)
        exec(compile(setup, "<setup>", "exec", dont_inherit=True), self._names)
        # An import of everything may bring names that the tests mean by the program's. Something is to come from that.
        none_left = all(self._names.get(name) is not value for name, value in taken.items())
        for name in names if none_left else [entry_point]:
            self._names.pop(name, None)
            if name in taken:
                self._names[name] = taken[name]

    def _ask(self, kind: bytes, asked: Any) -> Any:
        """What the program answers; functions that it calls meanwhile are called."""
        payload = wire.encode(asked, max_bytes=self._max_bytes, convert=self._convert)
        while True:
            self._asked += 1
            write_all(self._channel, wire.frame(kind, self._asked, payload))
            answer = self._read()
            if answer is None:
                os._exit(1)
            kind, _, payload = answer
            if kind == wire.CALL:
                kind, payload = self._called(payload)
                continue
            value = self._decoded(payload)
            if kind == wire.VALUE:
                return value
            raise exception(*value)

    def _called(self, payload: bytes) -> tuple[bytes, bytes]:
        """The kind and the payload of what a function gives that the program calls."""
        try:
            number, arguments, keywords = self._decoded(payload)
            result = self._functions[number](*arguments, **keywords)
            return wire.RETURNED, wire.encode(result, max_bytes=self._max_bytes, convert=self._convert)
        except Exception as error:  # noqa: BLE001  the test's own, or of the program's arguments
            if isinstance(error, AssertionError):
                self._failed = error
            return wire.RAISED, describe(error)

    def _decoded(self, payload: bytes) -> Any:
        return wire.decode(payload, build=True, resolve=lambda number: Remote(self, number, ""), make=self._make)

    def _make(self, name: str, arguments: tuple[Any, ...]) -> Any:
        return self._functions[arguments[0]] if name == "function" else make_standard(name, arguments)

    def _convert(self, value: Any) -> Any:
        if isinstance(value, Remote):
            reference = value._reference()
            if reference is not None:
                return reference
        try:
            return as_standard(value)
        except wire.NotPlainError:
            name = getattr(value, "__name__", "")
            if not callable(value) or (getattr(builtins, name, None) is value and name in _KEPT):
                raise
            number = self._numbers.setdefault(id(value), len(self._functions))
            if number == len(self._functions):
                self._functions.append(value)
            return wire.Standard("function", (number,))

    def _read(self) -> wire.Frame | None:
        return wire.read_frame(lambda count: os.read(self._channel, count))


def _update(mine: Any, theirs: Any) -> None:
    """What the program did to a mutable argument, done to the test's own."""
    kind = type(mine)
    if kind is not type(theirs):
        return
    if kind in (list, bytearray):
        mine[:] = theirs
    elif kind in (dict, set):
        mine.clear()
        mine.update(theirs)
    elif kind is deque:
        mine.clear()
        mine.extend(theirs)
    elif kind.__name__ == "ndarray" and mine.shape == theirs.shape:
        mine[...] = theirs
