"""The program's side of the conversation, in a confined process.

Nothing here is trusted once the program has been loaded: it shares this process and may patch, forge or end anything. So
nothing here knows what is expected of the program, and whatever this side says is data to be judged elsewhere
(`reward_workers.sandbox.wire`). `serve` answers questions about Python code one by one, so that the arguments of later
calls are not here before the earlier ones were answered; `run_program` runs code as a script.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import traceback
import types
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

from reward_workers.sandbox import wire

MAX_MESSAGE_CHARACTERS = 500
_DICTS = (Counter, OrderedDict, defaultdict)
_NO_MEMORY = b""  # an empty payload: nothing may need to be allocated


def open_streams() -> None:
    """Text streams over descriptors 0, 1 and 2, each with its `buffer`, for the forks of this process.

    They are made over a file and pipes, as they will find there: a stream remembers whether it can be rewound.
    """
    kept = [os.dup(descriptor) for descriptor in range(3)]
    stdin = os.memfd_create("stdin")
    read, write = os.pipe()
    for target, source in enumerate((stdin, write, write)):
        os.dup2(source, target)
    streams: Any = sys
    keep_open: dict[str, Any] = {"encoding": "utf-8", "closefd": False}
    streams.stdin = streams.__stdin__ = open(0, errors="replace", **keep_open)  # noqa: SIM115  they stay
    streams.stdout = streams.__stdout__ = open(1, "w", **keep_open)  # noqa: SIM115
    streams.stderr = streams.__stderr__ = open(2, "w", 1, errors="backslashreplace", **keep_open)  # noqa: SIM115
    for target, source in enumerate(kept):
        os.dup2(source, target)
    for descriptor in (*kept, stdin, read, write):
        os.close(descriptor)


class Candidate:
    """Python code, loaded as a module, and the objects that it handed out by number."""

    def __init__(self, channel: int, max_bytes: int) -> None:
        self._channel = channel
        self._max_bytes = max_bytes
        self._module = types.ModuleType("solution")
        self._handed_out: list[Any] = []

    def serve(self, question: wire.Frame | None) -> None:
        """Answer this and all further ones, until the other side hangs up."""
        while question is not None:
            kind, number, payload = question
            try:
                answer = wire.frame(wire.VALUE, number, self._answer(kind, payload))
            except wire.NotPlainError as error:
                answer = wire.frame(wire.NOT_PLAIN, number, _message(error))
            except wire.TooLargeError as error:
                answer = wire.frame(wire.TOO_LARGE, number, _message(error))
            except MemoryError:
                answer = wire.frame(wire.OUT_OF_MEMORY, number, _NO_MEMORY)
            except BaseException as error:  # noqa: BLE001  whatever the program raises, SystemExit too, is its answer
                answer = wire.frame(wire.RAISED, number, _message(error))
            sys.stdout.flush()
            write_all(self._channel, answer)
            question = wire.read_frame(lambda count: os.read(self._channel, count))

    def _answer(self, kind: bytes, payload: bytes) -> bytes:
        asked = wire.decode(payload, build=True, resolve=self._resolve)
        if kind == wire.LOAD:
            sys.modules["solution"] = self._module  # dataclasses and pickle look it up
            exec(compile(asked, "<solution>", "exec", dont_inherit=True), self._module.__dict__)
            return wire.encode(None)
        if kind == wire.GET:
            owner, name = asked
            return wire.encode(self._get(owner, name), max_bytes=self._max_bytes, convert=self._convert_or_hand_out)
        owner, name, arguments, keywords, by_reference = asked
        convert = self._convert_or_hand_out if by_reference else convert_known
        before = wire.encode(arguments, convert=convert) if by_reference else b""
        result = self._get(owner, name)(*arguments, **keywords)
        changed = arguments if by_reference and wire.encode(arguments, convert=convert) != before else None
        return wire.encode((result, changed), max_bytes=self._max_bytes, convert=convert)

    def _get(self, owner: Any, name: str) -> Any:
        """An attribute; of the module when there is no owner, where it may also be `Class.method` or a `Solution`'s."""
        if owner is not None:
            return getattr(owner, name) if name else owner
        first, *rest = name.split(".")
        if not hasattr(self._module, first) and hasattr(getattr(self._module, "Solution", None), first):
            first, rest = "Solution", [first, *rest]
        found = getattr(self._module, first)
        for part in rest:
            found = getattr(found() if isinstance(found, type) else found, part)
        return found

    def _convert_or_hand_out(self, value: Any) -> Any:
        try:
            return convert_known(value)
        except wire.NotPlainError:
            self._handed_out.append(value)
            return wire.Reference(len(self._handed_out) - 1)

    def _resolve(self, number: int) -> Any:
        return self._handed_out[number]


def convert_known(value: Any) -> Any:
    """Counters, default and ordered dicts as dicts, numpy's numbers and arrays as numbers and lists.

    Raises NotPlainError for anything else.
    """
    kind = type(value)
    if kind in _DICTS:
        return dict(value)
    if kind.__module__ == "numpy" and hasattr(value, "tolist"):
        plain = value.tolist()
        if type(plain) is not kind:
            return plain
    return wire.refuse(value)


def run_program(channel: int, code: str) -> None:
    """Run code as a script and end this process as the interpreter would."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    sys.argv = ["solution.py"]
    status = _status(lambda: exec(compile(code, "solution.py", "exec", dont_inherit=True), module.__dict__), channel)
    for last in (threading._shutdown, atexit._run_exitfuncs, sys.stdout.flush):  # type: ignore[attr-defined]
        status = _status(last, channel) or status
    os._exit(status)


def _status(action: Callable[[], Any], channel: int) -> int:
    """The exit status that an action calls for."""
    try:
        action()
    except SystemExit as end:
        if end.code is None or type(end.code) is int:
            return (end.code or 0) & 0xFF
        sys.stderr.write(f"{end.code}\n")
        return 1
    except MemoryError:
        write_all(channel, wire.frame(wire.OUT_OF_MEMORY, 0, _NO_MEMORY))
        return 1
    except BaseException:  # noqa: BLE001  the program's own
        traceback.print_exc()
        return 1
    return 0


def _message(error: BaseException) -> bytes:
    """The type's name and the text, encoded."""
    try:
        text = str(error)[:MAX_MESSAGE_CHARACTERS]
    except BaseException:  # noqa: BLE001  a program's exception may have any __str__
        text = ""
    return wire.encode((str(type(error).__name__), str(text)))


def write_all(channel: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(channel, view) :]
