"""Hostile programs: each must have its expected verdict and no effect, as root and as a user without rights.

As root the whole file runs a second time in an interpreter of an unprivileged user (the last test), and the attacks a
third time without namespaces, as in a container that forbids them.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from reward_workers import code
from reward_workers.code import grade_code
from reward_workers.sandbox.pool import Pool
from reward_workers.sandbox.zygote import CHANNEL
from rollout_workers.trajectory import Status

pytestmark = pytest.mark.thorough
NESTED = "not without_rights and not thousands_of_gradings"  # run once more as another user

ROOT = Path(__file__).resolve().parents[2]
UID = 12345
ATTACKS = [json.loads(line) for line in (ROOT / "tests" / "data" / "sandbox_attacks.jsonl").read_text().splitlines()]
VISIBLE = {"stat_probe"}  # metadata of files is, as the case itself says
INPUTS = (3, 5, 12)


@dataclass(frozen=True)
class Lab:
    """What attacks aim at: a folder with secrets, sockets and listeners."""

    folder: Path
    sockets: list[socket.socket]

    def untouched(self) -> bool:
        secret = self.folder / "secret"
        received = []
        for listener in self.sockets:
            try:
                received.append(listener.recv(1) if listener.type == socket.SOCK_DGRAM else listener.accept())
            except BlockingIOError:
                continue
        return (
            not received
            and (secret / "victim.txt").read_text() == "victim"
            and (secret / "victim.txt").stat().st_mode & 0o777 == 0o666
            and (secret / "hidden_tests.json").stat().st_mode & 0o777 == 0o666
            and sorted(os.listdir(secret)) == ["hidden_tests.json", "victim.txt"]
            and not (self.folder / "work" / "evil.txt").exists()
        )


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    folder = tmp_path_factory.mktemp("lab")
    for name in ("secret", "work", "tmp"):
        (folder / name).mkdir()
    (folder / "secret" / "hidden_tests.json").write_text("[9, 25, 144]")
    (folder / "secret" / "victim.txt").write_text("victim")
    for path in (*folder.rglob("*"), folder, *folder.parents):
        if path.stat().st_uid == os.getuid() and path.is_relative_to(folder.parents[1]):
            path.chmod(0o777 if path.is_dir() else 0o666)  # the sandbox is what must keep them
    sockets = []
    for family, kind, address in (
        (socket.AF_UNIX, socket.SOCK_STREAM, str(folder / "victim.sock")),
        (socket.AF_UNIX, socket.SOCK_DGRAM, str(folder / "victim_dgram.sock")),
        (socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", 0)),
        (socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 0)),
    ):
        listener = socket.socket(family, kind)
        listener.bind(address)
        if kind == socket.SOCK_STREAM:
            listener.listen()
        listener.setblocking(False)
        sockets.append(listener)
    yield Lab(folder, sockets)
    for listener in sockets:
        listener.close()


@pytest.fixture(scope="module", params=["namespaces", "no namespaces"])
def pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
    pool = Pool(namespaces=request.param == "namespaces")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(code, "POOL", pool)
        yield pool
    pool.close()


def adapted(source: str, lab: Lab) -> str:
    """The attack aimed at this harness: its descriptor for frames, this lab's places and ports."""
    source = source.replace('struct.pack("I",len(b))', 'struct.pack("<IcI",len(b),b"V",1)')
    ports = {f"4777{i}": str(lab.sockets[i + 1].getsockname()[1]) for i in (1, 2)}
    places = {"{LAB}": str(lab.folder), "{TMP}": str(lab.folder / "tmp"), "101": str(CHANNEL)}
    for old, new in {**places, **ports}.items():
        source = source.replace(old, new)
    return source


def descendants() -> set[int]:
    """All processes below this one, zombies included."""
    found: set[int] = set()
    waiting = [os.getpid()]
    while waiting:
        for task in Path(f"/proc/{waiting.pop()}/task").glob("*/children"):
            below = {int(pid) for pid in task.read_text().split()}
            waiting += below - found
            found |= below
    return found


TESTS: dict[str, Any] = {
    "python": {
        "kind": "function",
        "entry_point": "solve",
        "cases": [{"args": [n], "expected": n * n} for n in INPUTS],
    },
    "other": {"kind": "stdio", "cases": [{"stdin": f"{n}\n", "expected_stdout": f"{n * n}\n"} for n in INPUTS]},
}


class TestAttacks:
    @pytest.mark.parametrize("attack", ATTACKS, ids=[attack["id"] for attack in ATTACKS])
    def test_has_its_verdict_and_no_effect(
        self, attack: dict[str, Any], lab: Lab, pool: Pool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("SBX_SECRET", "secret")
        pool.capabilities()
        before = descendants()
        language = attack["language"]
        tests = TESTS["python" if language == "python" else "other"]
        program = adapted(attack["source"], lab)
        result = grade_code(program, tests, language=language, timeout_s=0.5, total_timeout_s=12.0, memory_mb=256)
        outcome = result.detail["outcome"]
        assert outcome in attack["expected_verdict"], result
        assert result.status is Status.SCORED
        assert result.value == float(outcome == "passed")
        if attack["id"] not in VISIBLE:
            assert "ATTACK_OK" not in result.detail["stdout"], result.detail["stdout"]
        assert (
            "hidden" not in result.detail["stdout"] + result.detail["stderr"] or "[9, 25" not in result.detail["stdout"]
        )
        assert lab.untouched()
        assert len(descendants() - before) <= 2  # a zygote of its own, where one was replaced
        assert grade_code("def solve(n): return n * n", TESTS["python"]).value == 1.0

    def test_the_corpus_is_whole(self) -> None:
        assert len(ATTACKS) == 74
        assert {attack["language"] for attack in ATTACKS} == {"python", "bash", "c"}


BOMB = """
for i in 1 2 3 4 5 6 7 8; do (while true; do (while true; do :; done) & done) & done
sleep 60
"""


def test_a_fork_bomb_of_a_program_is_swept_away(pool: Pool) -> None:
    before = descendants()
    begun = time.monotonic()
    result = grade_code(BOMB, TESTS["other"], language="bash", timeout_s=1.0, total_timeout_s=4.0)
    assert result.detail["outcome"] in ("timeout", "failed", "crashed", "output-limit")
    assert time.monotonic() - begun < 30
    assert len(descendants() - before) <= 2
    assert grade_code("read n; echo $((n*n))", TESTS["other"], language="bash").value == 1.0


UNPRIVILEGED = [
    "setpriv",
    f"--reuid={UID}",
    f"--regid={UID}",
    "--clear-groups",
    "--bounding-set=-all",
    "--inh-caps=-all",
]


def interpreter(folder: Path) -> Path:
    """A Python that any user may run, and that can start itself."""
    again = "import ctypes, subprocess, sys; subprocess.run([sys.executable, '-c', 'import ctypes'], check=True)"
    for candidate in (sys.executable, f"/usr/bin/python3.{sys.version_info.minor}"):
        if subprocess.run([*UNPRIVILEGED, candidate, "-c", again], capture_output=True, cwd="/").returncode == 0:
            return Path(candidate)
    base = Path(sys.base_prefix)
    shutil.copytree(
        base / "lib", folder / "lib", ignore=shutil.ignore_patterns("site-packages", "test", "*.a"), symlinks=True
    )
    (folder / "bin").mkdir()
    return Path(shutil.copy(base / "bin" / f"python3.{sys.version_info.minor}", folder / "bin"))


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """Any user may enter it, unlike what lies below pytest's own temporary folder."""
    with tempfile.TemporaryDirectory(prefix="without-rights-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize(
    "file", ["test_sandbox_attacks.py", "test_sandbox_reach.py", "test_code_cases.py", "test_sandbox.py"]
)
def test_the_same_without_rights(file: str, open_folder: Path) -> None:
    home = open_folder / "home"
    home.mkdir()
    os.chown(home, UID, UID)
    packages = [path for path in sys.path if path.endswith("site-packages")]
    done = subprocess.run(
        [
            *UNPRIVILEGED,
            *(str(interpreter(open_folder)), "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", NESTED),
            *(f"--basetemp={home}/pytest", str(ROOT / "tests" / "reward_workers" / file)),
        ],
        capture_output=True,
        text=True,
        timeout=280,
        cwd="/",
        env={
            "PATH": os.environ["PATH"],
            "HOME": str(home),
            "TMPDIR": str(home),
            "PYTHONPATH": os.pathsep.join([str(ROOT), *packages]),
            "PYTHONDONTWRITEBYTECODE": "1",
            "HYPOTHESIS_STORAGE_DIRECTORY": str(home),
        },
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
