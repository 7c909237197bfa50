"""A killable process that runs reward functions, seen from both ends.

Contract: whatever a reward function does, the caller gets an answer in time. It may hang, hold the
interpreter lock in native code, exit, crash, eat the memory or leave children behind. Only a process of its
own, killed from outside, ends all of these; a guard inside the same process does not.

- A deadline counts from the start of a call's execution, not from queueing or from the start of the process.
- The process leads its own process group, which is killed as a whole. It cannot outlive its parent: the
  kernel kills it (PDEATHSIG), even while it holds the interpreter lock. When memory runs out, it goes first.
- It starts as a bare Python interpreter: neither torch nor vLLM nor Ray is imported unless a function does.
- Functions run in its main thread, where signals work (`signal.alarm` in math verifiers). Coroutines run on
  one event loop that lives as long as the process, so that a client keeps its connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import inspect
import json
import logging
import os
import pickle
import resource
import signal
import socket
import struct
import subprocess
import sys
import traceback
from collections.abc import Awaitable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from reward_workers.reward import RewardFunction, RewardResult, RewardSet, Status
from rollout_workers.trajectory import TrajectoryGroup

logger = logging.getLogger(__name__)

START_TRIES = 3  # failed starts in a row before it is an error: the fault is not a passing one then
TRANSFER_TIMEOUT_S = 30  # for a message through the socket once the other side should be reading or writing
KILL_TIMEOUT_S = 10.0  # for a killed process to be gone
MAX_ERROR_CHARACTERS = 500
MAX_TRACEBACK_CHARACTERS = 4000
PR_SET_PDEATHSIG = 1
BOOT = "import sys, json; sys.path[:] = json.loads(sys.argv[1]); from reward_workers.process import main; main()"


class ProcessStartError(RuntimeError):
    """The process of the reward functions can't be started; the message says why."""


class ProcessLostError(Exception):
    """The process was killed or died in the middle of a call. `status` is `timed_out` or `errored`."""

    def __init__(self, status: Status, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Job:
    """Calls of one function: trajectory numbers, or one None for the whole group.

    They run one after another, each with its own deadline; the calls of a coroutine function may run
    `together`. `verdicts` are those of the function that this one needs, one per trajectory of the group.
    """

    function: str
    members: tuple[int | None, ...]
    timeout_s: float
    together: bool = False
    verdicts: tuple[RewardResult, ...] | None = None


@dataclass(frozen=True)
class Subject:
    """What is judged: a group, and its prompt as it stood in the data row where that was a string."""

    group: TrajectoryGroup
    text_prompt: str | None = None

    def failures(self, member: int | None, status: Status, error: BaseException) -> list[RewardResult]:
        """The results of a call that failed: one, or the whole group's."""
        detail = {
            "error": f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARACTERS],
            "traceback": "".join(traceback.format_exception(error))[-MAX_TRACEBACK_CHARACTERS:],
        }
        size = 1 if member is not None else len(self.group.trajectories)
        return [RewardResult(None, status, detail=detail)] * size


class RewardProcess:
    """The parent's end: one process at a time, started when needed, started again after it was lost.

    `rewards` is a pickled RewardSet. `spawner` is an executor whose one thread lives as long as the processes
    shall: PDEATHSIG fires when the *thread* that started a process ends. Not thread-safe, but for `retire`.
    """

    def __init__(self, rewards: bytes, spawner: Executor, start_timeout_s: float) -> None:
        self._rewards = rewards
        self._spawner = spawner
        self._start_timeout_s = start_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._retired = False
        self._subject: bytes | None = None  # what the process holds

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def run(self, job: Job, subject: bytes) -> Iterator[tuple[int | None, list[RewardResult]]]:
        """Yield each call's trajectory number and results, as they come; `subject` is a pickled Subject.

        Raises ProcessLostError when a call overran its deadline or the process died (none is left then), and
        ProcessStartError when none could be started.
        """
        connection = self.start()
        if subject is not self._subject:
            self._send(connection, subject)
            self._subject = subject
        self._send(connection, pickle.dumps(job))
        # A coroutine's own deadline comes first: it ends that call alone and spares the process.
        patience_s = job.timeout_s + (1.0 if job.together else 0.0)
        for _ in job.members:
            yield pickle.loads(self._receive(connection, patience_s, f"no result within {job.timeout_s:g} s"))

    def start(self) -> Connection:
        """Start the process unless it runs. Raises ProcessStartError."""
        if self._connection is not None:
            if not self._connection.poll(0):
                return self._connection
            # Nobody was asked anything, so what can be read is the end of the line.
            logger.warning("an idle reward process was lost: %s", self._obituary())
        problems: list[str] = []
        while len(problems) < START_TRIES:
            try:
                return self._start()
            except ProcessLostError as lost:
                problems.append(str(lost))
                logger.warning("a reward process failed to start: %s", lost)
        raise ProcessStartError(f"reward processes failed to start {START_TRIES} times in a row: {problems[-1]}")

    def _start(self) -> Connection:
        ours, theirs = socket.socketpair()
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):  # so that none is stuck in mid-message
            ours.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", TRANSFER_TIMEOUT_S, 0))
        self._connection = connection = Connection(ours.detach())
        self._subject = None
        with theirs:
            arguments = [json.dumps(sys.path), str(theirs.fileno()), str(os.getpid())]
            self._process = self._spawner.submit(
                subprocess.Popen,
                [sys.executable, "-c", BOOT, *arguments],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            ).result(self._start_timeout_s)
        if self._retired:  # after the process is known, so that either end of a race kills it
            self.kill()
            raise ProcessStartError("the reward worker is closed")
        self._send(connection, self._rewards)
        late = f"the reward functions were not loaded within {self._start_timeout_s:g} s"
        problem = pickle.loads(self._receive(connection, self._start_timeout_s, late))
        if problem is not None:  # no passing fault: another try would end the same
            self.kill()
            raise ProcessStartError(f"a reward function could not be loaded:\n{problem}")
        return connection

    def _send(self, connection: Connection, message: bytes) -> None:
        try:
            connection.send_bytes(message)
        except OSError as error:
            raise ProcessLostError(Status.ERRORED, self._obituary()) from error

    def _receive(self, connection: Connection, timeout_s: float, late: str) -> bytes:
        try:
            if connection.poll(timeout_s):
                return connection.recv_bytes()
        except (EOFError, OSError) as error:
            raise ProcessLostError(Status.ERRORED, self._obituary()) from error
        self.kill()
        raise ProcessLostError(Status.TIMED_OUT, late)

    def _obituary(self) -> str:
        code = self.kill()
        if code is None or code >= 0:
            return f"its process exited with code {code}"
        name = signal.Signals(-code).name
        return f"its process was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")

    def retire(self) -> None:
        """From any thread: end the process under its caller, and start no other."""
        self._retired = True
        process = self._process
        if process is not None:
            process.kill()

    def kill(self) -> int | None:
        """Kill the process and its group. Its exit code, negative for a signal; None if there was none."""
        process, self._process = self._process, None
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
        if process is None:
            return None
        # Before the wait: until the process is reaped, its number (the group's too) belongs to nobody else.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        try:
            return process.wait(KILL_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            logger.error("reward process %d was killed and does not go away: stuck in the kernel", process.pid)
            return None


def main() -> None:
    """The process itself: load the functions, then answer jobs until the parent hangs up."""
    descriptor, parent = int(sys.argv[2]), int(sys.argv[3])
    _tie_to(parent)
    connection = Connection(descriptor)
    os.set_inheritable(descriptor, False)
    # What a reward function forks must not hold the line open when this process dies.
    os.register_at_fork(after_in_child=connection.close)
    try:
        functions = _load(connection.recv_bytes())
    except Exception:
        connection.send_bytes(pickle.dumps(traceback.format_exc()))
        raise
    connection.send_bytes(pickle.dumps(None))
    subject: Subject
    with asyncio.Runner() as runner:
        while True:
            try:
                message: Subject | Job = pickle.loads(connection.recv_bytes())
            except EOFError:
                return
            if isinstance(message, Subject):
                subject = message
            elif message.together:
                runner.run(_judge_together(functions[message.function], subject, message, connection))
            else:
                for member in message.members:
                    results = _judge(functions[message.function], subject, message, member, runner)
                    connection.send_bytes(pickle.dumps((member, results)))


def _tie_to(parent: int) -> None:
    if sys.platform == "linux":
        if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
        with contextlib.suppress(OSError):  # a wish: /proc may be read-only
            Path("/proc/self/oom_score_adj").write_text("1000")
    if os.getppid() != parent:
        sys.exit("the parent died before this process was tied to it")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash in every group must not fill the disk


def _load(rewards: bytes) -> dict[str, RewardFunction]:
    reward_set: RewardSet = pickle.loads(rewards)
    sys.path += [path for path in reward_set.search_path if path not in sys.path]
    for function in reward_set.functions:
        _ = function.loaded
    return {function.name: function for function in reward_set.functions}


def _judge(
    function: RewardFunction, subject: Subject, job: Job, member: int | None, runner: asyncio.Runner
) -> list[RewardResult]:
    async def wait(awaitable: Awaitable[Any]) -> Any:
        return await awaitable

    try:
        call = function.call(subject.group, subject.text_prompt, member, job.verdicts)
        returned = function.loaded(**call.arguments)
        if inspect.isawaitable(returned):
            returned = runner.run(wait(returned))
        return call.results(returned)
    except BaseException as error:  # noqa: BLE001  whatever the user's code raises, SystemExit too, is its verdict
        return subject.failures(member, Status.ERRORED, error)


async def _judge_together(function: RewardFunction, subject: Subject, job: Job, connection: Connection) -> None:
    async def judge(member: int | None) -> None:
        deadline = asyncio.timeout(job.timeout_s)
        try:
            call = function.call(subject.group, subject.text_prompt, member, job.verdicts)
            async with deadline:
                returned = await function.loaded(**call.arguments)
            results = call.results(returned)
        except BaseException as error:  # noqa: BLE001  as above
            if deadline.expired():
                late = TimeoutError(f"no result within {job.timeout_s:g} s")
                results = subject.failures(member, Status.TIMED_OUT, late)
            else:
                results = subject.failures(member, Status.ERRORED, error)
        connection.send_bytes(pickle.dumps((member, results)))

    await asyncio.gather(*(judge(member) for member in job.members))
