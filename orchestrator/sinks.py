"""How metrics are recorded: into a file of JSON lines, which is the truth, and into Weights & Biases, a view.

The recorder refuses names that the catalogue lacks and values that are not numbers. A number that is not
finite is recorded as null with a warning: a NaN is shown, and stops nothing.

`metrics.jsonl` is append-only, one write a line. A process start of a run opens a lineage with a line
`{"lineage": L, "resumed_from": V or null, "time": ...}`; every other line is one record. A resume from
version V takes back what earlier lineages recorded beyond V: their lines stay in the file, and `read_metrics`
leaves them out. A last line that was cut short by a kill is cut off when the file is next opened.

W&B gets each record on a thread of its own behind a bounded queue: once it has started, the training loop
neither waits for it nor fails with it. Every point carries `policy_version` as its x-axis, because W&B's own
step starts again at 0 in the second folder of an offline run and must not decide what is kept. A resumed run
keeps its id: the resumed points are appended (`lineage` tells them apart), none is dropped.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import numbers
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol, TypeAlias

from orchestrator.durable import cut_off_half_line
from orchestrator.metrics import find

logger = logging.getLogger(__name__)

Record: TypeAlias = dict[str, float | int | None]


class Sink(Protocol):
    """Takes records, one by one."""

    def write(self, record: Record) -> None: ...

    def close(self, failed: bool) -> None: ...


class Recorder:
    """Gives each record its bookkeeping, refuses what the catalogue lacks, hands the rest to every sink.

    Every `log` is one record. A context manager: leaving it closes the sinks, as failed after an error.
    """

    def __init__(self, sinks: Sequence[Sink], *, lineage: int = 0, clock: Callable[[], float] = time.time) -> None:
        self._sinks = tuple(sinks)
        self._lineage = lineage
        self._clock = clock

    def log(self, policy_version: int, values: Mapping[str, float]) -> Record:
        """Records values at a version and returns the record. All or nothing: a refused value writes nothing.

        Raises UnknownMetricError for a name that is not in the catalogue, TypeError for a value that is not a
        number (booleans and one-element tensors are not), ValueError for a negative version.
        """
        if policy_version < 0:
            raise ValueError(f"policy_version must be 0 or more, got {policy_version}")
        record: Record = {
            "policy_version": int(policy_version),
            "time": self._clock(),
            "lineage": self._lineage,
        }
        for name, value in values.items():
            find(name)
            record[name] = _number(name, value)
        not_finite = [name for name, value in record.items() if value is None]
        if not_finite:
            logger.warning(
                "not finite at policy_version %d, recorded as null: %s", policy_version, ", ".join(not_finite)
            )
        for sink in self._sinks:
            sink.write(record)
        return record

    def close(self, failed: bool = False) -> None:
        for sink in self._sinks:
            sink.close(failed)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(failed=kind is not None)


def _number(name: str, value: object) -> float | int | None:
    """A plain number, None if it is not finite. numpy's scalars count as numbers."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"metric {name!r} must be a number, got {type(value).__name__}: {value!r}")
    if isinstance(value, numbers.Integral):
        return int(value)
    number = float(value)
    return number if math.isfinite(number) else None


class JsonlSink:
    """Appends records to a file of JSON lines. Opening it writes the line that opens the lineage.

    `resumed_from` is the version of the checkpoint that this process continues from, None if it starts from
    nothing (which takes back all that earlier lineages recorded).
    """

    def __init__(self, path: Path, *, lineage: int, resumed_from: int | None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        cut_off_half_line(path)
        self._file = path.open("ab", buffering=0)  # a line is one write: a kill leaves it whole or is repaired
        self._append({"lineage": lineage, "resumed_from": resumed_from, "time": time.time()})

    def write(self, record: Record) -> None:
        self._append(record)

    def close(self, failed: bool) -> None:
        """Closes the file; nothing in it depends on how the run ended."""
        self._file.close()

    def _append(self, line: Mapping[str, object]) -> None:
        self._file.write(json.dumps(line, allow_nan=False).encode() + b"\n")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of the surviving lineage, in the order they were written.

    A record survives unless a later lineage resumed from a version before it. Safe while a run is writing: an
    unfinished last line is left out. Raises ValueError, with file and line number, for any other bad line.
    """
    *lines, _unfinished = path.read_bytes().split(b"\n")
    records: list[tuple[int, int, dict[str, Any]]] = []
    resumed_from: dict[int, int] = {}
    for number, line in enumerate(lines, start=1):
        try:
            entry = json.loads(line)
            if "resumed_from" in entry:
                version = entry["resumed_from"]
                resumed_from[entry["lineage"]] = -1 if version is None else version
            else:
                records.append((entry["lineage"], entry["policy_version"], entry))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}, line {number}: not a metric record: {line[:80]!r}") from error

    def survives(lineage: int, policy_version: int) -> bool:
        return all(policy_version <= version for later, version in resumed_from.items() if later > lineage)

    return [entry for lineage, policy_version, entry in records if survives(lineage, policy_version)]


WandbMode: TypeAlias = Literal["auto", "online", "offline", "disabled"]


class WandbError(RuntimeError):
    """W&B did not start."""


class WandbSink:
    """One W&B run under `run_dir/wandb`. Give a resumed run the `run_id` it began with.

    `auto` is `$WANDB_MODE` where that is set, else online where the user is logged in, else offline (no
    account, no network; `wandb sync runs/NAME/wandb/offline-run-*` sends it later). Construct it before the
    loop starts: that blocks until W&B answers, about `start_timeout_s` at most. Closing blocks for
    `finish_timeout_s` and a little. Raises WandbError, which says how to do without, if W&B does not start.
    """

    QUEUE_LENGTH = 1000  # records; hours of training, should the disk or W&B's own process hang

    def __init__(
        self,
        run_dir: Path,
        *,
        project: str,
        run_id: str,
        name: str,
        config: Mapping[str, Any],
        mode: WandbMode = "auto",
        start_timeout_s: float = 60.0,
        finish_timeout_s: float = 30.0,
    ) -> None:
        import wandb

        run_dir.mkdir(parents=True, exist_ok=True)
        try:
            self.mode = _resolve(mode)
            self._run = wandb.init(
                dir=run_dir,
                project=project,
                id=run_id,
                name=name,
                config=dict(config),
                mode=self.mode,
                resume="allow",
                settings=wandb.Settings(
                    init_timeout=start_timeout_s,
                    finish_timeout=finish_timeout_s,
                    finish_timeout_raises=True,
                    console="off",  # the terminal belongs to orchestrator.console
                    silent=True,
                ),
            )
        except wandb.Error as error:
            raise WandbError(
                f"W&B did not start (logging.wandb={mode}, project {project!r}): {error}. "
                "logging.wandb=offline keeps its data on disk, logging.wandb=disabled does without; "
                "metrics.jsonl is written anyway"
            ) from error
        self._run.define_metric("policy_version", hidden=True)
        self._run.define_metric("*", step_metric="policy_version")
        logger.info("W&B %s: %s", self.mode, self._run.url if self.mode == "online" else run_dir / "wandb")
        self._run_dir = run_dir
        self._finish_timeout_s = finish_timeout_s
        self._missed = 0
        self._exit_code = 0
        self._jobs: queue.Queue[Callable[[], None] | None] = queue.Queue(self.QUEUE_LENGTH)
        # A daemon: a W&B that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._work, name="wandb", daemon=True)
        self._thread.start()

    def write(self, record: Record) -> None:
        """Queues a record; never blocks. What W&B can't take is counted and reported."""
        values = {name: value for name, value in record.items() if value is not None}
        self._submit(lambda: self._run.log(values))

    def log_table(self, policy_version: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Queues a table, such as sample answers beside an evaluation's numbers; never blocks."""
        import wandb

        table = wandb.Table(columns=list(columns), data=[list(row) for row in rows])
        self._submit(lambda: self._run.log({"policy_version": policy_version, name: table}))

    def alert(self, title: str, text: str) -> None:
        """Queues an alert, which W&B sends on by mail or Slack as its user set up; never blocks. Titles: below 64 characters."""
        # Each comes once: W&B is not to hold it back because another one of the same title came a moment before.
        self._submit(lambda: self._run.alert(title=title, text=text, level="WARN", wait_duration=0.001))

    def close(self, failed: bool) -> None:
        """Lets W&B take what is queued, ends its run; gives up with a warning at the deadline."""
        self._exit_code = int(failed)
        deadline = time.monotonic() + 1.2 * self._finish_timeout_s  # later than W&B's own deadline
        with contextlib.suppress(queue.Full):
            self._jobs.put(None, timeout=self._finish_timeout_s)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            logger.warning(
                "W&B did not finish within %g s; its data is in %s, `wandb sync` sends it",
                self._finish_timeout_s,
                self._run_dir / "wandb",
            )
        if self._missed:
            logger.warning("W&B missed %d records; metrics.jsonl has them all", self._missed)

    def _submit(self, job: Callable[[], None]) -> None:
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            if not self._missed:
                logger.error("W&B takes no more records; training goes on, metrics.jsonl has them all")
            self._missed += 1

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:  # whatever W&B raises, it must not end its thread, nor the training
                if not self._missed:  # once is enough: the next ones have the same cause
                    logger.exception("W&B refused a record; training goes on, metrics.jsonl has it")
                self._missed += 1
        try:
            self._run.finish(exit_code=self._exit_code)
        except Exception:
            logger.exception("W&B did not finish; its data is in %s, `wandb sync` sends it", self._run_dir / "wandb")


def _resolve(mode: WandbMode) -> Literal["online", "offline", "disabled"]:
    """What `auto` comes to here. Never asks the user anything."""
    import wandb

    if mode != "auto":
        return mode
    wish = os.environ.get("WANDB_MODE", "")
    if wish in ("online", "offline", "disabled"):
        return wish  # type: ignore[return-value]
    return "online" if wandb.login(prompt=False, verify=False) else "offline"
