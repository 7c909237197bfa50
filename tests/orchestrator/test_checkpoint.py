"""Whatever happens in the middle of a save, the newest whole checkpoint is found again."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orchestrator.checkpoint import (
    Cadence,
    CheckpointError,
    CheckpointStore,
    restore_rng,
    rng_state,
)

REPOSITORY = Path(__file__).resolve().parents[2]


def save(store: CheckpointStore, version: int, data: bytes | None = None) -> Path:
    """A save as two learner ranks and the driver make it."""
    with store.saving(version) as staging:
        for rank in range(2):
            shard = staging / "learner" / f"rank{rank}.bin"
            shard.parent.mkdir(exist_ok=True)
            shard.write_bytes(data or bytes([version, rank]) * 100)
        return store.commit(version, {"version": version, "frontier": {"epoch": 1, "outstanding": ["a/1"]}})


def folders(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def assert_whole(root: Path, versions: tuple[int, ...]) -> int:
    """`latest` is one of `versions`, with the contents that `save` gave it. Returns which."""
    latest = CheckpointStore(root, keep=1).latest()
    assert latest is not None
    assert latest.version in versions
    assert latest.run_state["version"] == latest.version
    for rank in range(2):
        assert (latest.path / "learner" / f"rank{rank}.bin").read_bytes() == bytes([latest.version, rank]) * 100
    return latest.version


def test_a_save_is_found_again_with_its_run_state(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    store = CheckpointStore(root, keep=2)
    assert store.latest() is None
    path = save(store, 12)
    latest = CheckpointStore(root, keep=2).latest()
    assert latest is not None
    assert (latest.version, latest.path) == (12, path)
    assert latest.run_state == {"version": 12, "frontier": {"epoch": 1, "outstanding": ["a/1"]}}
    assert path.name == "v000012"


def test_the_newest_keep_stay_and_order_is_by_number(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for version in (8, 9, 10, 1_000_000):
        save(CheckpointStore(tmp_path, keep=2), version, b"x")
    assert folders(tmp_path) == ["v000010", "v1000000"]
    latest = store.latest()
    assert latest is not None
    assert latest.version == 1_000_000


def test_f25_no_name_contains_an_equals_sign(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    save(store, 3)
    store.stage(4)
    assert not [path for path in tmp_path.rglob("*") if "=" in path.name]


def test_keep_below_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"checkpoint\.keep must be at least 1, got 0"):
        CheckpointStore(tmp_path, keep=0)


def test_f10_a_full_disk_leaves_the_only_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    save(store, 1)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(CheckpointError) as caught:
            save(store, 2)
    assert folders(tmp_path) == ["v000001"]
    assert_whole(tmp_path, (1,))
    for part in ("No space left on device", str(tmp_path), "previous checkpoint takes", "bytes are free"):
        assert part in str(caught.value)
    save(store, 2)
    assert folders(tmp_path) == ["v000002"]


def test_a_rank_that_runs_out_of_disk_removes_the_staging_folder(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    save(store, 1)
    with pytest.raises(CheckpointError, match="No space left"), store.saving(2):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def save_half() -> None:
        with store.saving(2) as staging:
            (staging / "half.bin").write_bytes(b"12345")
            raise RuntimeError("PytorchStreamWriter failed writing file")

    with pytest.raises(RuntimeError, match="failed writing file") as caught:
        save_half()
    assert "5 bytes of this one were written" in caught.value.__notes__[0]
    assert folders(tmp_path) == ["v000001"]


def test_a_run_state_that_json_cannot_hold_is_refused(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    store.stage(1)
    with pytest.raises(TypeError, match="set is not JSON serializable"):
        store.commit(1, {"done": {"a"}})
    assert folders(tmp_path) == []


def test_files_that_a_rank_wrote_elsewhere_are_missed(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    (store.stage(1) / "rank0.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"1 files of version 1 .*first: rank1\.bin.*shared by all nodes"):
        store.commit(1, {}, written=["rank0.bin", "rank1.bin"])
    assert folders(tmp_path) == []
    (store.stage(1) / "rank0.bin").write_bytes(b"x")
    assert store.commit(1, {}, written=["rank0.bin"]).is_dir()


def test_one_version_is_staged_at_a_time_and_never_over_a_whole_one(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    with pytest.raises(CheckpointError, match=r"version 1 is not staged .*staged: None"):
        store.commit(1, {})
    store.stage(1)
    with pytest.raises(CheckpointError, match="version 1 is still being written"):
        store.stage(2)
    store.abandon(1)
    assert folders(tmp_path) == []
    save(store, 2)
    with pytest.raises(CheckpointError, match="a whole checkpoint of version 2 exists"):
        store.stage(2)


def test_leftovers_of_a_crash_are_removed_when_the_next_save_begins(tmp_path: Path) -> None:
    (CheckpointStore(tmp_path, keep=1).stage(7) / "half.bin").write_bytes(b"x")
    store = CheckpointStore(tmp_path, keep=1)
    assert store.latest() is None
    staging = store.stage(7)
    assert list(staging.iterdir()) == []
    store.abandon(7)
    save(store, 8)
    assert folders(tmp_path) == ["v000008"]


def _truncate(folder: Path) -> None:
    (folder / "learner" / "rank1.bin").write_bytes(b"x")


def _lose(folder: Path) -> None:
    (folder / "learner" / "rank1.bin").unlink()


def _unmark(folder: Path) -> None:
    (folder / "complete.json").unlink()


def _garble(folder: Path) -> None:
    state = folder / "run_state.json"
    state.write_bytes(b"?" * state.stat().st_size)


@pytest.mark.parametrize("damage", [_truncate, _lose, _unmark, _garble])
def test_a_damaged_checkpoint_is_skipped_with_a_warning_and_can_be_written_again(
    tmp_path: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for version in (1, 2, 3):
        path = save(store, version)
    damage(path)
    assert_whole(tmp_path, (2,))
    assert f"skipping {path}, not a whole checkpoint" in caplog.text
    save(store, 3)
    assert_whole(tmp_path, (3,))
    damage(path)
    save(store, 4)  # the damaged one does not count as kept
    assert folders(tmp_path) == ["v000002", "v000004"]


def test_a_checkpoint_that_cannot_be_read_now_is_neither_skipped_nor_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    save(store, 1)

    def broken(path: Path, *, real: Callable[[Path], bytes] = Path.read_bytes) -> bytes:
        if path.parent.name == "v000001":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(path)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", broken)
        with pytest.raises(OSError, match="Input/output error"):
            store.latest()
    assert_whole(tmp_path, (1,))


def test_a_file_with_the_name_of_a_checkpoint_is_none(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    with store.saving(3):
        store.commit(3, {})
    (tmp_path / "v000009").write_text("notes")
    assert store.versions() == [3]
    with store.saving(4):
        store.commit(4, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v000004", "v000009"]


def test_kill_9_at_every_step_of_a_save_leaves_the_old_or_the_new(tmp_path: Path) -> None:
    """A child dies by SIGKILL at its n-th open, rename, remove or mkdir, for n = 1, 2, … to the last."""
    found: set[int] = set()
    for fatal_event in range(1, 500):
        root = tmp_path / str(fatal_event)
        save(CheckpointStore(root, keep=1), 1)
        child = os.fork()
        if child == 0:
            _save_and_die(root, fatal_event)
        _, status = os.waitpid(child, 0)
        found.add(assert_whole(root, (1, 2)))
        assert save(CheckpointStore(root, keep=1), 3).name == "v000003"
        assert folders(root) == ["v000003"]
        shutil.rmtree(root)
        if not os.WIFSIGNALED(status):
            assert os.waitstatus_to_exitcode(status) == 0
            break
    else:
        pytest.fail("the child never got through")
    assert found == {1, 2}
    assert fatal_event > 20  # there were that many steps to die at


def _save_and_die(root: Path, fatal_event: int) -> None:
    events = 0

    def count(event: str, args: tuple[Any, ...]) -> None:
        nonlocal events
        if event.startswith(("open", "os.", "shutil.")):
            events += 1
            if events == fatal_event:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    save(CheckpointStore(root, keep=1), 2)
    os._exit(0)


def _start(script: str, *arguments: str, prefix: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*prefix, sys.executable, "-c", textwrap.dedent(script), *arguments],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_kill_9_at_random_times_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    script = """
        import sys
        from pathlib import Path
        from orchestrator.checkpoint import CheckpointStore

        store = CheckpointStore(Path(sys.argv[1]), keep=1)
        latest = store.latest()
        for version in range(latest.version + 1 if latest else 1, 10_000):
            with store.saving(version) as staging:
                (staging / "rank0.bin").write_bytes(version.to_bytes(4, "big") * 250_000)
                store.commit(version, {"version": version})
            print(version, flush=True)
    """
    generator = random.Random(0)
    newest = 0
    for _ in range(3):
        process = _start(script, str(tmp_path))
        assert process.stdout is not None
        committed = int(process.stdout.readline())
        assert committed == newest + 1
        time.sleep(generator.uniform(0, 0.1))
        process.kill()
        committed = max([committed, *map(int, process.communicate()[0].split())])
        latest = CheckpointStore(tmp_path, keep=1).latest()
        assert latest is not None
        assert latest.version in (committed, committed + 1)
        assert latest.run_state == {"version": latest.version}
        assert (latest.path / "rank0.bin").read_bytes() == latest.version.to_bytes(4, "big") * 250_000
        newest = latest.version


SAVE_TWO = """
    import sys
    from pathlib import Path
    from orchestrator.checkpoint import CheckpointError, CheckpointStore

    store = CheckpointStore(Path(sys.argv[1]), keep=1)
    def save(version, size, state):
        with store.saving(version) as staging:
            (staging / "rank0.bin").write_bytes(b"x" * size)
            store.commit(version, state)

    save(1, 1_000_000, {})
    for size, state in [(3_000_000, {}), (900_000, {"big": "y" * 3_000_000})]:
        try:
            save(2, size, state)
        except CheckpointError as error:
            print(error)
        assert [p.name for p in store.latest().path.parent.iterdir()] == ["v000001"]
    print("version", store.latest().version)
"""


def test_a_really_full_disk(tmp_path: Path) -> None:
    """On a 2.4 MB tmpfs in a mount namespace of its own: first a rank's write fails, then the driver's."""
    mount_and_run = 'mount -t tmpfs -o size=2400k none "$0" && "$@"'
    prefix = ("unshare", "--mount", "--map-root-user", "sh", "-c", mount_and_run)
    if shutil.which("unshare") is None or subprocess.run([*prefix, str(tmp_path), "true"]).returncode != 0:
        pytest.skip("this machine does not let us mount a small file system")
    output, _ = _start(SAVE_TWO, str(tmp_path / "checkpoints"), prefix=(*prefix, str(tmp_path))).communicate()
    lines = output.splitlines()
    assert lines[-1] == "version 1", output
    assert len(lines) == 3
    for line in lines[:2]:
        assert "No space left on device" in line
        assert str(tmp_path / "checkpoints") in line
        assert "the previous checkpoint takes 1000" in line


def test_a_file_size_limit(tmp_path: Path) -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, 2_000_000))\n"
    output, _ = _start(limit + textwrap.dedent(SAVE_TWO), str(tmp_path)).communicate()
    lines = output.splitlines()
    assert lines[-1] == "version 1", output
    assert len(lines) == 3
    assert all("File too large" in line for line in lines[:2])


def run_versions(cadence: Cadence, total: int, start: int = 0, done: int | None = None) -> list[int]:
    """The versions at which it happens in a loop from `start` to `total` that asks once more at its end."""
    happened = []
    for version in range(start, total + 1):
        if cadence.due(version, done):
            happened.append(version)
            done = version
    if cadence.due(total, done, ended=True):
        happened.append(total)
    return happened


def test_f32_the_last_version_is_saved_and_evaluated_once() -> None:
    assert run_versions(Cadence(10, at_start=False, at_end=True), 25) == [10, 20, 25]
    assert run_versions(Cadence(5, at_start=False, at_end=True), 25) == [5, 10, 15, 20, 25]


def test_zero_means_only_at_the_ends_that_are_asked_for() -> None:
    assert run_versions(Cadence(0, at_start=True, at_end=True), 25) == [0, 25]
    assert run_versions(Cadence(0, at_start=False, at_end=False), 25) == []
    assert run_versions(Cadence(10, at_start=False, at_end=False), 25) == [10, 20]
    with pytest.raises(ValueError, match="got -1"):
        Cadence(-1, at_start=False, at_end=False)


def test_f31_a_resume_does_not_evaluate_again_what_was_evaluated() -> None:
    cadence = Cadence(10, at_start=True, at_end=True)
    assert run_versions(cadence, 25) == [0, 10, 20, 25]
    assert run_versions(cadence, 25, start=10, done=10) == [20, 25]
    assert run_versions(cadence, 25, start=10, done=0) == [10, 20, 25]  # it crashed before the evaluation
    assert run_versions(cadence, 25, start=15, done=10) == [20, 25]
    assert run_versions(cadence, 25, start=25, done=25) == []
    assert run_versions(cadence, 40, start=25, done=25) == [30, 40]


def test_random_states_survive_json() -> None:
    python_before, numpy_before = random.getstate(), np.random.get_state()
    try:
        random.seed(5)
        np.random.seed(5)
        random.gauss(0, 1)
        np.random.normal()  # leaves a second normal number cached
        state = json.loads(json.dumps(rng_state()))
        expected = [random.gauss(0, 1), random.random(), *np.random.normal(size=3), np.random.randint(1000)]
        random.seed(6)
        np.random.seed(6)
        restore_rng(state)
        assert expected == [
            random.gauss(0, 1),
            random.random(),
            *np.random.normal(size=3),
            np.random.randint(1000),
        ]
    finally:
        random.setstate(python_before)
        np.random.set_state(numpy_before)
