"""System calls that Python does not wrap, for Linux on x86-64.

Failing calls raise OSError with the name of the call. Elsewhere than on x86-64 Linux the numbers don't hold, and
`SUPPORTED` is False.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys
import time
from collections.abc import Iterator

SUPPORTED = sys.platform == "linux" and platform.machine() == "x86_64"

# From the kernel's x86-64 table, which never changes.
SYSCALLS = {
    **{"read": 0, "write": 1, "open": 2, "close": 3, "stat": 4, "fstat": 5, "lstat": 6, "poll": 7, "lseek": 8},
    **{"mmap": 9, "mprotect": 10, "munmap": 11, "brk": 12, "rt_sigaction": 13, "rt_sigprocmask": 14},
    **{"rt_sigreturn": 15, "ioctl": 16, "pread64": 17, "pwrite64": 18, "readv": 19, "writev": 20, "access": 21},
    **{"pipe": 22, "select": 23, "sched_yield": 24, "mremap": 25, "msync": 26, "mincore": 27, "madvise": 28},
    **{"dup": 32, "dup2": 33, "pause": 34, "nanosleep": 35, "getitimer": 36, "alarm": 37, "setitimer": 38},
    **{"getpid": 39, "sendfile": 40, "sendto": 44, "recvfrom": 45, "shutdown": 48, "getsockname": 51},
    **{"getpeername": 52, "socketpair": 53, "getsockopt": 55, "clone": 56, "fork": 57, "vfork": 58, "execve": 59},
    **{"exit": 60, "wait4": 61, "kill": 62, "uname": 63, "fcntl": 72, "fsync": 74, "fdatasync": 75, "ftruncate": 77},
    **{"getdents": 78, "getcwd": 79, "chdir": 80, "fchdir": 81, "rename": 82, "mkdir": 83, "rmdir": 84},
    **{"unlink": 87, "readlink": 89, "umask": 95, "gettimeofday": 96, "getrlimit": 97, "getrusage": 98},
    **{"sysinfo": 99, "times": 100, "getuid": 102, "getgid": 104, "geteuid": 107, "getegid": 108, "setpgid": 109},
    **{"getppid": 110, "getpgrp": 111, "setsid": 112, "getgroups": 115, "getresuid": 118, "getresgid": 120},
    **{"getpgid": 121, "getsid": 124, "capget": 125, "capset": 126, "rt_sigpending": 127, "rt_sigtimedwait": 128},
    **{"rt_sigsuspend": 130, "sigaltstack": 131, "getpriority": 140, "sched_getparam": 143},
    **{"sched_getscheduler": 145, "sched_get_priority_max": 146, "sched_get_priority_min": 147, "prctl": 157},
    **{"arch_prctl": 158, "gettid": 186, "time": 201, "futex": 202, "sched_getaffinity": 204, "epoll_create": 213},
    **{"getdents64": 217, "set_tid_address": 218, "restart_syscall": 219, "fadvise64": 221, "clock_gettime": 228},
    **{"clock_getres": 229, "clock_nanosleep": 230, "exit_group": 231, "epoll_wait": 232, "epoll_ctl": 233},
    **{"tgkill": 234, "waitid": 247, "openat": 257, "mkdirat": 258, "newfstatat": 262, "unlinkat": 263},
    **{"renameat": 264, "readlinkat": 267, "faccessat": 269, "pselect6": 270, "ppoll": 271, "unshare": 272},
    **{"set_robust_list": 273, "get_robust_list": 274, "epoll_pwait": 281, "timerfd_create": 283},
    **{"timerfd_settime": 286, "timerfd_gettime": 287, "eventfd2": 290, "epoll_create1": 291, "dup3": 292},
    **{"pipe2": 293, "preadv": 295, "pwritev": 296, "prlimit64": 302, "getcpu": 309, "renameat2": 316},
    **{"seccomp": 317, "getrandom": 318, "membarrier": 324, "copy_file_range": 326, "statx": 332, "rseq": 334},
    **{"clone3": 435, "close_range": 436, "faccessat2": 439, "landlock_create_ruleset": 444},
    **{"landlock_add_rule": 445, "landlock_restrict_self": 446},
}

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_KEEPCAPS = 8
PR_SET_NAME = 15
PR_SET_NO_NEW_PRIVS = 38
PR_SET_CHILD_SUBREAPER = 36
CLONE_NEWIPC, CLONE_NEWUTS = 0x08000000, 0x04000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH = 1, 2
_CAPABILITY_VERSION_3 = 0x20080522

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def syscall(name: str, *arguments: int | bytes | ctypes.Array[ctypes.c_char] | None) -> int:
    """Integers travel as 64 bits, bytes and buffers by address. Raises OSError."""
    converted = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    result: int = _libc.syscall(ctypes.c_long(SYSCALLS[name]), *converted)
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")
    return result


def prctl(option: int, value: int = 0) -> None:
    syscall("prctl", option, value, 0, 0, 0)


def set_capabilities(bits: int) -> None:
    """Make these the permitted and effective capabilities, and none inheritable."""
    low, high = bits & 0xFFFFFFFF, bits >> 32
    data = ctypes.create_string_buffer(struct.pack("6I", low, low, 0, high, high, 0), 24)
    syscall("capset", struct.pack("Ii", _CAPABILITY_VERSION_3, 0), data)


def run_delay_seconds(pid: int) -> float:
    """How long a process's first thread was ready to run and got no CPU; 0 where the kernel does not say. OSError if gone."""
    try:
        with open(f"/proc/{pid}/schedstat", encoding="ascii") as file:
            return int(file.read().split()[1]) / 1e9
    except FileNotFoundError:
        if not os.path.exists(f"/proc/{pid}"):
            raise
        return 0.0


def cpu_seconds(pid: int) -> float:
    """CPU time of all threads of a process so far. Raises OSError when it is gone."""
    return time.clock_gettime((~pid << 3) | 2)  # CPUCLOCK_SCHED of that process, see clock_getcpuclockid(3)


def pid_of(pidfd: int) -> int:
    """The process number behind a pidfd, as seen from here. Raises OSError once it was reaped, and without /proc."""
    with open(f"/proc/self/fdinfo/{pidfd}") as info:
        pid = next(int(line.split()[1]) for line in info if line.startswith("Pid:"))
    if pid <= 0:
        raise ProcessLookupError("the process was reaped")
    return pid


def _oom_kills() -> int:
    try:
        with open("/proc/vmstat") as counters:
            return int(counters.read().partition("\noom_kill ")[2].partition("\n")[0] or 0)
    except OSError:
        return 0


_oom_kills_seen = _oom_kills()


def ran_out_of_memory() -> bool:
    """Whether the kernel has killed a process of this machine for want of memory since this was asked last."""
    global _oom_kills_seen
    before, _oom_kills_seen = _oom_kills_seen, _oom_kills()
    return _oom_kills_seen > before


def siblings_memory_bytes(pid: int) -> int:
    """Memory that a process, all others below its parent included, has to itself or shares without a file.

    Raises OSError when it is gone.
    """
    with open(f"/proc/{pid}/stat") as state:
        parent = int(state.read().rpartition(")")[2].split()[1])
    return sum(map(_memory_bytes, _below(parent)))


def _below(pid: int) -> Iterator[int]:
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children") as children:
                for child in map(int, children.read().split()):
                    yield child
                    yield from _below(child)
    except OSError:
        return  # it ended meanwhile


def _memory_bytes(pid: int) -> int:
    """By its share of what it shares with its forks, where this process may look, else as if it shared nothing."""
    for file, names in (("smaps_rollup", ("Pss_Anon:", "Pss_Shmem:")), ("status", ("RssAnon:", "RssShmem:"))):
        try:
            with open(f"/proc/{pid}/{file}") as sizes:
                lines = (line.split() for line in sizes)
                return sum(int(line[1]) << 10 for line in lines if line[0] in names)
        except OSError:
            continue
    return 0
