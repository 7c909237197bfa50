"""The Python entry: `train`, `evaluate`, `profile_difficulty` and `check_rewards`, which the command line calls as well.

from orchestrator import train

def reward(completion, answer):
    return float(answer in completion)

result = train(model="builtin:smollm2_135m", data="rows.jsonl", reward=reward, overrides=["run.batches=30"])
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import json
import logging
import secrets
import shlex
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from orchestrator.checkpoint import Checkpoint, CheckpointStore
from orchestrator.compose import flat, literal, load
from orchestrator.config import Config, ConfigError, SourceConfig
from orchestrator.console import Console
from orchestrator.durable import whole_file, write_json
from orchestrator.evaluation import Evaluator, SetResult, metrics_of, table
from orchestrator.journal import JOURNAL, begin_lineage
from orchestrator.prepare import Prepared, UserReward, prepare, prepare_task, source_of
from orchestrator.profile import (
    Measured,
    Profiler,
    RateLog,
    count,
    for_profile,
    in_order,
    profile_folder,
    settings_of,
)
from orchestrator.profile_report import (
    SUMMARY,
    SourceProfile,
    refuse_nothing,
    refuse_unwritable,
    shares_table,
    train_on,
    write_results,
)
from orchestrator.progress import Progress
from orchestrator.resume import begun, to_resume
from orchestrator.reward_check import RewardCheck, check_folder, drawn, refuse_unknown_columns
from orchestrator.reward_check_report import PAGE, Report, log_lines
from orchestrator.reward_findings import find
from orchestrator.sinks import JsonlSink, Recorder, WandbSink

if TYPE_CHECKING:
    from rich.table import Table

    from orchestrator.doctor_checks import Check
    from orchestrator.replay import Replay

logger = logging.getLogger(__name__)

Overrides = Iterable[str] | Mapping[str, Any]

TABLE_WIDTH = 140  # characters
_NOTE = "Its traceback is in "


@dataclass(frozen=True)
class RunResult:
    """`evaluations` are the last ones of the run, one per set."""

    run_dir: Path
    model_dir: Path
    evaluations: list[SetResult]


def train(
    model: str | None = None,
    data: Any = None,
    reward: UserReward | None = None,
    overrides: Overrides = (),
) -> RunResult:
    """Train a model; returns when the run has ended.

    `model` is a folder, hub id or builtin; `data` a path (or a mapping of names to paths) of JSONL or Parquet rows with a
    `prompt` column; `reward` a function, or several, of arguments named after what they need. What is not given comes from
    the configuration, where `overrides` are Hydra overrides, as a list of texts or a mapping of keys to values. Raises
    ConfigError before anything starts where the mistake can be known by then.
    """
    config = configured(model, data, overrides)
    # Before the event loop: converting a model takes a while, and Ctrl-C must reach it.
    return _run(_train(prepare(config, reward)))


def evaluate(
    model: str | None = None, data: Any = None, reward: UserReward | None = None, overrides: Overrides = ()
) -> list[SetResult]:
    """Evaluate a model on `data` (default: data.eval) with eval.checker, or with `reward` where one is given."""
    config = configured(model, None, overrides)
    if data is not None:
        config.data.eval = source_of(data)
    if reward is not None:
        config.eval.checker = None
    if not config.data.eval:
        raise ConfigError("data.eval: no set to evaluate; give data.eval.NAME.path or data.eval.NAME.generator")
    return _run(_evaluate(prepare(config, reward, training=False)))


def profile_difficulty(
    model: str | None = None, data: Any = None, reward: UserReward | None = None, overrides: Overrides = ()
) -> dict[str, SourceConfig]:
    """Measure the pass rate of every prompt of data.train under the starting model, and copy those worth training on.

    Arguments as for `train`. Returns the copies by source, as data.train takes them; the folder `profile.out` also holds the
    pass rates, a summary and a histogram. Goes on where an earlier profile in the same folder was ended.
    """
    config = configured(model, data, overrides)
    return _run(_profile(prepare(for_profile(config), reward), config.sampling.groups_per_batch))


def doctor(
    model: str | None = None, data: Any = None, reward: UserReward | None = None, overrides: Overrides = ()
) -> list[Check]:
    """Try out every part of a run before the run: engines, rewards, learner, weights. Arguments as for `train`.

    Returns the checks, which are also in `doctor.json` in the folder `doctor.out`.
    """
    from orchestrator.doctor_command import for_doctor

    config = configured(model, data, overrides)
    return _run(_doctor(prepare(for_doctor(config), reward), config))


def replay(
    run: str | Path | None = None,
    version: int | None = None,
    *,
    forward: bool = False,
    overrides: Overrides = (),
) -> Replay:
    """Compute the step of a run that led from `version` to the next one again, from the journal in the folder `run`.

    The arguments are the keys `replay.*`, whose overrides may stand for them. Nothing is written but, with `forward`, a log.
    """
    from orchestrator.replay_command import configuration

    texts = _texts(overrides)
    texts += [] if run is None else [f"replay.run={literal(run)}"]
    texts += [] if version is None else [f"replay.version={version}"]
    texts += ["replay.forward=true"] if forward else []
    config = configuration(texts)
    assert config.replay.run is not None
    return _run(_replay(config, Path(config.replay.run).resolve()))


def _texts(overrides: Overrides) -> list[str]:
    """Overrides in Hydra's grammar."""
    if isinstance(overrides, Mapping):
        return [f"{key}={literal(value)}" for key, value in overrides.items()]
    if isinstance(overrides, str) or not isinstance(overrides, Iterable):
        raise ConfigError(
            f"overrides={overrides!r}: expected a list of texts, key=value, or a mapping of keys to values"
        )
    return list(overrides)


def check_rewards(data: Any = None, reward: UserReward | None = None, overrides: Overrides = ()) -> Report:
    """Judge answers of known quality with the rewards and the checker of a task, before anything is trained on them.

    Arguments as for `train`; no model is loaded. Returns the report, which is also in the folder `check_rewards.out`; its
    `clean` says that no gold failed and nothing was paid that must not be.
    """
    config = configured(None, data, overrides)
    task = prepare_task(config, reward, lambda source: drawn(source, config), config.check_rewards.sets)
    refuse_unknown_columns(task, config.check_rewards)
    folder = check_folder(config)
    with (
        _owned(folder, f"check_rewards.out={folder}"),
        _log_file(folder / "logs" / "driver.log", config.logging.level),
    ):
        rows = sum(map(len, [*task.train, *task.evaluation]))
        progress = Progress(rows, "rows", config.logging.console)  # type: ignore[arg-type]
        with progress:
            with RewardCheck(task, config, progress.advance) as check:
                checked = check.run()
            report = Report.of(checked, find(checked, config), config)
            report.write(folder, "What the rewards pay")
            for title, table in report.tables():
                progress.show_table(title, table)
            for finding in report.findings:
                logger.log(logging.ERROR if finding.level == "error" else logging.WARNING, log_lines(finding))
            logger.info("%s: %s", "clean" if report.clean else "not to be trusted yet", folder / PAGE)
    return report


def configured(model: str | None, data: Any, overrides: Overrides) -> Config:
    """The configuration that arguments and overrides come to."""
    texts = _texts(overrides)
    config = load(texts)
    if model is not None:
        config.model.path = model
    if data is not None:
        config.data.train = source_of(data)
        given = [text.lstrip("+") for text in flat(texts)]
        # The default task's held-out set and its checker say nothing about someone else's data.
        if not any(text.startswith(("data.eval", "data=")) for text in given):
            config.data.eval = {}
            if not any(text.startswith(("eval.checker", "eval=")) for text in given):
                config.eval.checker = None
    return config


def _run(coroutine: Any) -> Any:
    """Run to the end; a termination signal ends it as Ctrl-C does, so that nothing is left behind."""
    if threading.current_thread() is not threading.main_thread():  # no other one may handle signals
        return asyncio.run(coroutine)
    before = signal.getsignal(signal.SIGTERM)
    try:
        return asyncio.run(_terminable(coroutine))
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    finally:
        signal.signal(signal.SIGTERM, before)


async def _terminable(coroutine: Any) -> Any:
    """Cancelled by SIGTERM, between two steps of the event loop: an exception out of nowhere could break anything."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await coroutine


async def _train(prepared: Prepared) -> RunResult:
    config = prepared.config
    folder = _run_folder(config)
    store = CheckpointStore(folder / "checkpoints", config.checkpoint.keep)
    if not folder.exists():
        to_resume(prepared, folder, store)  # one that must be there is missed before a folder is made
    with _owned(folder, f"run.name={folder.name}"), _log_file(folder / "logs" / "driver.log", config.logging.level):
        # No other process is at work on them now, and what is said of them is in the log.
        checkpoint = to_resume(prepared, folder, store)
        return await _train_in(folder, prepared, store, checkpoint)


async def _train_in(
    folder: Path, prepared: Prepared, store: CheckpointStore, checkpoint: Checkpoint | None
) -> RunResult:
    # Heavy imports come after everything that can be wrong without them.
    from orchestrator.cluster import Cluster
    from orchestrator.derived import derived_sizes
    from orchestrator.run import Run

    config = prepared.config
    resumed_from = checkpoint.version if checkpoint else None
    lineage = begin_lineage(folder / JOURNAL, resumed_from)
    with whole_file(folder / "config.yaml") as file:
        file.write(OmegaConf.to_yaml(OmegaConf.structured(config)).encode())
    wandb = WandbSink(
        folder,
        project=config.logging.wandb_project,
        run_id=_wandb_id(folder),
        name=folder.name,
        config=dataclasses.asdict(config),
        mode=config.logging.wandb,  # type: ignore[arg-type]
    )
    jsonl = JsonlSink(folder / "metrics.jsonl", lineage=lineage, resumed_from=resumed_from)
    version = resumed_from or 0
    console = Console(config.run.batches, config.logging.console, title=folder.name, start_version=version)  # type: ignore[arg-type]
    changed = asyncio.Event()
    with console, Recorder([jsonl, wandb], lineage=lineage) as recorder:
        console.show_table(f"headway {folder}", derived_sizes(config, version))
        logger.info("starting engines and learner")
        async with Cluster(prepared, on_change=changed.set) as cluster:
            cluster.link_logs(folder / "logs")
            run = Run(
                prepared,
                cluster,
                folder=folder,
                lineage=lineage,
                checkpoint=checkpoint,
                store=store,
                recorder=recorder,
                wandb=wandb,
                console=console,
                changed=changed,
            )
            await run.execute()
        logger.info("finished: %s", folder / "model")
    return RunResult(folder, folder / "model", run.evaluations)


async def _evaluate(prepared: Prepared) -> list[SetResult]:
    config = prepared.config
    folder = _run_folder(config, exists_ok=True)
    with _log_file(folder / "logs" / "driver.log", config.logging.level):
        return await _evaluate_in(folder, prepared)


async def _evaluate_in(folder: Path, prepared: Prepared) -> list[SetResult]:
    from orchestrator.cluster import Cluster

    config = prepared.config
    with Console(1, config.logging.console, title=folder.name) as console:  # type: ignore[arg-type]
        async with Cluster(prepared, on_change=lambda: None, training=False) as cluster:
            assert cluster.checker is not None
            evaluator = Evaluator(
                config,
                prepared.evaluation,
                cluster.rollouts,
                cluster.checker,
                cluster.clerks,
                folder / "eval",
            )
            results = await evaluator.run(0)
        console.show_table(f"evaluation of {prepared.model_path}", table(results))
    sink = JsonlSink(folder / "eval" / "metrics.jsonl", lineage=0, resumed_from=None)
    with Recorder([sink]) as recorder:
        recorder.log(0, metrics_of(results))
    return results


async def _profile(prepared: Prepared, groups_per_batch: int) -> dict[str, SourceConfig]:
    config, sources = prepared.config, prepared.train
    folder = profile_folder(config)
    for source in sources:
        refuse_unwritable(source, folder)
    with (
        _owned(folder, f"profile.out={folder}"),
        _log_file(folder / "logs" / "driver.log", config.logging.level),
        RateLog(folder, settings_of(prepared)) as log,
    ):
        total = count(sources, config)
        done = sum(map(log.has_rate, in_order(sources, config))) if len(log) else 0
        progress = Progress(total, "prompts", config.logging.console, done=done)  # type: ignore[arg-type]
        with progress:
            if done < total:
                await _measure(prepared, folder, log, progress)
            band = (config.profile.band[0], config.profile.band[1])
            profiles = [SourceProfile.of(source, log, band) for source in sources]
            refuse_nothing(profiles)
            copies = write_results(profiles, folder, band, config.profile.answers_per_prompt)
            progress.show_table("pass rates, before and after", shares_table(profiles, band))
    kept = sum(len(profile.kept) for profile in profiles)
    if failed := sum(len(profile.failed) for profile in profiles):
        logger.warning("%d prompts have no pass rate and are in no figure: see %s", failed, folder / SUMMARY)
    if kept < groups_per_batch:
        logger.warning(
            "only %d prompts are in profile.band: fewer than sampling.groups_per_batch=%d", kept, groups_per_batch
        )
    logger.info("results: %s", folder)
    if (override := train_on(copies)) is not None:
        logger.info("to train on the prompts in the band:\n  headway train %s", shlex.quote(override))
    return copies


async def _measure(prepared: Prepared, folder: Path, log: RateLog, progress: Progress) -> None:
    """Measure what `log` lacks."""
    from orchestrator.cluster import Cluster

    def finished(measured: Measured) -> None:
        log.add(measured)
        progress.advance()

    logger.info("starting engines")
    todo = (prompt for prompt in in_order(prepared.train, prepared.config) if not log.has_rate(prompt))
    async with Cluster(prepared, on_change=lambda: None, training=False) as cluster:
        cluster.link_logs(folder / "logs")
        profiler = Profiler(
            prepared.config, cluster.rollouts, cluster.rewards, cluster.clerks, filter_on=prepared.filter_on
        )
        await profiler.run(todo, finished)


async def _doctor(prepared: Prepared, asked: Config) -> list[Check]:
    from orchestrator.doctor_command import REPORT, carry_out, doctor_folder, table

    folder = doctor_folder(asked)
    with (
        _owned(folder, f"doctor.out={folder}"),
        _log_file(folder / "logs" / "driver.log", asked.logging.level),
    ):
        found = await carry_out(prepared, asked, folder)
    _print(table(found))
    logger.info("the figures are in %s", folder / REPORT)
    return found


async def _replay(config: Config, folder: Path) -> Replay:
    from orchestrator.replay import table
    from orchestrator.replay_command import carry_out

    log = _log_file(folder / "logs" / "replay.log", config.logging.level) if config.replay.forward else None
    with log or contextlib.nullcontext():
        replayed = await carry_out(config, folder)
    _print(table(replayed))
    return replayed


def _print(table: Table) -> None:
    """To standard output, wide enough to be read where that is no terminal."""
    import rich.console

    terminal = rich.console.Console()
    if not terminal.is_terminal:
        terminal.width = max(terminal.width, TABLE_WIDTH)
    terminal.print(table)


def _run_folder(config: Config, *, exists_ok: bool = False) -> Path:
    name = config.run.name or time.strftime("%Y%m%d-%H%M%S")
    folder = (Path(config.run.dir) / name).resolve()
    # A start that failed before its first batch (too few cores, say) is no run yet.
    if begun(folder) and not exists_ok and config.checkpoint.resume == "never":
        raise ConfigError(
            f"run.name={name}: {folder} holds a run already; continue it with checkpoint.resume=auto or choose another name"
        )
    return folder


@contextlib.contextmanager
def _owned(folder: Path, key: str) -> Iterator[None]:
    """Two processes must not write one folder, which `key` names. The lock goes with the process, however that ends."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"{key}: another process is working on {folder}") from error
        yield


def _wandb_id(folder: Path) -> str:
    """The run's id at W&B: made once, the same after every resume."""
    file = folder / "wandb_id.json"
    if not file.exists():
        write_json(file, {"id": secrets.token_hex(4)})
    return json.loads(file.read_text())["id"]


@contextlib.contextmanager
def _log_file(file: Path, level: str) -> Iterator[None]:
    """Log into `file` as well. An error that ends the block is written there with its traceback, and notes the place."""
    file.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(file)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root, ray = logging.getLogger(), logging.getLogger("ray")  # Ray's hands nothing on to the root
    root.setLevel(level)
    for target in (root, ray):
        target.addHandler(handler)
    try:
        yield
    except BaseException as error:
        # Into the file alone: on the terminal a person reads the message.
        record = logger.makeRecord(logger.name, logging.ERROR, __file__, 0, "ended by an error", (), sys.exc_info())
        handler.handle(record)
        error.add_note(f"{_NOTE}{file}")
        raise
    finally:
        for target in (root, ray):
            target.removeHandler(handler)
        handler.close()


def traceback_file(error: BaseException) -> Path | None:
    """The log file that holds an error's traceback, None if it was raised before there was one."""
    notes = [note for note in getattr(error, "__notes__", ()) if note.startswith(_NOTE)]
    return Path(notes[-1].removeprefix(_NOTE)) if notes else None
