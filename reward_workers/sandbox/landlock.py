"""Landlock: which files a confined process may open. See landlock(7).

Contract. Everything that the running kernel's version can handle is handled, so what is not granted here is denied:
files, TCP, signals and abstract unix sockets to the outside. Metadata (existence, size, times of a path) stays visible; the
seccomp filter has to refuse what Landlock does not know (chmod, UDP, ...).
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Iterable

from reward_workers.sandbox.kernel import PR_SET_NO_NEW_PRIVS, prctl, syscall

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
REMOVE_DIR, REMOVE_FILE, MAKE_DIR, MAKE_REG = 1 << 4, 1 << 5, 1 << 7, 1 << 8
REFER, TRUNCATE, IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
READ = READ_FILE | READ_DIR
WRITE = WRITE_FILE | REMOVE_DIR | REMOVE_FILE | MAKE_DIR | MAKE_REG | TRUNCATE
_OF_A_FILE = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV
_HANDLED = {1: (1 << 13) - 1, 2: REFER, 3: TRUNCATE, 5: IOCTL_DEV}  # file rights by the version that brought them
_NETWORK, _SCOPES = 3, 3  # TCP bind and connect (version 4); abstract sockets and signals (6)
_VERSION_FLAG, _PATH_BENEATH = 1, 1


def version() -> int:
    """The kernel's Landlock version. Raises OSError when there is none (not built, not enabled, filtered)."""
    return syscall("landlock_create_ruleset", None, 0, _VERSION_FLAG)


def ruleset(grants: Iterable[tuple[str, int]]) -> int:
    """A descriptor of rules that grant rights beneath paths; paths that don't exist are left out. Raises OSError."""
    known = version()
    handled = sum(rights for since, rights in _HANDLED.items() if known >= since)
    attributes = [handled, _NETWORK if known >= 4 else 0, _SCOPES if known >= 6 else 0]
    size = 24 if known >= 6 else 16 if known >= 4 else 8
    rules = syscall("landlock_create_ruleset", struct.pack("3Q", *attributes)[:size], size, 0)
    for path, rights in grants:
        try:
            at = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            allowed = rights & handled
            if not stat.S_ISDIR(os.fstat(at).st_mode):
                allowed &= _OF_A_FILE
            syscall("landlock_add_rule", rules, _PATH_BENEATH, struct.pack("=Qi", allowed, at), 0)
        finally:
            os.close(at)
    return rules


def restrict(rules: int) -> None:
    """Confine this thread and all it starts to the rules, for good. Raises OSError."""
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    syscall("landlock_restrict_self", rules, 0)
