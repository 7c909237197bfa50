"""Real engines and real runs for the tests in this folder; what takes long to start is started once.

`engine` is one vLLM engine as a Ray actor, `cluster` all actors of a small run (`orchestrator.cluster.Cluster`), both in
one Ray of the test session. `launch` starts whole runs as a user would, in processes of their own, and can tell what they
leave behind: every process of a run inherits a mark in its environment.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from orchestrator.models import resolve_model

MARK = "HEADWAY_TEST_RUN"
# The least of everything: no evaluation, no W&B, one thread per actor.
SMALL = [
    "experiment=tiny",
    "logging.wandb=disabled",
    "logging.console=plain",
    "data=files",
    "data.train.main.generator=orchestrator.tasks.synthetic",
    "rollout.threads=1",
    "learner.threads=1",
    "rollout.kv_cache_mib=64",
    "rollout.weights.canary=false",
]


@pytest.fixture(scope="session")
def tiny() -> str:
    """The folder of the tiny random model."""
    return str(resolve_model("builtin:tiny"))


@pytest.fixture(scope="session")
def small() -> list[str]:
    """Overrides of a small, fast run."""
    return list(SMALL)


@pytest.fixture(scope="session")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


Run = Callable[[Any], Any]


@pytest.fixture(scope="session")
def run(runner: asyncio.Runner, ray_session: None) -> Run:
    """Wait for a reference or a coroutine."""

    async def wait(awaitable: Any) -> Any:
        return await asyncio.wait_for(awaitable, 120)

    return lambda awaitable: runner.run(wait(awaitable))


def _heed_ctrl_c() -> None:
    """A shell that runs the tests in the background has them ignore it, and what they start inherits that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Launched:
    """A run in a process of its own: what it prints, writes, starts and leaves."""

    def __init__(self, arguments: list[str], folder: Path, log: Path, env: dict[str, str] | None = None) -> None:
        self.folder = folder
        self.log = log
        self.mark = uuid.uuid4().hex
        environment = {**os.environ, **(env or {}), MARK: self.mark, "OMP_NUM_THREADS": "1"}
        with log.open("wb") as output:
            # A session of its own, as a terminal gives: Ctrl-C goes to the whole process group.
            self.process = subprocess.Popen(
                arguments,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
                preexec_fn=_heed_ctrl_c,
            )
        self.shared_memory: set[str] = set()

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def records(self) -> list[dict[str, Any]]:
        """All lines of metrics.jsonl that are whole, of every lineage."""
        path = self.folder / "metrics.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [record for record in map(json.loads, lines) if "policy_version" in record]

    def processes(self, title: str = "") -> dict[int, str]:
        """Living processes of this run, by id, whose title contains `title`."""
        found = {}
        for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
            try:
                if f"{MARK}={self.mark}".encode() not in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    continue
                name = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                mapped = Path(f"/proc/{pid}/maps").read_text(errors="replace")
            except OSError:  # gone meanwhile
                continue
            self.shared_memory |= set(re.findall(r"/dev/shm/\S+", mapped))
            if title in name:
                found[pid] = name
        return found

    def wait_for(self, condition: Callable[[], Any], what: str, timeout_s: float = 150) -> Any:
        deadline = time.monotonic() + timeout_s
        while not (value := condition()):
            assert self.process.poll() is None, f"ended with {self.process.returncode} before {what}:\n{self.output}"
            assert time.monotonic() < deadline, f"no {what} within {timeout_s} s:\n{self.output}"
            time.sleep(0.1)
        return value

    def wait_for_version(self, version: int) -> None:
        self.wait_for(lambda: any(r["policy_version"] >= version for r in self.records()), f"version {version}")
        self.processes()  # sees the shared memory in use

    def finish(self, timeout_s: float = 150) -> int:
        """Wait for the end; the exit code."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout_s} s:\n{self.output}") from None

    def assert_nothing_left(self, timeout_s: float = 20, *, but: Sequence[str] = ()) -> None:
        """No process and no shared-memory file of the run, within a moment to notice that the driver is gone.

        `but` are titles of processes that may still be there.
        """

        def left() -> list[str]:
            return [title for title in self.processes().values() if not title.startswith(tuple(but))]

        deadline = time.monotonic() + timeout_s
        while (found := left()) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert not found
        assert not [path for path in self.shared_memory if os.path.exists(path)]

    def end(self) -> None:
        for pid in self.processes():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait()


@pytest.fixture(scope="module")
def lingering() -> Iterator[list[Launched]]:
    """Runs whose last processes may take a minute to go: that they went is seen after the module's other tests."""
    runs: list[Launched] = []
    yield runs
    try:
        for launched in runs:
            launched.assert_nothing_left(75)
    finally:
        for launched in runs:
            launched.end()


@pytest.fixture
def launch(tmp_path: Path, tiny: str, lingering: list[Launched]) -> Iterator[Callable[..., Launched]]:
    """Start `headway train` with `SMALL` and the given overrides, or a Python program; ended with the test."""
    started: list[Launched] = []

    def start(
        *overrides: str, program: Path | None = None, name: str = "run", directory: Path | None = None
    ) -> Launched:
        directory = directory or tmp_path / "runs"
        command = [sys.executable, "-m", "orchestrator.cli", "train", *SMALL]
        if program is not None:
            command = [sys.executable, str(program)]
        else:
            command += [f"run.name={name}", f"run.dir={directory}", *overrides]
        launched = Launched(command, directory / name, tmp_path / f"{name}-{len(started)}.log")
        started.append(launched)
        return launched

    yield start
    for launched in started:
        if launched not in lingering:
            launched.end()
