"""20,000 mixed gradings through two reward workers, every hundredth a pathological one: right verdicts, nothing left behind.

The test takes in orphans (it is their subreaper), so whatever outlives its parent is found below it.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import itertools
import os
import random
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from reward_workers.reward import RewardFunction, RewardResult, RewardSet, Status
from reward_workers.worker import RewardWorker
from rollout_workers.trajectory import Trajectory

pytestmark = pytest.mark.alone

GROUP = 8
GROUPS = {"numeric": 840, "symbolic": 200, "integral": 10, "json": 550, "code": 400, "behave": 400, "later": 100}
TOKEN = f"headway-soak-{os.getpid()}"  # in the name of whatever a program would leave on this machine
PR_SET_CHILD_SUBREAPER = 36
NEAR_MB = 12  # growth that is no growth: allocators and caches come and go by as much


@dataclass(frozen=True)
class Member:
    """A completion and its verdict; `outcome` is what became of a program."""

    completion: str
    value: float | None
    status: Status = Status.SCORED
    outcome: str = ""


@dataclass(frozen=True)
class Group:
    function: str
    columns: dict[str, Any]
    members: Sequence[Member]

    @property
    def trajectories(self) -> list[Trajectory]:
        return [
            Trajectory.from_messages(
                [{"role": "user", "content": "?"}, {"role": "assistant", "content": member.completion}],
                group_id="g",
                prompt_id="p",
                index=index,
            )
            for index, member in enumerate(self.members)
        ]

    def faults(self, results: Sequence[RewardResult]) -> list[str]:
        """What is wrong with the verdicts on this group."""
        if len(results) != len(self.members):
            return [f"{len(results)} verdicts on a group of {len(self.members)}"]
        return [
            f"{self.function} {self.columns} {member}:\n    got {result}"[:2000]
            for member, result in zip(self.members, results, strict=True)
            if (result.value, result.status) != (member.value, member.status)
            or (member.outcome and result.detail["code"]["outcome"] != member.outcome)
        ]


# Pathological members. Of a program everything is a verdict; of a reward function its failure is none.
HANGS = Member(r"\boxed{\int_0^\infty \sin(x^x)dx}", None, Status.TIMED_OUT)  # where the right answer is an integral
BEYOND_LIMITS = Member(r"\boxed{9^{9^{9^{9}}}}", 0.0)
PROGRAMS = [
    Member("def solve(n):\n    while True: pass", 0.0, outcome="timeout"),
    Member("import time\ndef solve(n): time.sleep(60)", 0.0, outcome="timeout"),
    Member("import os\ndef solve(n):\n    while True: os.fork()", 0.0, outcome="failed"),
    Member("x = []\ndef solve(n):\n    while True: x.append(bytearray(1 << 26))", 0.0, outcome="oom"),
    Member("def solve(n):\n    while True: print('x' * 10000)", 0.0, outcome="output-limit"),
    Member("import os\nos._exit(0)", 0.0, outcome="crashed"),
    Member("import ctypes\nctypes.string_at(0)", 0.0, outcome="crashed"),
    Member("import os\nos.write(3, b'\\xff' * 100)\ndef solve(n): return n * n", 0.0, outcome="output-limit"),
    Member(
        "import ctypes\nlibc = ctypes.CDLL(None)\n"
        "def solve(n): return n * n if libc.shmget(0x5eed, 4096, 0o1666) >= 0 else 0",
        0.0,
        outcome="failed",
    ),
    *(
        Member(f"def solve(n):\n    open('{folder}/{TOKEN}', 'w').close()\n    return n * n", 0.0, outcome="failed")
        for folder in ("/tmp", "/dev/shm", "/var/tmp")
    ),
]
BOMB = Member("(while true; do (sleep 60) & done) & while true; do (:) & done", 0.0)  # ends one way or another
RAISES, HOLDS, EXITS = (
    Member("raise", None, Status.ERRORED),
    Member("hold", None, Status.TIMED_OUT),
    Member("exit", None, Status.ERRORED),
)
# How many of each, over all groups of a kind; every hundredth of 20,000 in all.
PATHOLOGICAL: dict[str, list[Member]] = {
    "numeric": [BEYOND_LIMITS] * 40,
    "integral": [HANGS] * 10,
    "code": [*itertools.islice(itertools.cycle(PROGRAMS), 80), *[BOMB] * 4],
    "behave": [RAISES] * 28 + [HOLDS] * 4 + [EXITS] * 22,
    "later": [RAISES] * 8 + [HOLDS] * 4,
}
IDENTITIES = [  # what exact arithmetic does not decide: the right answer, the same, another
    (r"\sin 2x", r"2\sin x\cos x", r"2\sin x"),
    (r"\frac{\sin x}{\cos x}", r"\tan x", r"\cos x"),
    (r"\frac{\sqrt6+\sqrt2}{2}", r"\sqrt{2+\sqrt{3}}", r"\sqrt{3+\sqrt{3}}"),
    (r"\cos(x-y)", r"\cos x\cos y+\sin x\sin y", r"\cos x\cos y-\sin x\sin y"),
]


def behave(completion: str) -> float | None:
    """A user's function; does what the completion says."""
    import ctypes
    import os

    if completion == "hold":  # native code that keeps the interpreter lock
        ctypes.PyDLL(None).sleep(1000)
    if completion == "exit":
        os._exit(3)
    if completion == "raise":
        raise RuntimeError("can't judge this")
    return None if completion == "none" else float(completion)


async def later(completion: str) -> float:
    import asyncio

    await asyncio.sleep(1000 if completion == "hold" else 0.001)
    if completion == "raise":
        raise RuntimeError("can't judge this")
    return float(completion)


# By value: a process must not import this file.
for function in (behave, later):
    function.__module__ = "__main__"


def honest(kind: str, rng: random.Random) -> Group:
    """A group of well-behaved members, of which some are right."""
    n = rng.randrange(100, 10**6)
    right = [rng.random() < 0.6 for _ in range(GROUP)]
    columns: dict[str, Any]
    match kind:
        case "numeric":
            function, columns = "math", {"answer": rng.choice([f"{n}", f"{n:,}", f"{n}.0"])}
            texts = (f"We try.\n\\boxed{{{n}}}", f"The answer is {n + 1}.")
        case "symbolic":
            gold, same, other = rng.choice(IDENTITIES)
            function, columns = "math", {"answer": f"{gold}+{n}"}
            texts = (rf"\boxed{{{n}+{same}}}", rf"\boxed{{{n}+{other}}}")
        case "integral":
            gold = (
                rf"\int_0^1 {n}\sin(x)dx"  # the honest ones are judged without algebra, which hangs as long as it may
            )
            function, columns = "math", {"answer": gold}
            texts = (f"We try.\n\\boxed{{{gold}}}", "I don't know.")
        case "json":
            schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
            function, columns = "json", {"schema": schema, "answer": {"n": n}}
            texts = (f'{{"n": {n}}}', rng.choice([f'{{"n": {n + 1}}}', "{}", f'{{"n": {n}', f'{{"n": "{n}"}}']))
        case "code" if rng.random() < 0.05:
            case = {"stdin": f"{n}\n", "expected_stdout": f"{n * n}\n"}
            function, columns = "code", {"tests": {"kind": "stdio", "cases": [case]}, "language": "bash"}
            texts = ("read n; echo $((n*n))", "read n; echo $((n+n))")
        case "code":
            cases = [{"args": [m], "expected": m * m} for m in (3, n)]
            function, columns = "code", {"tests": {"kind": "function", "entry_point": "solve", "cases": cases}}
            texts = ("def solve(n): return n * n", "def solve(n): return n + n")
        case _:
            values = [rng.choice([0.0, 0.25, 1.0]) for _ in range(GROUP)]
            return Group(kind, {}, [Member(str(value), value) for value in values])
    members = [Member(texts[0], 1.0) if is_right else Member(texts[1], 0.0) for is_right in right]
    return Group(function, columns, members)


def groups_of(kind: str, rng: random.Random) -> list[Group]:
    """Groups with the pathological members of their kind spread over them."""
    groups = [honest(kind, rng) for _ in range(GROUPS[kind])]
    for bad in PATHOLOGICAL.get(kind, []):
        fits = [g for g in groups if (g.columns.get("language") == "bash") == (bad is BOMB)]
        group = rng.choice(fits)
        honest_ones = [i for i, member in enumerate(group.members) if not is_pathological(member)]
        members = list(group.members)
        members[rng.choice(honest_ones)] = bad
        groups[groups.index(group)] = Group(group.function, group.columns, members)
    return groups


def is_pathological(member: Member) -> bool:
    return any(member is bad for bads in PATHOLOGICAL.values() for bad in bads)


def descendants(pid: int, but: Collection[int] = ()) -> dict[int, tuple[str, int]]:
    """State and parent of all processes below one; not of those `but`, nor of what is below them."""
    found: dict[int, tuple[str, int]] = {}
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            for child in set(map(int, task.read_text().split())) - set(but):
                state, parent = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[:2]
                found |= {child: (state, int(parent)), **descendants(child)}
    return found


def living(processes: dict[int, tuple[str, int]]) -> list[int]:
    return [pid for pid, (state, _) in processes.items() if state != "Z"]


def resident_mb(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE") / 2**20


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def leftovers() -> list[str]:
    """What programs left in places for all, and System V shared memory."""
    found = [str(path) for folder in ("/tmp", "/var/tmp", "/dev/shm") for path in Path(folder).glob(f"*{TOKEN}*")]
    return found + [line.split()[1] for line in Path("/proc/sysvipc/shm").read_text().splitlines()[1:]]


@pytest.fixture
def orphanage() -> Iterator[Collection[int]]:
    """The processes below this one before; those that lose their parent come to this one."""
    libc = ctypes.CDLL(None)
    before = descendants(os.getpid()).keys()
    assert libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    yield before
    libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
    for pid in descendants(os.getpid(), but=before):
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def still_there(before: Collection[int], within_s: float = 20.0) -> list[bytes]:
    """Command lines of processes that do not end."""
    until = time.monotonic() + within_s
    while (left := living(descendants(os.getpid(), but=before))) and time.monotonic() < until:
        time.sleep(0.05)
    return [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in left]


@pytest.mark.timeout(600)
def test_twenty_thousand_gradings_with_pathological_ones_among_them(
    orphanage: Collection[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    shared_before = leftovers()
    rng = random.Random(7)
    by_kind = {kind: groups_of(kind, rng) for kind in GROUPS}
    every = [group for groups in by_kind.values() for group in groups]
    bad = sum(is_pathological(member) for group in every for member in group.members)
    assert (len(every) * GROUP, bad) == (20_000, 200)
    # The second worker's processes are taken down again and again; those of the first never.
    shared = ("numeric", "json", "code")
    unlucky = [*by_kind["behave"], *by_kind["later"], *(group for kind in shared for group in by_kind[kind][:30])]
    steady = [*by_kind["symbolic"], *by_kind["integral"], *(group for kind in shared for group in by_kind[kind][30:])]
    rng.shuffle(steady)
    rng.shuffle(unlucky)

    rewards = RewardSet(
        [
            RewardFunction("math", "reward_workers.math.grade_math", options={"timeout_s": 3.0}),
            RewardFunction("json", "reward_workers.structured.grade_json"),
            RewardFunction(
                "code",
                "reward_workers.code.grade_code",
                options={"timeout_s": 1.0, "total_timeout_s": 20.0, "memory_mb": 128},
            ),
            RewardFunction("behave", behave),
            RewardFunction("later", later),
        ]
    )
    statuses: collections.Counter[Status] = collections.Counter()
    faults: list[str] = []

    def judge(worker: RewardWorker, group: Group) -> None:
        results = worker.score_group(group.trajectories, group.columns, [group.function])
        statuses.update(result.status for result in results)
        faults.extend(group.faults(results))

    with (
        RewardWorker(rewards, timeout_s=30.0, retries=0, processes=2) as first,
        RewardWorker(rewards, timeout_s=8.0, retries=0, processes=2) as second,
        ThreadPoolExecutor(2) as for_first,
        ThreadPoolExecutor(2) as for_second,
    ):

        def run(of_first: Sequence[Group], of_second: Sequence[Group]) -> None:
            one = for_first.map(lambda group: judge(first, group), of_first)
            two = for_second.map(lambda group: judge(second, group), of_second)
            assert all(done is None for done in (*one, *two))

        def sizes() -> dict[str, float]:
            kept = first.start()
            below = descendants(os.getpid(), but=orphanage)
            return {
                "descriptors": descriptors(os.getpid()),
                "MB": resident_mb(os.getpid()),
                "processes": len(living(below)),
                "zombies": sum(state == "Z" and parent != os.getpid() for state, parent in below.values()),
                **{f"descriptors of {pid}": descriptors(pid) for pid in kept},
                **{f"MB of {pid}": resident_mb(pid) for pid in kept},
            }

        run(steady[: len(steady) // 4], unlucky[: len(unlucky) // 4])
        warm = sizes()
        run(steady[len(steady) // 4 :], unlucky[len(unlucky) // 4 :])
        assert not faults, "\n".join(faults[:10])
        assert statuses == collections.Counter(member.status for group in every for member in group.members)
        after = sizes()
        assert after.keys() == warm.keys()  # the same processes
        for name, size in after.items():
            room = {"MB": NEAR_MB, "descriptors": 4, "processes": 6, "zombies": 2}[name.split()[0]]
            assert size <= warm[name] + room, f"{name}: {warm[name]:g}, then {size:g}"
        for worker in (first, second):
            for kind in GROUPS:
                judge(worker, honest(kind, rng))
        assert not faults, "\n".join(faults[:10])
    assert still_there(orphanage) == []
    assert leftovers() == shared_before
    assert list(tmp_path.iterdir()) == []
