"""What this machine's sandbox enforces, found out by trying, and a level to name it by.

    1  limits       a session of its own, no inherited files or environment, resource limits, killed from outside
    2  confined     1, and Landlock, the seccomp filter and no new privileges, and every probe below was denied
    3  separated    2, and a user or a process and network namespace of its own

A level is never concluded from version numbers: a confined process tries what it must not be able to do, in the way a
program would, and reports what it could. What succeeds is named.
"""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from reward_workers.sandbox import wire
from reward_workers.sandbox.host import Zygote
from reward_workers.sandbox.session import Ended, Limits, SandboxError

DEFAULT_MIN_LEVEL = 2
LEVELS = {1: "limits", 2: "confined", 3: "separated"}
PROBE_TIMEOUT_S = 60.0

# Each attempt returns if it succeeded, and raises if it was denied.
PROBE = """
import ctypes, os, signal, socket

libc = ctypes.CDLL(None, use_errno=True)

def call(name, *arguments):
    if getattr(libc, name)(*arguments) < 0:
        raise OSError(ctypes.get_errno(), name)

def datagram(path):
    socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendto(b"x", path)

def own(path):
    import fcntl
    read, _ = os.pipe()
    fcntl.fcntl(read, 8, os.getppid())

def probe(secret):
    attempts = {
        "read a file of the host": lambda: open(secret).read(),
        "write next to it": lambda: open(secret + ".new", "w"),
        "write to the temporary folder": lambda: open("/tmp/sandbox-probe", "w"),
        "list the root folder": lambda: os.listdir("/"),
        "change the mode of a file": lambda: os.chmod(secret, 0o600),
        "truncate a file": lambda: os.truncate(secret, 0),
        "read the host's environment": lambda: open(f"/proc/{os.getppid()}/environ").read(),
        "start a process": lambda: os.fork() or os._exit(0),
        "execute a program": lambda: os.execv("/bin/true", ["true"]),
        "open a TCP socket": lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM),
        "open a UDP socket": lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM),
        "send to a unix socket": lambda: datagram(secret),
        "signal its parent": lambda: os.kill(os.getppid(), 0),
        "have signals sent to its parent": lambda: own(secret),
        "enter new namespaces": lambda: call("unshare", 0x10000000),
        "make shared memory": lambda: call("shmget", 0, 4096, 0o1600),
        "make memory files": lambda: os.memfd_create("probe"),
        "trace a process": lambda: call("ptrace", 16, os.getppid(), 0, 0),
        "raise its limits": lambda: __import__("resource").setrlimit(7, (1 << 20, 1 << 20)),
        "allocate without limit": lambda: bytearray(1 << 34),
    }
    could = []
    for name, attempt in attempts.items():
        try:
            attempt()
        except (OSError, ValueError, MemoryError):
            continue
        could.append(name)
    return could
"""


class SandboxUnavailable(SandboxError, ValueError):
    """This machine's sandbox is weaker than what was asked for; the message names what is missing."""


@dataclass(frozen=True)
class Capabilities:
    """The level that is reached here, and what each higher one lacks."""

    level: int
    missing: dict[int, tuple[str, ...]]
    layers: str

    def require(self, level: int) -> None:
        """Raises SandboxUnavailable below a level."""
        if level > self.level:
            lacks = [text for wanted in range(self.level + 1, level + 1) for text in self.missing.get(wanted, ())]
            raise SandboxUnavailable(
                f"the sandbox reaches level {self.level} ({LEVELS[self.level]}) on this machine, min_level is {level} "
                f"({LEVELS[level]}); missing: {'; '.join(lacks)}"
            )


def probe(zygote: Zygote) -> Capabilities:
    """Try everything. Raises SandboxError when not even that can be done."""
    layers = zygote.layers
    denied = [f"{name}: {layers.missing[name]}" for name in ("landlock", "seccomp") if name in layers.missing]
    denied += [f"a confined process can {what}" for what in _possible(zygote)]
    separated = []
    if layers.uid is None and "pid" not in layers.namespaces:
        separated = [f"{name}: {why}" for name, why in layers.missing.items() if name in ("namespaces", "own user")]
        separated = separated or ["a user of its own: the host is not root"]
    missing = {2: tuple(denied), 3: tuple(separated)}
    level = 1 if denied else 2 if separated else 3
    text = f"landlock {layers.landlock}, seccomp {layers.seccomp}, namespaces {'+'.join(layers.namespaces) or 'none'}"
    return Capabilities(level, missing, f"{text}, user {'its own' if layers.uid is not None else 'of the host'}")


def _possible(zygote: Zygote) -> list[str]:
    limits = Limits(cpu_s=PROBE_TIMEOUT_S)
    with tempfile.TemporaryDirectory() as folder:
        secret = Path(folder) / "secret"
        secret.write_text("secret")
        os.chmod(folder, 0o755)
        os.chmod(secret, 0o644)  # as open as a file can be: what keeps it is the sandbox
        session = zygote.spawn(limits.setup(), limits, time.monotonic() + PROBE_TIMEOUT_S)
        try:
            session.ask(wire.LOAD, wire.encode(PROBE))
            kind, _, payload = session.ask(wire.CALL, wire.encode((None, "probe", [str(secret)], {}, False)))
        except Ended as ended:
            raise SandboxError(f"the probes of the sandbox did not end: {ended}") from ended
        finally:
            session.close()
        if kind != wire.VALUE:
            raise SandboxError(f"the probes of the sandbox failed: {payload!r}")
        could: list[str] = wire.decode(payload)[0]
    return could
