"""The program's side of the conversation, in a confined process.

Nothing here is trusted once the program has been loaded: it shares this process and may patch, forge or end anything. So
nothing here knows what is expected of the program, and whatever this side says is data to be judged elsewhere
(`reward_workers.sandbox.wire`). `serve` answers questions about Python code one by one, so that the arguments of later
calls are not here before the earlier ones were answered; `run_program` runs code as a script.

Every frame that comes in is answered by one that goes out. It may be a call of a function that a test gave the program;
what that gave, or a further question, comes in then.
"""

from __future__ import annotations

import _thread
import atexit
import builtins
import contextlib
import gc
import importlib
import os
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable
from typing import Any

from reward_workers.sandbox import wire
from reward_workers.sandbox.values import as_plain, as_standard, describe, exception, make_standard

# LeetCode's programs, a class `Solution` with annotations like List[int], are written for a file that has imported these.
STARTER_MODULES = "string re datetime collections heapq bisect copy math random itertools functools operator typing"
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


def starter_builtins() -> dict[str, Any]:
    """Python's own names, and behind them the starter modules and theirs: what a program finds that it does not define itself."""
    names: dict[str, Any] = {}
    for name in STARTER_MODULES.split():
        module = importlib.import_module(name)
        public = getattr(module, "__all__", None) or [each for each in vars(module) if not each.startswith("_")]
        names |= {each: getattr(module, each) for each in public}
    return names | {name: sys.modules[name] for name in STARTER_MODULES.split()} | vars(builtins)


def patient_threads() -> None:
    """A thread that was joined may hold its stack for an instant more, and there may be no room for a second one as large."""

    def start(*arguments: Any) -> int:
        for pause_s in (0.001, 0.01, 0.05):
            try:
                return _thread.start_new_thread(*arguments)
            except RuntimeError:
                time.sleep(pause_s)
        return _thread.start_new_thread(*arguments)

    threading._start_new_thread = start  # type: ignore[attr-defined]


class Candidate:
    """Python code, loaded as a module, and the objects that it handed out by number."""

    def __init__(self, channel: int, max_bytes: int) -> None:
        self._channel = channel
        self._max_bytes = max_bytes
        self._module = types.ModuleType("solution")
        self._handed_out: list[Any] = []
        self._numbers: dict[int, int] = {}  # of what was handed out, by id
        self._number = 0  # of the frame to answer
        self._turn = threading.RLock()  # for the program's threads

    def serve(self, question: wire.Frame | None) -> None:
        """Answer this and all further ones, until the other side hangs up."""
        while question is not None:
            kind, self._number, payload = question
            self._say(*self._reply(kind, payload))
            question = self._read()

    def _reply(self, kind: bytes, payload: bytes) -> tuple[bytes, bytes]:
        """The kind and the payload of the answer to a question."""
        try:
            answer = wire.VALUE, self._answer(kind, payload)
        except wire.NotPlainError as error:
            answer = wire.NOT_PLAIN, describe(error)
        except wire.TooLargeError as error:
            answer = wire.TOO_LARGE, describe(error)
        except MemoryError:
            answer = wire.OUT_OF_MEMORY, _NO_MEMORY
        except BaseException as error:  # noqa: BLE001  whatever the program raises, SystemExit too, is its answer
            answer = wire.RAISED, describe(error)
        with contextlib.suppress(Exception):  # a program may have closed its output, or have none
            sys.stdout.flush()
        return answer

    def call_back(self, function: int, arguments: list[Any], keywords: dict[str, Any]) -> Any:
        """Have a test's function called, and answer what is asked meanwhile."""
        with self._turn:
            asked = (function, arguments, keywords)
            self._say(wire.CALL, wire.encode(asked, max_bytes=self._max_bytes, convert=self._describe_or_hand_out))
            while (frame := self._read()) is not None:
                kind, self._number, payload = frame
                if kind in (wire.RETURNED, wire.RAISED):
                    value = wire.decode(payload, build=True, resolve=self._resolve, make=self._make)
                    if kind == wire.RETURNED:
                        return value
                    raise exception(*value)
                self._say(*self._reply(kind, payload))
        os._exit(1)

    def _say(self, kind: bytes, payload: bytes) -> None:
        write_all(self._channel, wire.frame(kind, self._number, payload))

    def _read(self) -> wire.Frame | None:
        return wire.read_frame(lambda count: os.read(self._channel, count))

    def _answer(self, kind: bytes, payload: bytes) -> bytes:
        asked = wire.decode(payload, build=True, resolve=self._resolve, make=self._make)
        if kind == wire.LOAD:
            sys.modules["solution"] = self._module  # dataclasses and pickle look it up
            if "class Solution" in asked:
                self._module.__dict__["__builtins__"] = starter_builtins()
            exec(compile(asked, "<solution>", "exec", dont_inherit=True), self._module.__dict__)
            return wire.encode(None)
        if kind == wire.GET:
            owner, name = asked
            return wire.encode(self._get(owner, name), max_bytes=self._max_bytes, convert=self._describe_or_hand_out)
        owner, name, arguments, keywords, by_reference = asked
        convert = self._describe_or_hand_out if by_reference else as_plain
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

    def _describe_or_hand_out(self, value: Any) -> Any:
        if type(value) is TestFunction:
            return wire.Standard("function", (value.number,))
        try:
            return as_standard(value)
        except wire.NotPlainError:
            if id(value) not in self._numbers:
                self._numbers[id(value)] = len(self._handed_out)
                self._handed_out.append(value)
            return wire.Reference(self._numbers[id(value)])

    def _resolve(self, number: int) -> Any:
        return self._handed_out[number]

    def _make(self, name: str, arguments: tuple[Any, ...]) -> Any:
        return TestFunction(self, *arguments) if name == "function" else make_standard(name, arguments)


class TestFunction:
    """A function that a test gave the program, by number."""

    def __init__(self, candidate: Candidate, number: int) -> None:
        self._candidate = candidate
        self.number = number

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._candidate.call_back(self.number, list(arguments), keywords)


def run_program(channel: int, code: str) -> None:
    """Run code as a script and end this process as the interpreter would."""
    sys.argv = ["solution.py"]
    written = sys.stdout
    status = _status(lambda: _execute(code), channel)
    for last in (threading._shutdown, atexit._run_exitfuncs, _flush):  # type: ignore[attr-defined]
        status = _status(last, channel) or status
    with contextlib.suppress(BaseException):  # what objects write when they end is written, whatever becomes of them
        del sys.modules["__main__"]
        gc.collect()
        for stream in (sys.stdout, written):
            if stream is not None and not stream.closed:
                stream.flush()
    os._exit(status)


def _execute(code: str) -> None:
    module = types.ModuleType("__main__")
    module.__file__ = "solution.py"
    sys.modules["__main__"] = module
    exec(compile(code, "solution.py", "exec", dont_inherit=True), module.__dict__)


def _flush() -> None:
    if sys.stdout is not None and not sys.stdout.closed:
        sys.stdout.flush()


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


def write_all(channel: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(channel, view) :]
