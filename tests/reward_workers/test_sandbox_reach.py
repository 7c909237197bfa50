"""What a hostile program would reach for: the kernel, files, memory, time, and the time of the process that judges it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from reward_workers import code
from reward_workers.code import grade_code
from reward_workers.code_extraction import extract_code
from reward_workers.sandbox.pool import Pool
from rollout_workers.trajectory import RewardResult, Status

pytestmark = pytest.mark.thorough

SQUARE = "def solve(n): return n * n"
SQUARES = {"kind": "function", "entry_point": "solve", "cases": [{"args": [3], "expected": 9}]}
SCRIPT = {"kind": "stdio", "cases": [{"stdin": "3\n", "expected_stdout": "9\n"}]}


@pytest.fixture(scope="module", params=["namespaces", "no namespaces"], autouse=True)
def pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
    pool = Pool(namespaces=request.param == "namespaces")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(code, "POOL", pool)
        yield pool
    pool.close()


def grade(program: str, tests: dict[str, Any], **options: Any) -> RewardResult:
    """A verdict, after which an honest program passes."""
    result = grade_code(program, tests, **{"timeout_s": 2.0, **options})
    assert result.status is Status.SCORED, result
    assert grade_code(SQUARE, SQUARES).value == 1
    return result


# Calls of the kernel that must fail: their names, numbers and arguments.
SYSCALLS = """
fork 57; vfork 58; clone 56,17,0,0,0,0; clone3 435,B,88; execve 59,b'/bin/true',0,0
execveat 322,-100,b'/bin/true',0,0,0; ptrace 101,0,0,0,0; io_uring 425,4,B; userfaultfd 323,0; bpf 321,5,0,0
perf 298,0,0,0,0,0; keyctl 250,1,0; add_key 248,b'user',b'a',b'b',1,-3; unshare 272,0x200; setns 308,3,0
chroot 161,b'/'; pivot_root 155,b'/',b'/'; mount 165,b'a',b'/',b'tmpfs',0,0; open_tree 428,-100,b'/',1
fsopen 430,b'tmpfs',0; socket 41,2,1,0; unix 41,1,1,0; netlink 41,16,3,0; vsock 41,40,1,0; alg 41,38,5,0
connect 42,3,0,0; bind 49,3,0,0; sendmsg 46,3,0,0; recvmsg 47,3,0,0; setsockopt 54,3,1,2,0,4; inotify 294,0
fanotify 300,0,0; memfd 319,b'a',0; memfd_secret 447,0; shmget 29,0,4096,0o1600; msgget 68,0,0o1600
semget 64,0,1,0o1600; mq_open 240,b'q',0o102,0o600,0; timer_create 222,0,0,B; setresuid 117,0,0,0; setgroups 116,0,0
chmod 90,b'/tmp',0o777; chown 92,b'/tmp',0,0; symlink 88,b'/a',b'/tmp/evil'; link 86,b'/a',b'/tmp/evil'
mknod 133,b'/tmp/evil',0o10600,0; mkdir 83,b'/tmp/evil',0o777; rename 82,b'/tmp/a',b'/tmp/b'
unlink 87,b'/tmp/nothing'; utime 132,b'/tmp',0; truncate 76,b'/etc/passwd',0; setxattr 188,b'/tmp',b'user.a',b'b',1,0
setpriority 141,0,1,0; sched_setaffinity 203,1,8,B; ioprio 251,1,1,0; kill_all 62,-1,0; kill_group 62,0,0
tkill 200,1,0; tgkill 234,1,1,0; sigqueue 129,1,0,B; pidfd_open 434,1,0; pidfd_getfd 438,0,0,0
pidfd_signal 424,0,9,0,0; process_madvise 440,0,0,0,0,0; kcmp 312,1,1,0,0,0; personality 135,0x40000
modify_ldt 154,0,0,0; iopl 172,3; syslog 103,3,B,100; quotactl 179,0,0,0,0; name_to_handle 303,-100,b'/',0,0,0
open_by_handle 304,3,0,0; splice 275,0,0,1,0,1,0; dumpable 157,4,1,0,0,0; pdeathsig 157,1,0,0,0,0
subreaper 157,36,1,0,0,0; ptracer 157,0x59616d61,-1,0,0,0; seccomp 317,0,0,0; landlock 444,0,0,1
prlimit 302,os.getppid(),7,0,B; fallocate 285,1,0,0,1<<30; creat 85,b'/tmp/evil',0o600; lease 72,1,1024,1
pipe_size 72,1,1031,1<<20; notify 72,0,1026,1; owner 72,1,8,1; owner_ex 72,1,15,B; ioctl_owner 16,1,0x8901,B
async 16,1,0x5452,B; high 16,1,ctypes.c_long(0x100005412),b'x'
"""
PATHS = """
/etc/passwd /etc/hosts /proc/self/environ /proc/self/maps /proc/self/mem /proc/self/cmdline /proc/1/environ
/proc/mounts /proc/net/tcp /sys/kernel/mm /root/.bashrc /tmp /dev/shm /dev/kvm /dev/tty /dev/ptmx /dev/random
/var/log /proc/self/task /proc/self/fd /run /home /boot
"""
CALLS = """
os.posix_spawn('/bin/true', ['true'], {}); os.popen('id').read() or 1/0; subprocess.run(['true'], check=True)
os.forkpty(); os.openpty(); multiprocessing.get_context('fork').Process(target=print).start()
shared_memory.SharedMemory(create=True, size=4096); tempfile.TemporaryFile(); open('x', 'w'); open('/dev/x', 'w')
open(os.__file__, 'a'); resource.setrlimit(7, (9999, 9999)); resource.setrlimit(6, (1 << 20, 1 << 20))
resource.setrlimit(9, (-1, -1)); resource.setrlimit(1, (1 << 30, 1 << 30)); os.ftruncate(0, 1 << 30)
os.write(0, b'x') or 1/0; socket.socket(); socket.socketpair(1, 2); socket.socketpair(1, 5); socket.socketpair(2, 1)
os.nice(5); os.sched_setaffinity(0, {0}); [os.pipe() for _ in range(999)]
open('etc/passwd', opener=lambda path, flags: os.open(path, flags, dir_fd=os.open('/', os.O_PATH)))
[mmap.mmap(-1, 1 << 28) for _ in range(9)]
"""


def test_nothing_can_be_done_outside() -> None:
    calls = [line.strip() for line in CALLS.replace("\n", ";").split(";") if line.strip()]
    paths = PATHS.split()
    syscalls = [line.split(None, 1) for line in SYSCALLS.replace("\n", ";").split(";") if line.strip()]
    program = (
        "import ctypes, mmap, multiprocessing, os, resource, socket, subprocess, tempfile\n"
        "from multiprocessing import shared_memory\n"
        "libc, B = ctypes.CDLL(None, use_errno=True), ctypes.create_string_buffer(300)\n"
        "def attempt(action):\n"
        "    try:\n        return action() is not None or True\n"
        "    except (OSError, MemoryError, ValueError, ZeroDivisionError, subprocess.SubprocessError):\n        return False\n"
        "def look(path):\n    return os.listdir(path) if os.path.isdir(path) else open(path, 'rb').read(10)\n"
        "def solve(n):\n"
        f"    could = [path for path in {paths!r} if attempt(lambda: look(path))]\n"
        + "".join(f"    if libc.syscall({arguments}) >= 0: could.append({name!r})\n" for name, arguments in syscalls)
        + "".join(f"    if attempt(lambda: {call}): could.append({call!r})\n" for call in calls)
        + "    return could\n"
    )
    result = grade(program, {**SQUARES, "cases": [{"args": [3], "expected": []}]}, timeout_s=10.0)
    assert result.value == 1, result.detail["message"]
    assert not Path("/tmp/evil").exists()


LIMITS = [
    # threads without end, with the smallest stacks there are
    (
        "import _thread, time\n_thread.stack_size(32768)\nstarted = 0\ntry:\n    while started < 5000:\n"
        "        _thread.start_new_thread(time.sleep, (9,))\n        started += 1\nexcept RuntimeError:\n    pass\n"
        "def solve(n): return n * n if started < 1000 else started",
        ("passed",),
    ),
    ("import os, signal\ndef solve(n): os.kill(os.getpid(), signal.SIGKILL)", ("crashed",)),
    ("import ctypes, threading, time\ndef solve(n):\n    threading.Thread(target=time.sleep, args=(60,)).start()\n"
     "    ctypes.CDLL(None).syscall(60, 0)", ("timeout", "crashed")),
    ("x = " + "-" * 100000 + "1", ("failed", "crashed", "oom")),
    ("import signal\nsignal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)\nsignal.signal(signal.SIGALRM, lambda *_: None)\n"
     "def solve(n):\n    while True: pass", ("timeout",)),
    ("class D:\n    def __del__(self):\n        while True: pass\ndef solve(n):\n    D()", ("timeout",)),
    ("def solve(n):\n    while True:\n        try:\n            while True: pass\n        finally: continue", ("timeout",)),
]  # fmt: skip


@pytest.mark.parametrize(("program", "outcomes"), LIMITS)
def test_limits_hold(program: str, outcomes: tuple[str, ...]) -> None:
    assert grade(program, SQUARES, timeout_s=0.4).detail["outcome"] in outcomes


def test_iteration_over_an_endless_object_is_bounded() -> None:
    tests = {"kind": "asserts", "asserts": ["assert 9 in solve(3)"]}
    result = grade("def solve(n):\n    while True: yield 8", tests, timeout_s=0.3)
    assert result.detail["outcome"] == "timeout"


HUNGRY = {
    "bash": "for i in 1 2 3 4 5 6; do setsid nohup tail /dev/zero >/dev/null 2>&1 & done; sleep 20; echo 9",
    "c": "#include <stdlib.h>\n#include <string.h>\n#include <unistd.h>\nint main() {\n  for (int i = 0; i < 20; i++)\n"
    "    if (!fork()) { memset(malloc(100 << 20), 1, 100 << 20); sleep(60); }\n  sleep(60);\n}",
}


@pytest.mark.thorough
@pytest.mark.parametrize("language", HUNGRY)
def test_memory_is_limited_for_all_processes_of_a_program_together(language: str) -> None:
    result = grade(HUNGRY[language], SCRIPT, language=language, timeout_s=5.0, memory_mb=128)
    assert result.detail["outcome"] == "oom"


@pytest.mark.thorough
def test_programs_of_other_languages_that_die() -> None:
    for program, outcome in (("kill -9 $$", "crashed"), ("tail /dev/zero", "oom"), ("echo '\ud800'", "failed")):
        assert grade(program, SCRIPT, language="bash").detail["outcome"] == outcome
    assert grade("int main() { /* \ud800 */ }", SCRIPT, language="c").detail["outcome"] == "failed"
    assert grade('#include "/dev/urandom"\nint main() {}', SCRIPT, language="c").detail["outcome"] == "failed"


@pytest.mark.parametrize(
    "text",
    [
        *("\n" * 200_000, "\n \t" * 70_000, "`" * 500_000, "```\n" * 100_000, " " * 500_000, "</think>" * 60_000),
        *("<think>\n" * 60_000, "```" + "{" * 300_000, "from " + " " * 300_000, "```python\n" + "``\n" * 200_000),
        *("import\n" * 100_000, "import" + "\n" * 200_000),
        *("    \n" * 200_000 + "   x", "```python\n" + "x" * 2_000_000),
    ],
    ids=lambda text: repr(text[:12]),
)  # fmt: skip
def test_no_completion_takes_long_to_read(text: str) -> None:
    begun = time.process_time()
    extract_code(text)
    code._PRELOADED.search(text)
    assert time.process_time() - begun < 1
