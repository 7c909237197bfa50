"""Checkpoints of a run: written aside, complete or invisible, the old kept until the new is whole.

The checkpoint at version V holds the state after V publishes: what the learner ranks wrote, and the driver's
run state (a JSON object: prompt frontier, random states, counters). Layout:

    checkpoints/v000012/           complete.json (marker and manifest), run_state.json, what the ranks wrote
    checkpoints/v000014.staging/   being written, or left by a crash

Invariants
- A checkpoint is whole when its marker is there and every file of the manifest has its size. The marker is
  written last, after everything else was synced to disk, and only a whole folder gets its final name.
- Nothing whole is deleted before `keep` newer ones are whole. So at every instant, kill -9 and a full disk
  included, `latest` finds the newest checkpoint that was ever committed.
- No name contains "=", so every path can be typed on a Hydra command line.

A save, which removes its staging folder and explains disk errors if anything in the block fails:

    with store.saving(version) as staging:
        ...                                  # every rank writes below `staging`, which all nodes must share
        store.commit(version, run_state)

The journal of every version below V must be on disk before V is committed (see `orchestrator.journal`).
"""

from __future__ import annotations

import json
import logging
import random
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from orchestrator.durable import bytes_free, sync_file, sync_folder, write_json

logger = logging.getLogger(__name__)

MARKER = "complete.json"
RUN_STATE = "run_state.json"
STAGING_SUFFIX = ".staging"
_NAME = re.compile(r"v(\d{6,})")


class CheckpointError(RuntimeError):
    """A checkpoint could not be written. The ones that were there before still are, and are whole."""


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint: the folder `path` holds the state after `version` publishes."""

    version: int
    path: Path
    run_state: dict[str, Any]


class CheckpointStore:
    """The checkpoints of one run; the newest `keep` stay. One process writes, anyone may call `latest`."""

    def __init__(self, root: Path, keep: int) -> None:
        if keep < 1:
            raise ValueError(f"checkpoint.keep must be at least 1, got {keep}")
        self._root = root
        self._keep = keep
        self._staged: int | None = None

    @contextmanager
    def saving(self, version: int) -> Iterator[Path]:
        """Stage `version` and yield its folder; if the block raises, the folder is removed.

        An OSError becomes a CheckpointError with the folder and the bytes needed and free. Other errors pass
        with the same as a note: torch reports a full disk as a RuntimeError.
        """
        staging = self.stage(version)
        with self._guard(version):
            yield staging

    def stage(self, version: int) -> Path:
        """An empty folder for the files of `version`. What earlier crashes left in staging is removed.

        Raises CheckpointError when another version is staged, or `version` is there already and whole.
        """
        if self._staged is not None:
            raise CheckpointError(
                f"version {self._staged} is still being written in {self._staging(self._staged)}; "
                f"commit or abandon it before staging version {version}"
            )
        if self._read(version, self._folder(version)) is not None:
            raise CheckpointError(f"a whole checkpoint of version {version} exists: {self._folder(version)}")
        staging = self._staging(version)
        with self._guard(version):
            self._root.mkdir(parents=True, exist_ok=True)
            for leftover in self._root.glob(f"*{STAGING_SUFFIX}"):
                logger.warning("removing %s, left by a save that did not finish", leftover)
                shutil.rmtree(leftover)
            staging.mkdir()
        self._staged = version
        return staging

    def commit(self, version: int, run_state: dict[str, Any], written: Iterable[str] = ()) -> Path:
        """Make what was staged the checkpoint of `version`, then remove all but the newest `keep`.

        `run_state` must be JSON-able. `written` are the paths, relative to the staging folder, that the ranks
        say they wrote: a rank on a node that does not share the folder is found out here.

        Raises CheckpointError when a file can't be written or one of `written` is not there, TypeError when
        `run_state` is not JSON-able; staging is then removed and older checkpoints are untouched.
        """
        if self._staged != version:
            raise CheckpointError(f"version {version} is not staged in {self._root} (staged: {self._staged})")
        staging, folder = self._staging(version), self._folder(version)
        with self._guard(version):
            missing = sorted(name for name in written if not (staging / name).is_file())
            if missing:
                raise CheckpointError(
                    f"{len(missing)} files of version {version} are not in {staging} (first: {missing[0]}): "
                    f"is this folder shared by all nodes that hold learner ranks?"
                )
            write_json(staging / RUN_STATE, run_state)
            sizes: dict[str, int] = {}
            for path in sorted(staging.rglob("*")):
                if path.is_dir():
                    sync_folder(path)
                else:
                    sync_file(path)
                    sizes[path.relative_to(staging).as_posix()] = path.stat().st_size
            write_json(staging / MARKER, {"version": version, "files": sizes})
            if folder.exists():  # not whole, or `stage` had refused: a save that was damaged later
                shutil.rmtree(folder)
            staging.rename(folder)
            sync_folder(self._root)
        self._staged = None
        logger.info("checkpoint of version %d: %s (%d bytes)", version, folder, sum(sizes.values()))
        self._prune()
        return folder

    def abandon(self, version: int) -> None:
        """Remove what was staged for `version`, if anything."""
        shutil.rmtree(self._staging(version), ignore_errors=True)
        if self._staged == version:
            self._staged = None

    def latest(self) -> Checkpoint | None:
        """The newest whole checkpoint, None if there is none. Incomplete ones are skipped with a warning."""
        for version, folder in self._folders():
            checkpoint = self._read(version, folder)
            if checkpoint is not None:
                return checkpoint
        return None

    def versions(self) -> list[int]:
        """The versions of all whole checkpoints, ascending."""
        return sorted(version for version, folder in self._folders() if self._read(version, folder) is not None)

    def at(self, version: int) -> Checkpoint | None:
        """The whole checkpoint of one version, None if there is none."""
        return self._read(version, self._folder(version))

    def _folder(self, version: int) -> Path:
        return self._root / f"v{version:06d}"

    def _staging(self, version: int) -> Path:
        return self._root / f"v{version:06d}{STAGING_SUFFIX}"

    def _folders(self) -> list[tuple[int, Path]]:
        """Everything that is named as a checkpoint, newest first."""
        if not self._root.is_dir():
            return []
        matches = ((_NAME.fullmatch(path.name), path) for path in self._root.iterdir())
        return sorted(((int(match[1]), path) for match, path in matches if match and path.is_dir()), reverse=True)

    def _read(self, version: int, folder: Path) -> Checkpoint | None:
        """The checkpoint in `folder` if it is whole; otherwise None, and a warning that says why.

        An OSError other than a missing file passes: it says nothing about what the folder holds.
        """
        if not folder.exists():
            return None
        try:
            marker = json.loads((folder / MARKER).read_bytes())
            for name, size in marker["files"].items():
                found = (folder / name).stat().st_size
                if found != size:
                    raise ValueError(f"{name} has {found} bytes, expected {size}")
            if marker["version"] != version:
                raise ValueError(f"{MARKER} says version {marker['version']}")
            return Checkpoint(version, folder, json.loads((folder / RUN_STATE).read_bytes()))
        except (FileNotFoundError, ValueError, KeyError) as error:
            logger.warning("skipping %s, not a whole checkpoint: %s", folder, error)
            return None

    def _prune(self) -> None:
        """Remove all but the newest `keep` whole checkpoints. A failure costs space, not the run."""
        whole = 0
        for version, folder in self._folders():
            try:
                if whole < self._keep and self._read(version, folder) is not None:
                    whole += 1
                else:
                    shutil.rmtree(folder)
            except OSError as error:  # NFS keeps open files under another name for a while
                logger.warning("could not remove the old checkpoint %s: %s", folder, error)

    @contextmanager
    def _guard(self, version: int) -> Iterator[None]:
        """Whatever ends the block with an error also removes the staging folder."""
        try:
            yield
        except CheckpointError:
            self.abandon(version)
            raise
        except OSError as error:
            space = self._space(version)
            self.abandon(version)
            reason = getattr(error, "cause", None) or error  # an actor's error has its whole traceback in its text
            raise CheckpointError(
                f"the checkpoint of version {version} could not be written to {self._root}: {reason}; "
                f"{space}; older checkpoints there are untouched"
            ) from error
        except BaseException as error:
            place = f"while writing the checkpoint of version {version} to {self._root}"
            error.add_note(f"{place}: {self._space(version)}")
            self.abandon(version)
            raise

    def _space(self, version: int) -> str:
        """Bytes needed, as far as known, and free."""
        written = _folder_bytes(self._staging(version))
        previous = next((_folder_bytes(folder) for _, folder in self._folders()), None)
        needed = "" if previous is None else f"the previous checkpoint takes {previous} bytes, "
        return f"{needed}{written} bytes of this one were written, {bytes_free(self._root)} bytes are free"


def _folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@dataclass(frozen=True)
class Cadence:
    """At which versions something periodic (a save, an evaluation) happens.

    Every `every` versions (0: not periodically), at version 0 if `at_start`, where the run ends if `at_end`.
    """

    every: int
    at_start: bool
    at_end: bool

    def __post_init__(self) -> None:
        if self.every < 0:
            raise ValueError(f"a cadence must be 0 (not periodically) or more versions, got {self.every}")

    def due(self, version: int, done: int | None, *, ended: bool = False) -> bool:
        """Whether it is due at `version`, when it last happened at version `done` (None: never).

        Keep `done` in the run state: then a resume repeats nothing that the surviving run has done. `ended`:
        no further version will come, because the batches or the data ran out. Version 0 is only ever a start.
        """
        if done is not None and done >= version:
            return False
        if version == 0:
            return self.at_start
        return (self.every > 0 and version % self.every == 0) or (ended and self.at_end)


def rng_state() -> dict[str, Any]:
    """State of Python's and NumPy's global generators in this process, JSON-able."""
    version, internal, gauss_next = random.getstate()
    numpy_state = np.random.get_state(legacy=False)
    assert isinstance(numpy_state, dict)  # legacy=False
    key = [int(word) for word in numpy_state["state"]["key"]]
    return {
        "python": [version, list(internal), gauss_next],
        "numpy": {**numpy_state, "state": {"key": key, "pos": int(numpy_state["state"]["pos"])}},
    }


def restore_rng(state: dict[str, Any]) -> None:
    """Put Python's and NumPy's global generators into a state that `rng_state` returned."""
    version, internal, gauss_next = state["python"]
    random.setstate((version, tuple(internal), gauss_next))
    numpy_state = state["numpy"]
    key = np.asarray(numpy_state["state"]["key"], dtype=np.uint32)
    np.random.set_state({**numpy_state, "state": {"key": key, "pos": numpy_state["state"]["pos"]}})
