"""A process gives up its rights, for good: what happens in a forked child before it touches a policy's program.

Contract. `Layers` says what this machine enforces, found out once by trying (`find_layers`). `confine` applies all of it or
raises: it never goes on with less than was announced. After it the process has limits it can't raise, a user of its
own where the parent is root, no capabilities (but for reading, where Python itself lies in a folder that only root
may enter), and is confined by Landlock and seccomp.
"""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from reward_workers.sandbox import landlock, seccomp
from reward_workers.sandbox.kernel import (
    CAP_DAC_OVERRIDE,
    CAP_DAC_READ_SEARCH,
    CLONE_NEWIPC,
    CLONE_NEWNET,
    CLONE_NEWPID,
    CLONE_NEWUSER,
    CLONE_NEWUTS,
    PR_SET_DUMPABLE,
    PR_SET_KEEPCAPS,
    PR_SET_NO_NEW_PRIVS,
    PR_SET_PDEATHSIG,
    prctl,
    set_capabilities,
    syscall,
)

# Users that no account has: a range that Debian keeps for packages to create on demand.
FIRST_UID, UIDS = 60100, 1000
STACK_BYTES = 64 << 20
MAX_PROCESSES, MAX_THREADS, MAX_FILES = 64, 256, 256  # threads: of Python code, which can't fork
_SYSTEM = ("/usr/lib", "/usr/lib64", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime", "/usr/share/zoneinfo")
_TOOLCHAIN = (  # of /usr what comes with the system: some keep their own work in it
    *(
        f"{root}/{part}"
        for root in ("/usr", "/usr/local")
        for part in ("bin", "lib", "lib64", "libexec", "include", "share")
    ),
    "/bin",
    "/lib",
    "/lib64",
    "/etc/ld.so.cache",
    "/etc/alternatives",
    "/etc/localtime",
    "/etc/ssl/openssl.cnf",
)
_DEVICES = {"/dev/null": landlock.READ | landlock.WRITE, "/dev/zero": landlock.READ, "/dev/urandom": landlock.READ}


@dataclass(frozen=True)
class Layers:
    """What is enforced here. `missing` says, for each layer that is not, why.

    `landlock` is the kernel's version (0: none); `namespaces` those that the zygote entered; `uid` the user of the
    programs where it is not the zygote's own; `capabilities` the bits that they keep.
    """

    landlock: int
    seccomp: bool
    namespaces: tuple[str, ...]
    uid: int | None
    capabilities: int
    missing: Mapping[str, str]


def enter_namespaces() -> tuple[tuple[str, ...], str]:
    """Leave the machine's process, network and IPC namespaces; what was left, and why not if nothing was.

    A process namespace begins with the next fork. Without the right to do it as it is, in a user namespace, which has to be
    mapped while this process is still dumpable.
    """
    for user in (False, True):
        problem = _tried(lambda user=user: _leave(user))  # type: ignore[misc]  # half-way there is no way back
        if not problem:
            _leave(user)
            return (*(("user",) if user else ()), "pid", "net", "ipc", "uts"), ""
    return (), problem


def _leave(user: bool) -> None:
    uid, gid = os.getuid(), os.getgid()
    flags = CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS | (CLONE_NEWUSER if user else 0)
    syscall("unshare", flags)
    if user:
        for file, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{file}", "w") as target:
                target.write(text)


def find_layers(libraries: Sequence[str], namespaces: tuple[str, ...], why_none: str, slot: int) -> Layers:
    """Try every layer, in forked children that are thrown away. `slot` picks the user of the programs."""
    missing = {} if namespaces else {"namespaces": why_none}
    version = 0
    try:
        version = landlock.version()
    except OSError as error:
        missing["landlock"] = f"{error} (kernel {os.uname().release})"
    if problem := _tried(seccomp.install):
        missing["seccomp"] = problem
    if os.getuid() != 0:
        return Layers(version, "seccomp" not in missing, namespaces, None, 0, missing)
    uid = FIRST_UID + slot % UIDS
    for capabilities in (0, 1 << CAP_DAC_READ_SEARCH, 1 << CAP_DAC_OVERRIDE):
        problem = _tried(lambda kept=capabilities: _read_as(uid, kept, libraries))  # type: ignore[misc]
        if not problem:
            return Layers(version, "seccomp" not in missing, namespaces, uid, capabilities, missing)
    missing["own user"] = problem
    return Layers(version, "seccomp" not in missing, namespaces, None, 0, missing)


def _tried(action: Callable[[], None]) -> str:
    """What a forked child that does this complains of; empty if it succeeds."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            action()
            os._exit(0)
        except BaseException as error:  # noqa: BLE001  a child must not return
            os.write(write, str(error).encode()[:500] or b"failed")
        finally:
            os._exit(1)
    os.close(write)
    with open(read, "rb") as pipe:
        said = pipe.read().decode()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return said if said or status == 0 else f"a child that tried it ended with status {status}"


def _become(uid: int | None, capabilities: int) -> None:
    if uid is not None:
        prctl(PR_SET_KEEPCAPS, 1)
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    set_capabilities(capabilities)


def _read_as(uid: int, capabilities: int, libraries: Sequence[str]) -> None:
    _become(uid, capabilities)
    for path in libraries:
        if not os.listdir(path):
            raise PermissionError(f"user {uid} can't read {path}")


@dataclass(frozen=True)
class Setup:
    """What one process may use. `argv` is None for Python code in this process, else a program to be executed.

    `address_space_bytes` and `data_bytes`: 0 is no limit; the second counts what is writable, for runtimes that reserve far
    more than they use. `folder` is where a program runs and what it may read and execute besides the system's;
    `writable`: it may write there.
    """

    address_space_bytes: int
    cpu_s: int
    file_bytes: int
    data_bytes: int = 0
    argv: tuple[str, ...] | None = None
    folder: str | None = None
    writable: bool = False


def base_rules(libraries: Sequence[str]) -> int:
    """The Landlock rules of Python code, made once: forked children inherit the descriptor."""
    return landlock.ruleset([*((path, landlock.READ) for path in (*libraries, *_SYSTEM)), *_DEVICES.items()])


def confine(setup: Setup, layers: Layers, rules: int | None, parent: int, signals: bool, others: int) -> None:
    """Apply everything to this process, which `parent` forked. `signals`: programs may signal what they can see.
    `others`: threads that its user has besides (see `tasks_besides`).

    Raises OSError when a layer that was found can't be applied.
    """
    limits: dict[int, tuple[int, int]] = {
        resource.RLIMIT_CORE: (0, 0),
        resource.RLIMIT_CPU: (setup.cpu_s, setup.cpu_s + 1),
        resource.RLIMIT_FSIZE: (setup.file_bytes, setup.file_bytes),
        resource.RLIMIT_NOFILE: (MAX_FILES, MAX_FILES),
        resource.RLIMIT_MEMLOCK: (0, 0),
        resource.RLIMIT_MSGQUEUE: (0, 0),
    }
    if setup.address_space_bytes:
        limits[resource.RLIMIT_AS] = (setup.address_space_bytes, setup.address_space_bytes)
    processes = others + (MAX_THREADS if setup.argv is None else MAX_PROCESSES)
    limits[resource.RLIMIT_NPROC] = (processes, processes)
    if setup.data_bytes:
        limits[resource.RLIMIT_DATA] = (setup.data_bytes, setup.data_bytes)
    for which, (soft, hard) in limits.items():
        most = resource.getrlimit(which)[1]
        if most != resource.RLIM_INFINITY:
            soft, hard = min(soft, most), min(hard, most)
        resource.setrlimit(which, (soft, hard))
    most = resource.getrlimit(resource.RLIMIT_STACK)[1]  # its hard limit stays: programs that recurse raise their own
    resource.setrlimit(resource.RLIMIT_STACK, (STACK_BYTES if most < 0 else min(STACK_BYTES, most), most))
    if setup.argv is not None and layers.landlock:
        rules = _program_rules(setup)
    _become(layers.uid, layers.capabilities)
    prctl(PR_SET_DUMPABLE, 0)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # after the change of user, which clears it
    if os.getppid() != parent:
        raise OSError("the zygote died")
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    if rules is not None:
        landlock.restrict(rules)
        os.close(rules)
    if layers.seccomp:
        programs = setup.argv is not None
        seccomp.install(programs=programs, signals=programs and signals)


def _program_rules(setup: Setup) -> int:
    grants = [(path, landlock.READ | landlock.EXECUTE) for path in _TOOLCHAIN]
    if setup.folder is not None:
        rights = landlock.READ | landlock.EXECUTE | (landlock.WRITE if setup.writable else 0)
        grants.append((setup.folder, rights))
    devices = ["/dev/null"] if setup.writable else list(_DEVICES)  # a compiler would read others without end
    grants += [(path, _DEVICES[path]) for path in devices]
    return landlock.ruleset(grants)


def tasks_besides(layers: Layers) -> int:
    """Threads that the user of the programs has now, as far as /proc shows them: limits count them, on the whole machine.

    0 where the programs have a user of their own.
    """
    if layers.uid is not None or "user" in layers.namespaces:
        return 0
    uid = os.getuid()
    count = 0
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                if entry.stat().st_uid == uid:
                    count += len(os.listdir(f"{entry.path}/task"))
            except OSError:
                continue  # it ended meanwhile
    return count
