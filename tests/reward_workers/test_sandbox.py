"""The sandbox's parts: values on the wire, levels and probes, processes that never stay behind."""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reward_workers import code
from reward_workers.code import check_options, grade_code
from reward_workers.code_compare import Tolerance, outputs_equal, values_equal
from reward_workers.function import RewardFunction, RewardFunctionError
from reward_workers.reward import RewardSet
from reward_workers.sandbox import landlock, seccomp, wire
from reward_workers.sandbox.host import Zygote
from reward_workers.sandbox.kernel import SYSCALLS
from reward_workers.sandbox.pool import Pool
from reward_workers.sandbox.probes import Capabilities, SandboxUnavailable, probe
from reward_workers.sandbox.session import Ended, Limits, Outcome
from reward_workers.worker import RewardWorker
from rollout_workers.trajectory import Status, TrajectoryGroup

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).resolve().parents[2]
SQUARE = "def solve(n):\n    return n * n"
TESTS = {"kind": "function", "entry_point": "solve", "cases": [{"args": [n], "expected": n * n} for n in (3, 5, 12)]}

numbers = st.one_of(st.booleans(), st.integers(), st.integers(-(10**600), 10**600), st.floats(), st.complex_numbers())
atoms = st.one_of(st.none(), numbers, st.text(st.characters()), st.binary())
keys = st.recursive(atoms, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=4)
plain = st.recursive(
    atoms,
    lambda inner: st.one_of(
        st.lists(inner, max_size=5),
        st.lists(inner, max_size=5).map(tuple),
        st.sets(keys, max_size=5),
        st.frozensets(keys, max_size=5),
        st.dictionaries(keys, inner, max_size=5),
    ),
    max_leaves=20,
)


def same(a: Any, b: Any) -> bool:
    """Equal, of the same types throughout, with NaN equal to itself and the sign of zero seen."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float | complex | set | frozenset):
        return sorted(map(repr, a)) == sorted(map(repr, b)) if isinstance(a, set | frozenset) else repr(a) == repr(b)
    if isinstance(a, dict):
        return same(list(a.items()), list(b.items()))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


class TestWire:
    @settings(max_examples=60, deadline=None)
    @given(plain)
    def test_what_is_encoded_is_decoded(self, value: Any) -> None:
        assert same(wire.decode(wire.encode(value), build=True), value)

    @settings(max_examples=60, deadline=None)
    @given(plain)
    def test_a_value_is_equal_to_itself(self, value: Any) -> None:
        assert values_equal(wire.decode(wire.encode(value)), value, Tolerance(0, 0))
        assert values_equal(wire.decode(wire.encode(value)), wire.decode(wire.encode(value)), Tolerance())

    @settings(deadline=None)
    @given(st.binary(max_size=200), st.booleans())
    def test_any_other_bytes_are_an_error_of_one_kind(self, data: bytes, build: bool) -> None:
        with contextlib.suppress(wire.WireError):
            wire.decode(data, build=build)

    @settings(deadline=None)
    @given(plain, st.data())
    def test_a_changed_byte_is_a_value_or_an_error(self, value: Any, data: st.DataObject) -> None:
        encoded = bytearray(wire.encode(value))
        at = data.draw(st.integers(0, len(encoded) - 1))
        encoded[at] = data.draw(st.integers(0, 255))
        with contextlib.suppress(wire.WireError):
            wire.decode(bytes(encoded[: data.draw(st.integers(0, len(encoded)))]))

    @settings(deadline=None)
    @given(plain, st.integers(1, 64))
    def test_no_encoding_is_over_its_limit(self, value: Any, limit: int) -> None:
        try:
            assert len(wire.encode(value, max_bytes=limit)) <= limit
        except wire.TooLargeError:
            assert len(wire.encode(value)) > limit

    @pytest.mark.parametrize(
        "value",
        [
            *(type("I", (int,), {})(9), type("L", (list,), {})([9]), type("S", (str,), {})("a"), object(), iter([9])),
            *((x for x in [9]), range(3), type, len, [type("D", (dict,), {})()], {"a": object()}, bytearray(b"x")),
        ],
        ids=lambda value: type(value).__name__,
    )
    def test_only_exact_builtin_types_are_plain(self, value: Any) -> None:
        with pytest.raises(wire.NotPlainError):
            wire.encode(value)

    def test_depth_is_bounded_on_both_sides(self) -> None:
        nested: list[Any] = []
        for _ in range(100_000):
            nested = [nested]
        with pytest.raises(wire.NotPlainError):
            wire.encode(nested)
        with pytest.raises(wire.WireError, match="deeper"):
            wire.decode(b"l\x01\x00\x00\x00" * 100_000 + b"N")
        with pytest.raises(wire.WireError, match="announced"):
            wire.decode(b"l\xff\xff\xff\xffN")

    def test_keys_that_collide_cost_the_judge_nothing(self) -> None:
        colliding = [n * (2**61 - 1) for n in range(20_000)]
        found = wire.decode(b"e" + len(colliding).to_bytes(4, "little") + b"".join(wire.encode(n) for n in colliding))
        begun = time.process_time()
        assert not values_equal(found, set(range(20_000)), Tolerance())
        assert time.process_time() - begun < 2


class TestComparing:
    @settings(deadline=None)
    @given(st.floats(allow_nan=False, allow_infinity=False), st.floats(-1e-7, 1e-7))
    def test_floats_that_differ_little_are_equal_and_others_not(self, value: float, relative: float) -> None:
        near = wire.decode(wire.encode([value * (1 + relative)]))
        assert values_equal(near, [value], Tolerance(1e-6, 0)) == math.isclose(near[0], value, rel_tol=1e-6)
        far = wire.decode(wire.encode(value * 1.001 + 1))
        assert not values_equal(far, value, Tolerance()) or math.isclose(far, value, rel_tol=1e-6)

    @settings(deadline=None)
    @given(st.integers(), st.integers())
    def test_whole_numbers_are_exact(self, a: int, b: int) -> None:
        assert values_equal(a, b, Tolerance(0.1, 0.1)) == (a == b)
        assert outputs_equal(str(a), str(b), Tolerance(0.1, 0.1)) == (a == b)

    @settings(deadline=None)
    @given(st.lists(st.text(st.characters(exclude_categories=["Cs", "Zs", "Zl", "Zp", "Cc"]), min_size=1), min_size=1))
    def test_text_is_equal_up_to_blanks_at_ends(self, words: list[str]) -> None:
        text = "\n".join(words)
        assert outputs_equal(text + " \n\n", text, Tolerance())
        assert outputs_equal(text.replace("\n", " \r\n"), text, Tolerance())
        assert not outputs_equal(text + "\nx", text, Tolerance())
        assert not outputs_equal("\n" + text, text, Tolerance())


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    zygote = Zygote()
    yield zygote
    zygote.close()


class TestLevels:
    def test_this_machine_confines(self, zygote: Zygote) -> None:
        capabilities = probe(zygote)
        assert capabilities.level >= 2
        assert capabilities.missing[2] == ()

    def test_without_namespaces_it_confines_too(self) -> None:
        pool = Pool(namespaces=False)
        assert pool.capabilities().level == (3 if os.getuid() == 0 else 2)
        pool.close()

    def test_a_refusal_names_what_is_missing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        weak = Capabilities(1, {2: ("landlock: ENOSYS (kernel 5.10)",), 3: ("namespaces: EPERM",)}, "")
        weak.require(1)
        with pytest.raises(SandboxUnavailable, match=r"level 1 .* min_level is 2 .* landlock: ENOSYS \(kernel 5.10\)$"):
            weak.require(2)
        pool = Pool()
        monkeypatch.setattr(pool, "capabilities", lambda: weak)
        monkeypatch.setattr(code, "POOL", pool)
        with pytest.raises(SandboxUnavailable, match="landlock: ENOSYS"):
            grade_code(SQUARE, TESTS)
        with pytest.raises(RewardFunctionError, match="namespaces: EPERM"):
            check_options(min_level=3)
        assert grade_code(SQUARE, TESTS, min_level=1).value == 1
        pool.close()

    def test_a_layer_that_is_missing_lowers_the_level(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        """What the probes could do is told from what a process without the filter can do."""
        package = tmp_path / "reward_workers"
        subprocess.run(["cp", "-r", str(ROOT / "reward_workers"), str(package)], check=True)
        subprocess.run(["cp", "-r", str(ROOT / "rollout_workers"), str(tmp_path)], check=True)
        for name in ("confine.py", "zygote.py"):
            file = package / "sandbox" / name
            file.write_text(file.read_text().replace("seccomp.install", "(lambda *a, **k: None)"))
        script = (
            "from reward_workers.sandbox.host import Zygote\nfrom reward_workers.sandbox.probes import probe\n"
            "zygote = Zygote()\nfound = probe(zygote)\nprint(found.level, found.missing[2])\nzygote.close()"
        )
        done = subprocess.run(
            [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.stdout.startswith("1 "), done.stderr
        assert "can start a process" in done.stdout
        assert "read a file of the host" not in done.stdout  # Landlock still holds

    def test_the_filter_lists_calls_that_exist(self) -> None:
        for programs in (False, True):
            instructions = seccomp.build(programs=programs)
            assert len(instructions) < 4096
            assert all(max(yes, no) < 256 for _, yes, no, _ in instructions)
        assert len(set(SYSCALLS.values())) == len(SYSCALLS)
        assert landlock.version() >= 1


def ask(zygote: Zygote, program: str, limits: Limits | None = None) -> tuple[Outcome | None, Any]:
    """The outcome (None: it answered) and the answer of `solve()`."""
    limits = limits or Limits(cpu_s=2.0)
    session = zygote.spawn(limits.setup(), limits, time.monotonic() + 20)
    try:
        session.ask(wire.LOAD, wire.encode(program))
        kind, _, payload = session.ask(wire.CALL, wire.encode((None, "solve", [], {}, False)))
        return (None if kind == wire.VALUE else Outcome.FAILED), wire.decode(payload, build=True)
    except Ended as ended:
        return ended.outcome, str(ended)
    finally:
        session.close()


class TestConfinement:
    def test_no_rights_are_left(self, zygote: Zygote) -> None:
        program = (
            "import ctypes, os, resource, struct\n"
            "def solve():\n"
            "    libc = ctypes.CDLL(None)\n"
            "    data = ctypes.create_string_buffer(24)\n"
            "    libc.syscall(125, struct.pack('Ii', 0x20080522, 0), data)\n"
            "    caps = struct.unpack('6I', data.raw)\n"
            "    return (os.getresuid(), os.getgroups(), [caps[0], caps[1], caps[3], caps[4]],\n"
            "            resource.getrlimit(resource.RLIMIT_CORE), sorted(os.environ))\n"
        )
        outcome, answer = ask(zygote, program)
        assert outcome is None, answer
        (users, groups, capabilities, core, environment), _ = answer
        if os.getuid() == 0:
            assert 0 not in users
            assert groups == []
        assert all(bits & ~0b110 == 0 for bits in capabilities)  # reading past folders that only root may enter
        assert core == (0, 0)
        assert "HOME" in environment
        assert not [name for name in environment if "TOKEN" in name or "KEY" in name]

    def test_programs_are_the_first_to_go_when_memory_is_short(self, zygote: Zygote) -> None:
        assert Path(f"/proc/{zygote.pid}/oom_score_adj").read_text().strip() == "1000"

    def test_one_program_leaves_nothing_to_the_next(self, zygote: Zygote) -> None:
        program = (
            "import builtins, math\nseen = hasattr(builtins, 'x')\nbuiltins.x = math.pi = 3\ndef solve(): return seen"
        )
        assert ask(zygote, program) == (None, (False, None))
        assert ask(zygote, program) == (None, (False, None))

    def test_answers_are_deterministic(self, zygote: Zygote) -> None:
        program = "def solve(): return list({'a', 'b', 'c', 'd', 'e', 'f'})"
        assert ask(zygote, program) == ask(zygote, program)

    def test_random_numbers_are_not_the_same_in_every_run(self, zygote: Zygote) -> None:
        program = "import random\ndef solve(): return random.random()"
        assert ask(zygote, program) != ask(zygote, program)

    def test_a_flood_of_small_frames_is_bounded(self, zygote: Zygote) -> None:
        flood = "import os\ndef solve():\n    while True: os.write(3, b'\\0\\0\\0\\0V\\x07\\0\\0\\0' * 7000)"
        assert ask(zygote, flood)[0] is Outcome.FAILED
        script = "import os\nos.set_blocking(3, True)\nwhile True: os.write(3, b'\\0\\0\\0\\0V\\x07\\0\\0\\0' * 7000)"
        begun = time.monotonic()
        result = grade_code(script, {"kind": "stdio", "cases": [{"stdin": "", "expected_stdout": ""}]}, timeout_s=1.0)
        assert result.detail["outcome"] == "timeout"
        assert time.monotonic() - begun < 15

    def test_time_is_counted_by_the_question(self, zygote: Zygote) -> None:
        program = (
            "import time\n"
            "def solve(s):\n    end = time.process_time() + s\n    while time.process_time() < end: pass\n    return s"
        )
        tests = {"kind": "function", "entry_point": "solve", "cases": [{"args": [0.2], "expected": 0.2}] * 4}
        assert grade_code(program, tests, timeout_s=0.5).value == 1
        tests["cases"] = [{"args": [3.0], "expected": 3.0}]
        assert grade_code(program, tests, timeout_s=0.5).detail["outcome"] == "timeout"


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(pids: set[int], within_s: float = 15.0) -> bool:
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        if not any(map(alive, pids)):
            return True
        time.sleep(0.02)
    return False


def below(pid: int) -> set[int]:
    found: set[int] = set()
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, task.read_text().split()):
                found |= {child, *below(child)}
    return found


HANG = "import time\ndef solve(n): time.sleep(600)"


class TestNothingStays:
    @pytest.mark.parametrize("namespaces", [True, False])
    def test_when_the_host_is_killed(self, namespaces: bool) -> None:
        script = (
            "import threading\nfrom reward_workers import code\nfrom reward_workers.sandbox.pool import Pool\n"
            f"code.POOL = Pool(namespaces={namespaces})\ncode.POOL.capabilities()\nprint('up', flush=True)\n"
            f"code.grade_code({HANG!r}, {TESTS!r}, timeout_s=100.0, total_timeout_s=100.0)\n"
        )
        host = subprocess.Popen(
            [sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, start_new_session=True
        )
        assert host.stdout is not None
        assert host.stdout.readline() == b"up\n"
        until = time.monotonic() + 20
        wanted = 3 if namespaces else 2  # the zygote (and the one that waits for it) and the program
        while len(pids := below(host.pid)) < wanted and time.monotonic() < until:
            time.sleep(0.02)
        assert len(pids) >= wanted
        os.killpg(host.pid, signal.SIGKILL)
        host.wait(10)
        host.stdout.close()
        assert gone(pids)

    def test_in_a_reward_process_that_is_killed_for_time(self) -> None:
        group = TrajectoryGroup.from_messages(
            [[{"role": "user", "content": "?"}, {"role": "assistant", "content": text}] for text in (SQUARE, HANG)]
        )
        options = {"timeout_s": 100.0, "total_timeout_s": 100.0}
        function = RewardFunction("code", "reward_workers.code.grade_code", options=options)
        with RewardWorker(RewardSet([function]), timeout_s=6.0, retries=0) as worker:
            (process,) = worker.start()
            results = worker.score_group(group.trajectories, {"tests": TESTS})
            assert results[0].value == 1.0
            assert results[0].detail["code"]["outcome"] == "passed"
            assert results[1].status is Status.TIMED_OUT
            assert not alive(process)
            again = worker.score_group(group.trajectories[:1], {"tests": TESTS})
            assert again[0].value == 1.0
            (process,) = worker.start()
            pids = below(process)
            assert pids
        assert gone(pids)

    def test_a_fork_of_the_host_starts_its_own(self) -> None:
        assert grade_code(SQUARE, TESTS).value == 1
        pid = os.fork()
        if pid == 0:
            try:
                os._exit(0 if grade_code(SQUARE, TESTS).value == 1 else 1)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert grade_code(SQUARE, TESTS).value == 1

    def test_a_reward_set_with_it_travels(self) -> None:
        rewards = RewardSet([RewardFunction("code", "reward_workers.code.grade_code")])
        assert pickle.loads(pickle.dumps(rewards)).functions[0].name == "code"


PATHOLOGICAL = [
    *(
        "def solve(n):\n    while True: pass",
        "import os\nos._exit(0)",
        "import os\ndef solve(n): os.kill(os.getpid(), 9)",
    ),
    *("def solve(n): return 'x' * (64 << 20)", "def solve(n):\n    while True: print('x' * 10000)"),
    *("x = []\ndef solve(n):\n    while True: x.append(bytearray(1 << 25))", "import ctypes\nctypes.string_at(0)"),
    *(
        "import os\nos.close(3)\ndef solve(n): return n",
        "import os\nos.write(3, b'\\xff' * 100)\ndef solve(n): return n",
    ),
    *("def solve(n):\n    raise SystemExit", "import time\ndef solve(n): time.sleep(60)", "def solve(n: pass"),
]


@pytest.mark.alone
@pytest.mark.timeout(900)
def test_a_thousand_gradings_leave_nothing_behind() -> None:
    """More than a zygote serves before it is replaced; for twenty thousand see test_soak."""
    rng = random.Random(0)
    script = {"kind": "stdio", "cases": [{"stdin": "3\n", "expected_stdout": "9\n"}]}
    asserts = {"kind": "asserts", "asserts": ["assert solve(3) == 9", "assert solve(5) == 25"]}

    def grade(number: int) -> None:
        if number % 25 == 0:
            bad = rng.choice(PATHOLOGICAL)
            assert grade_code(bad, rng.choice([TESTS, asserts]), timeout_s=0.2, memory_mb=256).value == 0, bad
            assert grade_code(SQUARE, TESTS).value == 1, f"after {bad}"
        elif number % 200 == 7:
            fork = "for i in 1 2 3 4 5 6; do (sleep 30 &) ; done; while true; do (true) & done"
            assert grade_code(fork, script, language="bash", timeout_s=0.3).value == 0
        elif number % 7 == 0:
            assert grade_code("print(int(input()) ** 2)", script).value == 1
        else:
            assert grade_code(SQUARE, asserts if number % 5 == 0 else TESTS).value == 1

    for number in range(300):
        grade(number)
    before = {name: measure() for name, measure in LEAKS.items()}
    for number in range(300, 1500):
        grade(number)
    after = {name: measure() for name, measure in LEAKS.items()}
    assert after["descriptors"] <= before["descriptors"] + 4
    assert after["processes"] <= before["processes"] + 2
    assert after["shared memory"] == before["shared memory"]
    assert after["temporary files"] == before["temporary files"]
    assert after["kb"] < before["kb"] + 30_000


def _resident_kb() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


LEAKS = {
    "descriptors": lambda: len(os.listdir("/proc/self/fd")),
    "processes": lambda: len(below(os.getpid())),
    "shared memory": lambda: len(Path("/proc/sysvipc/shm").read_text().splitlines()),
    "temporary files": lambda: len([name for name in os.listdir("/tmp") if name.startswith("program-")]),
    "kb": _resident_kb,
}
