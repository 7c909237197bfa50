"""Talking with one confined process: questions, output, time, its end.

Contract. Whatever a program does, `Session.ask` and `Session.finish` return or raise within their deadlines, with bounded
memory: output and answers are capped while they arrive, and a process that overdraws is killed then. The host decides from
facts of its own first (it killed for time or output), then from how the process ended, then from what it said.

What went wrong before the process announced that it is confined, or with the zygote, is a `SandboxError`: no verdict on
the program. After that everything is a verdict (`Ended`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import math
import os
import select
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from reward_workers.sandbox import kernel, wire
from reward_workers.sandbox.confine import Setup

START_TIMEOUT_S = 30.0  # for a process to be confined, on a machine that is busy
REAP_TIMEOUT_S = 20.0  # for a killed process to be gone
GRACE_S = 0.05  # between two looks at the CPU time of a process that is over its limit by the clock
MEMORY_LOOK_S = 0.1  # between two looks at the memory of a program with all that it started
WALL_FACTOR = 3  # a program that waits: this many times the CPU limit by the clock, time in which it got no CPU aside


class SandboxError(RuntimeError):
    """The sandbox failed, not the program."""


class Outcome(enum.StrEnum):
    """What became of a program."""

    PASSED = "passed"
    FAILED = "failed"  # a wrong answer, an exception, an answer out of order
    TIMEOUT = "timeout"
    OOM = "oom"
    OUTPUT_LIMIT = "output-limit"
    CRASHED = "crashed"  # ended by a signal, or without an answer
    SANDBOX_ERROR = "sandbox-error"


class Ended(Exception):
    """The program came to its end before it answered; `outcome` and the message say how."""

    def __init__(self, outcome: Outcome, message: str) -> None:
        super().__init__(message)
        self.outcome = outcome


@dataclass(frozen=True)
class Limits:
    """`cpu_s` is for one question (or program), `WALL_FACTOR` times as much by the clock, not counting time in which the
    machine gave it no CPU; the rest is for a process."""

    cpu_s: float = 5.0
    memory_mb: int = 512
    output_bytes: int = 1 << 20
    answer_bytes: int = 16 << 20
    file_mb: int = 64

    def setup(self, **special: Any) -> bytes:
        """The first frame of a process with these limits; `special` are further fields of `Setup`."""
        fields = {
            "address_space_bytes": 0,
            "cpu_s": math.ceil(100 * self.cpu_s),  # a last resort: the host looks at each question
            "file_bytes": 0,
            **special,
        }
        Setup(**fields)
        return wire.encode({**fields, "memory_bytes": self.memory_mb << 20, "max_bytes": self.answer_bytes})


@dataclass
class _Stream:
    descriptor: int
    data: bytearray = dataclasses.field(default_factory=bytearray)
    open: bool = True


@dataclass
class _Clock:
    """The time of one question. `hard` is a moment that nothing moves; `look` is when to look at the CPU time next."""

    begun: float
    hard: float
    wall_s: float
    cpu_begun: float
    waited_begun: float
    look: float
    wall: float

    @classmethod
    def of(cls, limits: Limits, hard: float, cpu_begun: float, waited_begun: float) -> _Clock:
        begun, wall_s = time.monotonic(), WALL_FACTOR * limits.cpu_s
        return cls(begun, hard, wall_s, cpu_begun, waited_begun, begun + limits.cpu_s, begun + wall_s)

    def wall_for(self, waited: float) -> float:
        """The limit by the clock for a process that was kept waiting for a CPU for `waited` seconds in its life so far."""
        return self.begun + self.wall_s + max(0.0, waited - self.waited_begun)

    @property
    def next_look(self) -> float:
        return min(self.wall, self.hard, self.look)


class Session:
    """One confined process, to be closed whatever happened: `close` kills and reaps it.

    `reap` gives the exit status of a process that has ended, by its number in the zygote and whether it may have started
    others.
    """

    def __init__(
        self,
        reap: Callable[[int, bool], int],
        pid: int,
        pidfd: int,
        channel: socket.socket,
        stdout: int,
        stderr: int,
        limits: Limits,
        deadline: float,
    ) -> None:
        self._reap = reap
        self._pid = pid
        self._pidfd = pidfd
        self._channel = channel
        self._channel_open = True
        self._limits = limits
        self._deadline = deadline
        self._out, self._err = _Stream(stdout), _Stream(stderr)
        self._to_send = memoryview(b"")
        self._received = bytearray()
        self._asked = 0
        self._exited = False
        self._closed = False
        self._programs = False
        self._memory_bytes = 0  # of all processes of a program together; 0 is no limit
        self._host_pid: int | None = None
        self.status: int | None = None  # the exit status, once closed: negative for a signal
        channel.setblocking(False)
        os.set_blocking(stdout, False)
        os.set_blocking(stderr, False)

    def start(self, setup: bytes) -> None:
        """Wait until the process says that it is confined. Raises SandboxError."""
        asked = wire.decode(setup, build=True)
        self._programs = asked.get("argv") is not None
        if self._programs:  # each of its processes is limited too, but not how many there are
            self._memory_bytes = asked["address_space_bytes"] or asked["data_bytes"]
        self._to_send = memoryview(wire.frame(wire.SETUP, 0, setup))
        until = time.monotonic() + START_TIMEOUT_S
        while (said := self._next_frame()) is None:
            if self._exited or not self._channel_open or time.monotonic() >= until:
                with contextlib.suppress(SandboxError):
                    self.close()
                complaint = self._err.data.decode(errors="replace").strip()[-500:]
                raise SandboxError(f"a process could not be confined: {complaint or self.status}")
            self._pump(until)
        if said[0] != wire.READY:
            raise SandboxError(f"a process that is not confined yet said {said[0]!r}")

    def send(self, kind: bytes, payload: bytes, number: int | None = None) -> int:
        """Begin to ask; the number of the question (a new one unless given)."""
        if number is None:
            self._asked += 1
            number = self._asked
        self._to_send = memoryview(wire.frame(kind, number, payload))
        return number

    def answer(self, number: int | None, until: float = math.inf) -> wire.Frame:
        """The next frame, which must have this number (None: any) and come before `until`. Raises Ended."""
        clock = _Clock.of(self._limits, min(self._deadline, until), self._cpu_s(), self._kept_waiting_s())
        while (said := self._next_frame()) is None:
            if self._exited:
                ended = self._ended("without an answer")
                if self._received and self.status is not None and self.status >= 0:
                    raise Ended(Outcome.FAILED, "the program broke off in the middle of an answer")
                raise ended
            if not self._channel_open:
                self._kill()
                raise Ended(Outcome.CRASHED, "the program closed the line of its answers")
            self._check_time(clock)
            self._pump(clock.next_look)
        if number is not None and said[1] != number:
            self._kill()
            raise Ended(Outcome.FAILED, "the program forged an answer")
        return said

    def ask(self, kind: bytes, payload: bytes) -> wire.Frame:
        """Ask, and wait for the answer. Raises Ended."""
        return self.answer(self.send(kind, payload))

    def finish(self) -> None:
        """Wait until the process ends by itself. Raises Ended for a limit, or for an end by a signal."""
        clock = _Clock.of(self._limits, self._deadline, 0.0, self._kept_waiting_s())
        out_of_memory = False
        memory_look = time.monotonic() + MEMORY_LOOK_S if self._memory_bytes else math.inf
        while not self._exited:
            self._check_time(clock)
            memory_look = self._check_memory(memory_look)
            self._pump(min(clock.next_look, memory_look))
            while (said := self._next_frame()) is not None:
                out_of_memory |= said[0] == wire.OUT_OF_MEMORY
        ended = self._ended("")
        if out_of_memory:
            raise Ended(Outcome.OOM, "the program ran out of memory")
        if self.status is None or self.status < 0:
            raise ended

    @property
    def stdout(self) -> bytes:
        return bytes(self._out.data)

    @property
    def stderr(self) -> bytes:
        return bytes(self._err.data)

    def close(self) -> None:
        """Kill and reap the process, and read what it had written. Raises SandboxError when the zygote is lost."""
        if self._closed:
            return
        self._closed = True
        self._kill()
        try:
            until = time.monotonic() + REAP_TIMEOUT_S
            while not self._exited:
                if time.monotonic() > until:
                    raise SandboxError(f"process {self._pid} does not die: stuck in the kernel")
                self._pump(until, output=False)
            self.status = self._reap(self._pid, self._programs)
            with contextlib.suppress(Ended):
                self._drain()
        finally:
            self._channel.close()
            for descriptor in (self._pidfd, self._out.descriptor, self._err.descriptor):
                os.close(descriptor)

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def _ended(self, how: str) -> Ended:
        """What to make of a process that has exited: it is closed, and its status read."""
        self._drain()
        self.close()
        status = self.status
        assert status is not None
        if status in (-signal.SIGXCPU,):
            return Ended(Outcome.TIMEOUT, "the program used up its CPU time")
        if status == -signal.SIGKILL and kernel.ran_out_of_memory():
            return Ended(Outcome.OOM, "the program was killed while the machine ran out of memory")
        if status < 0:
            return Ended(Outcome.CRASHED, f"the program was ended by {signal.Signals(-status).name}")
        return Ended(Outcome.CRASHED, f"the program exited with status {status} {how}".strip())

    def _cpu_s(self) -> float:
        return self._of_process(kernel.cpu_seconds)

    def _kept_waiting_s(self) -> float:
        return self._of_process(kernel.run_delay_seconds)

    def _of_process(self, figure: Callable[[int], float]) -> float:
        try:
            if self._host_pid is None:
                self._host_pid = kernel.pid_of(self._pidfd)
            return figure(self._host_pid)
        except OSError:
            return 0.0  # it has ended: its exit is what comes next

    def _check_time(self, clock: _Clock) -> None:
        """Raises Ended once a limit is passed."""
        now = time.monotonic()
        if now >= clock.wall:
            # A machine that is busy with others' work is not the program's fault.
            clock.wall = clock.wall_for(self._kept_waiting_s())
        if now >= clock.wall or now >= clock.hard:
            self._kill()
            raise Ended(Outcome.TIMEOUT, "the program did not answer in time")
        if now < clock.look:
            return
        left = self._limits.cpu_s - (self._cpu_s() - clock.cpu_begun)
        if left <= 0:
            self._kill()
            raise Ended(Outcome.TIMEOUT, f"the program used more than {self._limits.cpu_s:g} s of CPU time")
        clock.look = now + max(left, GRACE_S)

    def _check_memory(self, look: float) -> float:
        """When to look at the memory next. Raises Ended once the limit is passed."""
        if time.monotonic() < look:
            return look
        with contextlib.suppress(OSError):  # it has ended: its exit is what comes next
            if self._host_pid is None:
                self._host_pid = kernel.pid_of(self._pidfd)
            if kernel.siblings_memory_bytes(self._host_pid) > self._memory_bytes:
                self._kill()
                raise Ended(Outcome.OOM, "the program and what it started used more memory than they may")
        return time.monotonic() + MEMORY_LOOK_S

    def _next_frame(self) -> wire.Frame | None:
        """The next whole frame that has arrived. Raises Ended for one that is over the limit."""
        if len(self._received) < wire.HEADER.size:
            return None
        length, kind, number = wire.HEADER.unpack_from(self._received)
        if length > self._limits.answer_bytes + 1024:
            self._kill()
            raise Ended(Outcome.OUTPUT_LIMIT, f"an answer of {length} bytes")
        end = wire.HEADER.size + length
        if len(self._received) < end:
            return None
        payload = bytes(self._received[wire.HEADER.size : end])
        del self._received[:end]
        return kind, number, payload

    def _pump(self, until: float, *, output: bool = True) -> None:
        """Move bytes until something happened or the time is up. Raises Ended when the output is over its limit."""
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        if self._channel_open:
            poll.register(self._channel, select.POLLIN | (select.POLLOUT if self._to_send else 0))
        for stream in (self._out, self._err):
            if output and stream.open:
                poll.register(stream.descriptor, select.POLLIN)
        events = dict(poll.poll(max(0.0, until - time.monotonic()) * 1000))
        if self._channel.fileno() in events and self._channel_open:
            self._exchange(events[self._channel.fileno()])
        for stream in (self._out, self._err):
            if stream.descriptor in events:
                self._read_output(stream)
        if self._pidfd in events:
            self._exited = True
            before = -1  # what it had said before it ended is heard to the end, or to the limit
            while self._channel_open and before < len(self._received) <= self._limits.answer_bytes + 1024:
                before = len(self._received)
                self._exchange(select.POLLIN)

    def _exchange(self, events: int) -> None:
        """One send, one receive. A line that breaks is closed: the end of the process, or its doing."""
        try:
            if events & select.POLLOUT and self._to_send:
                self._to_send = self._to_send[self._channel.send(self._to_send, socket.MSG_NOSIGNAL) :]
            if events & ~select.POLLOUT and self._channel_open:
                data = self._channel.recv(1 << 18)
                self._received += data
                self._channel_open = bool(data)
        except BlockingIOError:
            return
        except OSError:
            self._channel_open = False

    def _drain(self) -> None:
        """What is still in the pipes of a process that has ended, which others may hold open."""
        for stream in (self._out, self._err):
            while stream.open and self._read_output(stream):
                pass

    def _read_output(self, stream: _Stream) -> bool:
        """Read once; whether there was anything. Raises Ended, and kills, when it is over the limit."""
        try:
            data = os.read(stream.descriptor, 1 << 16)
        except BlockingIOError:
            return False
        stream.open = bool(data)
        stream.data += data
        if len(stream.data) > self._limits.output_bytes:
            self._kill()
            stream.open = False
            raise Ended(Outcome.OUTPUT_LIMIT, f"the program wrote more than {self._limits.output_bytes} bytes")
        return bool(data)
