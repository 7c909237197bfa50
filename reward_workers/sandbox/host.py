"""Starting zygotes (`reward_workers.sandbox.zygote`), and having them fork confined processes."""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from reward_workers.sandbox import kernel, wire
from reward_workers.sandbox.confine import UIDS, Layers
from reward_workers.sandbox.session import Limits, SandboxError, Session

START_TIMEOUT_S = 60.0  # for a zygote to be up
CONTROL_TIMEOUT_S = 20.0  # for an answer of the zygote
MAX_CONTROL_BYTES = 65536
BOOT = "import sys, json; sys.path[:] = json.loads(sys.argv[1]); from reward_workers.sandbox.zygote import main; main()"
_ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "HOME": "/",
    "MALLOC_ARENA_MAX": "2",  # each arena reserves 64 MB of the address space that is limited
    "OMP_NUM_THREADS": "1",  # a fork must not inherit half of a thread pool
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",  # one program, one verdict
    "PYTHONINTMAXSTRDIGITS": "0",
    "PYTHONUTF8": "1",
}


def _claimed(slot: int) -> tuple[socket.socket | None, int]:
    """The first slot from this one on that no other zygote of the machine has, and what holds it while it is open.

    Slots become users, and the kernel counts a user's threads on the whole machine: of two zygotes with one user, the
    programs of one could use up what those of the other may have.
    """
    for number in range(slot, slot + UIDS):
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0headway-sandbox-{number % UIDS}")
        except OSError as error:
            claim.close()
            if error.errno != errno.EADDRINUSE:
                break
        else:
            return claim, number
    return None, slot


class Zygote:
    """A running zygote. Not thread-safe: one grading at a time.

    `namespaces=False` leaves that layer out. Raises SandboxError when it can't be started.
    """

    def __init__(self, *, preload: Sequence[str] = (), namespaces: bool = True, slot: int = 0) -> None:
        if not kernel.SUPPORTED:
            raise SandboxError("the sandbox needs Linux on x86-64")
        standard = sysconfig.get_path("stdlib")
        # Programs may import what is installed for this process, and nothing else that it could import.
        installed = [entry for entry in sys.path if Path(entry).name in ("site-packages", "dist-packages")]
        path = [standard, f"{standard}/lib-dynload", *dict.fromkeys(installed)]
        self._claim, slot = _claimed(slot)
        options = {
            "libraries": [folder for folder in path if Path(folder).is_dir()],
            "path": path,
            "preload": list(preload),
            "namespaces": namespaces,
            "slot": slot,
        }
        root = str(Path(__file__).resolve().parents[2])
        boot_path = json.dumps([root, *path])
        environment = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
        self.spawned = 0
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._line.settimeout(START_TIMEOUT_S)
        with theirs:
            arguments = [boot_path, str(theirs.fileno()), str(os.getpid()), json.dumps(options)]
            # In a session of its own: whoever kills this process's group leaves the zygote to clean up.
            self._process = subprocess.Popen(
                [sys.executable, "-S", "-s", "-P", "-B", "-c", BOOT, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env={**environment, **_ENVIRONMENT},
                cwd="/",
            )
        try:
            facts, _ = self._receive()
        except SandboxError as error:
            said = self._last_words()
            raise SandboxError(f"the zygote did not start: {said or error}") from error
        self.layers = Layers(**facts)
        self._line.settimeout(CONTROL_TIMEOUT_S)

    @property
    def pid(self) -> int:
        return self._process.pid

    def spawn(self, setup: bytes, limits: Limits, deadline: float, stdin: int | None = None) -> Session:
        """A confined process that reads `stdin` (a descriptor; None: nothing), ready to be asked.

        `deadline`, a time of the monotonic clock, ends whatever is asked of it. Raises SandboxError.
        """
        self.spawned += 1
        channel, theirs = socket.socketpair()
        out_read, out_write = os.pipe2(os.O_CLOEXEC)
        err_read, err_write = os.pipe2(os.O_CLOEXEC)
        nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        for pipe in (out_write, err_write):
            os.fchmod(pipe, 0o666)  # for programs that open /dev/stdout as a user of their own
        given = [nothing if stdin is None else stdin, out_write, err_write, theirs.fileno()]
        try:
            socket.send_fds(self._line, [wire.encode((b"spawn", 0, False))], given)
            (pid, problem), descriptors = self._receive()
            if not pid:
                raise SandboxError(f"the zygote can't fork: {problem}")
        except BaseException as error:
            channel.close()
            os.close(out_read)
            os.close(err_read)
            if isinstance(error, OSError):
                raise SandboxError(f"the zygote was lost: {error}") from error
            raise
        finally:
            theirs.close()
            for descriptor in (out_write, err_write, nothing):
                os.close(descriptor)
        session = Session(self.reap, pid, descriptors[0], channel, out_read, err_read, limits, deadline)
        try:
            session.start(setup)
        except BaseException:
            session.close()
            raise
        return session

    def reap(self, pid: int, programs: bool) -> int:
        """The exit status of a child that has ended. Raises SandboxError."""
        try:
            self._line.send(wire.encode((b"reap", pid, programs)))
        except OSError as error:
            raise SandboxError(f"the zygote was lost: {error}") from error
        (status, _), _ = self._receive()
        return int(status)

    def _receive(self) -> tuple[Any, list[int]]:
        try:
            message, descriptors, _, _ = socket.recv_fds(self._line, MAX_CONTROL_BYTES, 1)
        except OSError as error:
            raise SandboxError(f"the zygote does not answer: {error}") from error
        if not message:
            raise SandboxError("the zygote is gone")
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
        return wire.decode(message, build=True), descriptors

    def _last_words(self) -> str:
        """What a zygote that did not start complained of. It is gone then."""
        self._line.close()
        self._end()
        assert self._process.stderr is not None
        with self._process.stderr as complaints:
            return complaints.read().decode(errors="replace").strip()[-1000:]

    def close(self) -> None:
        """End it, and with it all its children."""
        self.abandon()
        self._end()

    def _end(self) -> None:
        try:
            self._process.wait(CONTROL_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def abandon(self) -> None:
        """Let go of the descriptors. It ends by that, unless this is a forked copy of its host."""
        self._line.close()
        if self._claim is not None:
            self._claim.close()
        if self._process.stderr is not None:
            self._process.stderr.close()
