"""Assert-style tests, in a confined process of their own that never holds the program.

Contract. The tests run here as they are written; the names that they take from the program are stand-ins, whose calls
travel to the program's process and come back as plain values. So the comparison is out of the program's reach, and
objects of the program's classes arrive as `Remote`: they can be called and asked for attributes, nothing else. To
compare one, to take its truth, length, text or items is an error, never a pass.
"""

from __future__ import annotations

import builtins
import os
from typing import Any, NoReturn

from reward_workers.sandbox import wire
from reward_workers.sandbox.candidate import MAX_MESSAGE_CHARACTERS, convert_known, write_all


class RemoteError(Exception):
    """The program raised something that is no builtin exception."""


class Remote:
    """An object of the program's, by number (None: the program's module), and what was asked of it."""

    __slots__ = ("_checker", "_name", "_owner")

    def __init__(self, checker: Checker, owner: int | None, name: str) -> None:
        self._checker = checker
        self._owner = owner
        self._name = name

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._checker.call(self._owner, self._name, list(arguments), keywords)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._checker.get(self._reference(), name)

    def _reference(self) -> wire.Reference | None:
        if self._name:
            found = self._checker.get(None if self._owner is None else wire.Reference(self._owner), self._name)
            return found._reference() if isinstance(found, Remote) else None
        return None if self._owner is None else wire.Reference(self._owner)


def _refused(operation: str) -> Any:
    def refuse(self: Remote, *_: Any) -> NoReturn:
        raise TypeError(f"a test can't use {operation} on an object of the program's, only on plain values")

    return refuse


for _operation in (
    *("eq", "ne", "lt", "le", "gt", "ge", "bool", "len", "iter", "next", "getitem", "contains", "hash", "repr", "str"),
    *("int", "float", "index", "complex", "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "mod"),
    *("rmod", "and", "rand", "or", "ror", "xor", "rxor", "neg", "abs", "round", "format", "reversed", "enter", "exit"),
):
    setattr(Remote, f"__{_operation}__", _refused(f"__{_operation}__"))


class Checker:
    """Runs tests whose calls are answered over the channel."""

    def __init__(self, channel: int, max_bytes: int) -> None:
        self._channel = channel
        self._max_bytes = max_bytes
        self._asked = 0
        self._names: dict[str, Any] = {"__name__": "tests", "__builtins__": builtins}

    def serve(self, question: wire.Frame | None) -> None:
        """Answer `CHECK` and `TEST` until the other side hangs up: None if it went well, else what was raised."""
        while question is not None:
            kind, number, payload = question
            asked = wire.decode(payload, build=True)
            try:
                if kind == wire.CHECK:
                    self._prepare(*asked)
                else:
                    exec(compile(asked, "<test>", "exec", dont_inherit=True), self._names)
                said = None
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

    def _prepare(self, setup: str, names: list[str]) -> None:
        for name in names:
            try:
                value = self.get(None, name)
            except Exception:  # noqa: BLE001  the program has no such name: the test that uses it says so
                continue
            self._names[name] = Remote(self, None, name) if isinstance(value, Remote) else value
        exec(compile(setup, "<setup>", "exec", dont_inherit=True), self._names)

    def _ask(self, kind: bytes, asked: Any) -> Any:
        self._asked += 1
        payload = wire.encode(asked, max_bytes=self._max_bytes, convert=_convert)
        write_all(self._channel, wire.frame(kind, self._asked, payload))
        answer = self._read()
        if answer is None:
            os._exit(1)
        kind, _, payload = answer
        value = wire.decode(payload, build=True, resolve=lambda number: Remote(self, number, ""))
        if kind == wire.VALUE:
            return value
        name, message = value
        known = getattr(builtins, name, None) if type(name) is str else None
        if isinstance(known, type) and issubclass(known, Exception):
            try:
                raised: Exception = known(message)
            except TypeError:  # UnicodeDecodeError and the like take more
                raised = RemoteError(f"{name}: {message}")
        else:
            raised = RemoteError(f"{name}: {message}")
        raise raised

    def _read(self) -> wire.Frame | None:
        return wire.read_frame(lambda count: os.read(self._channel, count))


def _convert(value: Any) -> Any:
    if isinstance(value, Remote):
        reference = value._reference()
        if reference is not None:
            return reference
    return convert_known(value)


def _update(mine: Any, theirs: Any) -> None:
    """What the program did to a mutable argument, done to the test's own."""
    if type(mine) is list and type(theirs) is list:
        mine[:] = theirs
    elif (type(mine) is dict and type(theirs) is dict) or (type(mine) is set and type(theirs) is set):
        mine.clear()
        mine.update(theirs)
