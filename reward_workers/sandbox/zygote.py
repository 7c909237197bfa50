"""The zygote: a small process that forks confined ones, quickly, from an interpreter that is already warm.

Contract. It is single-threaded, and never sees code, inputs or tests: a fork would inherit them. The host hands it the
ends of a child's streams, and is given a pidfd. It ends as soon as the host closes the line or dies, and takes all its
children with it: they are tied to it (PDEATHSIG), where it has a process namespace the kernel ends whatever is
left in it, and elsewhere what a program leaves behind is frozen, then killed.

Only the child's first frame, `SETUP`, comes from a trusted side and is read before it is confined. `READY` is sent when it
is: what goes wrong before that is the sandbox's fault, what comes after it the program's.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import gc
import importlib
import json
import math
import os
import select
import signal
import site
import socket
import sys
import time
from collections.abc import Sequence

from reward_workers.sandbox import candidate, checker, seccomp, values, wire
from reward_workers.sandbox.confine import (
    Layers,
    Setup,
    base_rules,
    confine,
    enter_namespaces,
    find_layers,
    tasks_besides,
)
from reward_workers.sandbox.kernel import (
    PR_SET_CHILD_SUBREAPER,
    PR_SET_DUMPABLE,
    PR_SET_PDEATHSIG,
    prctl,
)

CHANNEL = 3  # a child's descriptor for frames, next to 0, 1 and 2
MAX_MESSAGE_BYTES = 4096
SPAWN, REAP = b"spawn", b"reap"
SWEEP_TIMEOUT_S = 10.0
COUNT_AFTER_S = 1.0  # for how long a count of the user's threads holds
# What programs commonly import: a child that finds it loaded starts a hundred times sooner than one that reads files.
COMMON_MODULES = """
    array bisect collections.abc copy dataclasses datetime decimal enum fractions functools hashlib heapq io itertools json
    math operator queue random re statistics string textwrap typing abc cmath contextlib numbers
"""


def main() -> None:
    """The process itself; its arguments are those that `reward_workers.sandbox.host` gives."""
    descriptor, host = int(sys.argv[2]), int(sys.argv[3])
    options = json.loads(sys.argv[4])
    line = socket.socket(fileno=descriptor)
    if os.getppid() != host:
        sys.exit("the host died before the zygote was up")
    host_alive = os.pidfd_open(host)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")  # when the machine runs out of memory, programs are the first to go
    found, why_none = enter_namespaces() if options["namespaces"] else ((), "not asked for")
    prctl(PR_SET_DUMPABLE, 0)
    if "pid" in found:
        _fork_into_namespace(line, host_alive)
    else:
        prctl(PR_SET_CHILD_SUBREAPER, 1)
    layers = find_layers(options["libraries"], found, why_none, options["slot"])
    for name in [*COMMON_MODULES.split(), *options["preload"]]:
        with contextlib.suppress(ImportError):  # a program that wants what isn't here must fail, not the sandbox
            importlib.import_module(name)
    sys.path[:] = options["path"]
    site.setquit()  # exit() and quit(), which scripts call
    candidate.open_streams()
    candidate.patient_threads()
    atexit._clear()  # what the modules above registered is not a program's
    _Zygote(line, host_alive, layers, options["libraries"]).serve()


def _fork_into_namespace(line: socket.socket, host_alive: int) -> None:
    """Go on as the first process of the new namespace; this one only waits for it."""
    pid = os.fork()
    if pid:
        line.close()
        os.close(host_alive)
        os._exit(abs(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    prctl(PR_SET_DUMPABLE, 0)


class _Zygote:
    def __init__(self, line: socket.socket, host_alive: int, layers: Layers, libraries: Sequence[str]) -> None:
        self._line = line
        self._host_alive = host_alive
        self._layers = layers
        self._rules = base_rules(libraries) if layers.landlock else None
        self._pid = os.getpid()
        self._others, self._counted_at = 0, -math.inf
        with open("/proc/self/statm") as sizes:
            self._own_bytes = int(sizes.read().split()[0]) * os.sysconf("SC_PAGESIZE")
        seccomp.compiled()  # so that children find it made

    def serve(self) -> None:
        gc.collect()
        gc.freeze()  # what is here for good is not to be copied by every child's collections
        self._send(wire.encode(dataclasses.asdict(self._layers)))
        while self._wait():
            message, descriptors, _, _ = socket.recv_fds(self._line, MAX_MESSAGE_BYTES, 4)
            if not message:
                break
            order, number, programs = wire.decode(message)
            if order == SPAWN:
                self._spawn(descriptors)
            else:
                self._reap(number, programs)
        self._sweep()

    def _wait(self) -> bool:
        """Until the host says something; False once it is dead."""
        poll = select.poll()
        for descriptor in (self._line.fileno(), self._host_alive):
            poll.register(descriptor, select.POLLIN)
        return self._host_alive not in [descriptor for descriptor, _ in poll.poll()]

    def _send(self, message: bytes, descriptors: Sequence[int] = ()) -> None:
        socket.send_fds(self._line, [message], list(descriptors))

    def _spawn(self, descriptors: list[int]) -> None:
        if time.monotonic() - self._counted_at > COUNT_AFTER_S:
            self._others, self._counted_at = tasks_besides(self._layers), time.monotonic()
        try:
            pid = os.fork()
        except OSError as error:
            self._send(wire.encode((0, str(error))))
        else:
            if pid == 0:
                try:
                    self._child(descriptors)
                finally:
                    os._exit(1)
            pidfd = os.pidfd_open(pid)
            self._send(wire.encode((pid, "")), [pidfd])
            os.close(pidfd)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _reap(self, pid: int, programs: bool) -> None:
        """The exit status of a child that was killed or ended, and an end to what it may have left behind."""
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if programs:
            self._sweep()
        self._send(wire.encode((status, "")))

    def _sweep(self) -> None:
        """Kill every descendant, and wait for it."""
        deadline = time.monotonic() + SWEEP_TIMEOUT_S
        while time.monotonic() < deadline:
            if "pid" in self._layers.namespaces:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(-1, signal.SIGKILL)  # all of the namespace, at once
            else:
                _freeze_and_kill()
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
                continue  # there are children still
            return

    def _child(self, descriptors: list[int]) -> None:
        """In a fork: arrange the descriptors, read the set-up, give up all rights, say so, and begin."""
        os.setsid()
        spare = [os.dup(descriptor) for descriptor in descriptors]  # above 3, whatever they were
        rules = None if self._rules is None else os.dup(self._rules)
        for target, source in enumerate(spare):
            os.dup2(source, target)
        keep = CHANNEL + 1
        if rules is not None:
            os.dup2(rules, keep)
            rules, keep = keep, keep + 1
        os.closerange(keep, 1 << 16)
        signal.signal(signal.SIGINT, signal.default_int_handler)

        first = wire.read_frame(lambda count: os.read(CHANNEL, count))
        assert first is not None
        asked = wire.decode(first[2], build=True)
        memory_bytes, max_bytes = asked.pop("memory_bytes"), asked.pop("max_bytes")
        setup = Setup(**asked)
        if setup.argv is None:
            setup = dataclasses.replace(setup, address_space_bytes=self._own_bytes + memory_bytes)
        if setup.folder is not None:
            os.chdir(setup.folder)
        others = self._others if setup.argv is None else tasks_besides(self._layers)  # those fork, and need it exact
        own_processes = "pid" in self._layers.namespaces
        confine(setup, self._layers, rules, self._pid, signals=own_processes, others=others)
        candidate.write_all(CHANNEL, wire.frame(wire.READY))
        if setup.argv is not None:
            environment = {**os.environ, "TMPDIR": "."}
            os.set_inheritable(CHANNEL, False)
            os.execve(setup.argv[0], setup.argv, environment)
        values.limit_stacks(memory_bytes)
        order = wire.read_frame(lambda count: os.read(CHANNEL, count))
        if order is None:
            os._exit(0)
        kind, number, payload = order
        if kind == wire.PROGRAM:
            candidate.run_program(CHANNEL, wire.decode(payload))
        server = checker.Checker(CHANNEL, max_bytes) if kind == wire.CHECK else candidate.Candidate(CHANNEL, max_bytes)
        server.serve((kind, number, payload))
        os._exit(0)


def _freeze_and_kill() -> None:
    """Stop all descendants until two looks find nothing new, then kill them: killed one by one they would refork."""
    stopped: set[int] = set()
    quiet = 0
    while quiet < 2:
        new = set(_descendants(os.getpid())) - stopped
        quiet = 0 if new else quiet + 1
        for pid in new:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        stopped |= new
    for pid in stopped:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _descendants(pid: int) -> list[int]:
    """Numbers of all processes below one, as /proc shows them."""
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as children:
            below = [int(child) for child in children.read().split()]
    except OSError:
        return []  # it ended meanwhile
    return [number for child in below for number in (child, *_descendants(child))]
