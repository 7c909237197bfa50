"""The filter of system calls: an allow-list, as a classic BPF program.

Contract. What is not listed fails with EPERM. Another architecture's calls (32-bit, x32) kill the process. `clone3`
fails with ENOSYS, because its flags lie in memory where a filter can't see them; C libraries then use `clone`. There
is no socket, no exec, no fork, no signal to another process, no shared memory that outlives its owner, no change of
files but through descriptors that Landlock let it open.

Two profiles: `strict` for Python code in a forked interpreter, and `programs` for compilers and programs of other
languages, which may fork, execute and, where they have a process namespace of their own, signal.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import struct

from reward_workers.sandbox.kernel import (
    PR_SET_NAME,
    PR_SET_NO_NEW_PRIVS,
    SYSCALLS,
    prctl,
    syscall,
)

_AUDIT_ARCH_X86_64 = 0xC000003E
_X32_BIT = 0x40000000
_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_ANY_BIT, _AND, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER, _ARCH = 0, 4  # offsets in struct seccomp_data
_OWN_PID = 0xFFFFFFFF  # stands for the process's own number until `install`
_SET_MODE_FILTER = 1

_CLONE_THREAD = 0x00010000
_CLONE_FORBIDDEN = 0x7E028000  # every new namespace, and CLONE_PARENT
_AF_UNIX, _SOCK_STREAM, _SOCK_TYPE_MASK = 1, 1, 0xF
_PR_GET_NAME, _PR_SET_VMA = 16, 0x53564D41
_IOCTLS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # TCGETS TIOCGWINSZ FIONREAD FIONBIO FIONCLEX FIOCLEX
# DUPFD GETFD SETFD GETFL SETFL DUPFD_CLOEXEC GETPIPE_SZ GET_SEALS; no owner, signal, lease, notify, pipe size
_FCNTLS = (0, 1, 2, 3, 4, 1030, 1032, 1034)

_COMMON = """
    read write futex mmap munmap brk mprotect mremap madvise poll close fstat lseek rt_sigprocmask rt_sigaction
    rt_sigreturn clock_gettime gettimeofday openat open stat lstat newfstatat statx access faccessat faccessat2
    readlink readlinkat getdents getdents64 getcwd chdir fchdir pread64 pwrite64 readv writev preadv pwritev ftruncate
    fsync fdatasync fadvise64 umask pipe pipe2 dup dup2 dup3 select pselect6 ppoll epoll_create epoll_create1
    epoll_ctl epoll_wait epoll_pwait eventfd2 sendto recvfrom shutdown getsockname getpeername getsockopt close_range
    sched_yield msync mincore pause nanosleep clock_nanosleep clock_getres time times getitimer setitimer alarm
    getpid gettid getppid getpgrp getpgid getsid getuid geteuid getgid getegid getgroups getresuid getresgid capget
    getrlimit getrusage getpriority sysinfo uname getcpu sched_getaffinity sched_getparam sched_getscheduler
    sched_get_priority_max sched_get_priority_min rt_sigpending rt_sigtimedwait rt_sigsuspend sigaltstack arch_prctl
    set_tid_address set_robust_list get_robust_list restart_syscall membarrier rseq getrandom wait4 waitid exit
    exit_group
"""
_PROGRAMS = """
    fork vfork execve setpgid setsid rename renameat renameat2 mkdir mkdirat rmdir unlink unlinkat timerfd_create
    timerfd_settime timerfd_gettime sendfile copy_file_range
"""

Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, constant


def _statement(code: int, constant: int) -> Instruction:
    return (code, 0, 0, constant)


def _argument(index: int) -> Instruction:
    """Load the low half of an argument: those that are checked here are ints to the kernel."""
    return _statement(_LOAD, 16 + 8 * index)


_GRANT, _REFUSE = _statement(_RETURN, _ALLOW), _statement(_RETURN, _ERRNO | errno.EPERM)


def _one_of(index: int, values: tuple[int, ...]) -> list[Instruction]:
    """Allow if the argument is one of the values."""
    body = [_argument(index)]
    for value in values:
        body += [(_JUMP_EQUAL, 0, 1, value), _GRANT]
    return [*body, _REFUSE]


def _clone(*, threads_only: bool) -> list[Instruction]:
    body = [_argument(0), (_JUMP_ANY_BIT, 0, 1, _CLONE_FORBIDDEN), _REFUSE]
    if threads_only:
        body += [(_JUMP_ANY_BIT, 1, 0, _CLONE_THREAD), _REFUSE]
    return [*body, _GRANT]


def _rules(programs: bool, signals: bool) -> dict[str, list[Instruction]]:
    """The calls whose arguments decide. `signals`: any process may be signalled."""
    own = [_GRANT] if signals else _one_of(0, (_OWN_PID,))
    return {
        "clone": _clone(threads_only=not programs),
        "clone3": [_statement(_RETURN, _ERRNO | errno.ENOSYS)],
        "kill": own,
        "tgkill": own,
        "prlimit64": _one_of(0, (0, _OWN_PID)),
        "ioctl": _one_of(1, _IOCTLS),
        "fcntl": _one_of(1, _FCNTLS),
        "prctl": _one_of(0, (PR_SET_NAME, _PR_GET_NAME, _PR_SET_VMA)),
        "socketpair": [
            *(_argument(0), (_JUMP_EQUAL, 1, 0, _AF_UNIX), _REFUSE),
            *(_argument(1), _statement(_AND, _SOCK_TYPE_MASK), (_JUMP_EQUAL, 1, 0, _SOCK_STREAM), _REFUSE),
            _GRANT,
        ],
    }


def build(*, programs: bool = False, signals: bool = False) -> list[Instruction]:
    """The filter of one of the profiles; the process's own number is filled in by `install`.

    It searches by halves: the kernel tries a new filter with every call there is, which is what installing it costs.
    """
    allowed = f"{_COMMON} {_PROGRAMS if programs else ''}"
    bodies = {SYSCALLS[name]: [_GRANT] for name in allowed.split()}
    bodies |= {SYSCALLS[name]: body for name, body in _rules(programs, signals).items()}
    ranges: list[tuple[int, list[Instruction]]] = []  # the first number of each, and what is done from there on
    for number in range(max(bodies) + 2):
        body = bodies.get(number, [_REFUSE])
        if not ranges or ranges[-1][1] != body:
            ranges.append((number, body))
    return [
        _statement(_LOAD, _ARCH),
        (_JUMP_EQUAL, 1, 0, _AUDIT_ARCH_X86_64),
        _statement(_RETURN, _KILL),
        _statement(_LOAD, _NUMBER),
        (_JUMP_AT_LEAST, 0, 1, _X32_BIT),
        _statement(_RETURN, _KILL),
        *_search(ranges),
    ]


def _search(ranges: list[tuple[int, list[Instruction]]]) -> list[Instruction]:
    if len(ranges) == 1:
        return ranges[0][1]
    middle = len(ranges) // 2
    below, from_there = _search(ranges[:middle]), _search(ranges[middle:])
    return [(_JUMP_AT_LEAST, len(below), 0, ranges[middle][0]), *below, *from_there]


@functools.cache
def compiled(*, programs: bool = False, signals: bool = False) -> tuple[bytes, tuple[int, ...]]:
    """A profile's filter in the kernel's form, and where the process's own number belongs in it."""
    instructions = build(programs=programs, signals=signals)
    places = [8 * index + 4 for index, instruction in enumerate(instructions) if instruction[3] == _OWN_PID]
    return b"".join(struct.pack("HBBI", *instruction) for instruction in instructions), tuple(places)


def install(*, programs: bool = False, signals: bool = False) -> None:
    """Put the filter on this thread and all it starts, for good. Raises OSError."""
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    code, places = compiled(programs=programs, signals=signals)
    buffer = ctypes.create_string_buffer(code, len(code))
    for place in places:
        struct.pack_into("I", buffer, place, os.getpid())
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(code) // 8, ctypes.addressof(buffer)), 16)
    syscall("seccomp", _SET_MODE_FILTER, 0, program)
