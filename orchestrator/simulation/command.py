"""`headway simulate`: from overrides to simulations, a table, `result.json` and a page of plots.

    headway simulate [group.key=value ...]                            one setting, beside the synchronous ones of the same GPUs
    headway simulate simulate.advise=true ...                         a search for the best use of these GPUs
    headway simulate --multirun staleness.max=0,1,2,4 ...             a sweep by Hydra: any of its sweepers and launchers

The configuration is the preset `simulation` unless an `experiment=` is given, or that of the run in `simulate.from_run`. Nothing
here imports Ray, torch or vLLM. Raises ConfigError for what can't be used.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import rich.console
from omegaconf import DictConfig, OmegaConf
from rich.measure import Measurement
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from orchestrator.checks import validate_simulation
from orchestrator.compose import CONF_DIR, changed, flat, given, is_own_key, load, refuse_unknown
from orchestrator.config import Config, ConfigError
from orchestrator.durable import write_json
from orchestrator.simulation.advice import Advice, advise
from orchestrator.simulation.hardware import Machines, Roofline
from orchestrator.simulation.page import write_page
from orchestrator.simulation.report import Report, table
from orchestrator.simulation.scenario import Scenario
from orchestrator.simulation.simulator import simulate
from orchestrator.simulation.types import SUMMARY, SimulationResult

logger = logging.getLogger(__name__)

RESULT, PAGE = "result.json", "report.html"
REFERENCE_STEPS = 30  # of the synchronous settings, for comparison; their steps hardly differ
FITTED = tuple(
    f"simulate.{key}" for key in ("model", "gpu.", "workload", "score_s", "publish_s", "pause_s", "between_s")
)
FROM_RUN, OUTPUT = "simulate.from_run", "simulate.output"


def simulate_command(arguments: Sequence[str], terminal: rich.console.Console | None = None) -> Path:
    """Do what the command line says; returns the folder of the results."""
    terminal = terminal or rich.console.Console()
    flags = [argument for argument in arguments if argument.startswith("-")]
    overrides = flat(argument for argument in arguments if not argument.startswith("-"))
    if unknown := set(flags) - {"--multirun", "-m"}:
        raise ConfigError(f"{unknown.pop()}: no such flag; headway simulate has only --multirun (-m)")
    if flags:
        return _sweep(overrides, terminal)
    config = _configuration(overrides)
    folder = _output_folder(config.simulate.output)
    reports, sentence = _run(config, overrides, terminal)
    _write_result(folder, reports, sentence, overrides, 0)
    _show(folder, "headway simulate", reports, sentence, terminal)
    return folder


# Configuration


def _configuration(overrides: Sequence[str]) -> Config:
    run = given(overrides, FROM_RUN)
    if run is None:
        return load(_with_preset(overrides), validate_simulation)
    for override in overrides:
        if override.lstrip("+").startswith(FITTED):
            raise ConfigError(f"{override}: with simulate.from_run this is fitted to the run; leave it out")
    from orchestrator.simulation.recording import run_config

    return changed(run_config(Path(run).expanduser()), overrides, validate_simulation)


def _with_preset(overrides: Sequence[str]) -> list[str]:
    """The preset, unless an experiment is chosen."""
    if any(o.startswith("experiment=") for o in overrides):
        return list(overrides)
    return ["experiment=simulation", *overrides]


def _output_folder(output: str | None) -> Path:
    return Path(output or Path("simulations") / time.strftime("%Y%m%d-%H%M%S")).expanduser().resolve()


# One configuration


def _run(config: Config, overrides: Sequence[str], terminal: rich.console.Console) -> tuple[list[Report], str]:
    """The reports of its settings, the asked one first, and what there is to say about them."""
    _warn_of_what_is_left_out(config)
    own = Scenario.of(config)
    machines = _machines(config, terminal)
    with _progress(terminal) as started:
        if config.simulate.advise:
            advice = _advise(config, overrides, machines, own, started)
            return list(advice.reports), advice.sentence
        return _compare(config, machines, own, started), ""


def _machines(config: Config, terminal: rich.console.Console) -> Machines:
    if config.simulate.from_run is None:
        return Roofline(config)
    from orchestrator.simulation.fit import fit_run

    with terminal.status(f"fitting to {config.simulate.from_run}"):
        fit = fit_run(Path(config.simulate.from_run), config.simulate)
    logger.info("fitted to %s: %s", config.simulate.from_run, fit.measured)
    run = fit.recording
    if run.config.staleness.max == 0 and not run.layout.shared:
        logger.warning(
            "the run was synchronous: whether engines and learner slow each other down did not show. Where they share CPU cores, "
            "fit to a run with staleness.max=1, or set simulate.engine_speed_while_learning and learner_speed_while_generating"
        )
    return fit


def _compare(config: Config, machines: Machines, own: Scenario, started: Callable[[Scenario], None]) -> list[Report]:
    """The setting that the keys describe, and the synchronous ways to use the same GPUs."""
    seed = config.simulate.seed

    def result(scenario: Scenario, steps: int) -> SimulationResult:
        started(scenario)
        return simulate(scenario.settings(config, machines, steps=steps, seed=seed))

    references = [own.synchronous()]
    if own.layout.gpus_per_engine == 1 and config.simulate.from_run is None:
        references.append(own.taking_turns())
    asked = result(own, config.simulate.steps)
    results = {s: result(s, min(config.simulate.steps, REFERENCE_STEPS)) for s in references if s != own}
    synchronous = [r.mean_step_s for s, r in {**results, own: asked}.items() if s.staleness == 0 and r.starved is None]
    synchronous_s = min(synchronous, default=math.nan)
    return [
        Report.of("asked", own, asked, synchronous_s),
        *(Report.of("synchronous", s, r, synchronous_s) for s, r in results.items()),
    ]


def _advise(
    config: Config, overrides: Sequence[str], machines: Machines, own: Scenario, started: Callable[[Scenario], None]
) -> Advice:
    # The preset's staleness is no wish; and what a run showed of devices that both sides share holds for these alone.
    most = own.staleness if given(overrides, "staleness.max") is not None else None
    splits = config.simulate.from_run is None or not own.layout.shared
    return advise(config, machines, own, most_staleness=most, splits=splits, tried=started)


def _warn_of_what_is_left_out(config: Config) -> None:
    s = config.sampling
    ignored = {
        "staleness.adaptive": config.staleness.adaptive,
        "sampling.early_stop": s.early_stop.after_s is not None,
        "sampling.difficulty.sampler": s.difficulty.sampler,
    }
    for key, used in ignored.items():
        if used:
            logger.warning("%s is not simulated: the run is simulated as if it were off", key)


# A sweep


def _sweep(overrides: Sequence[str], terminal: rich.console.Console) -> Path:
    """Hydra's own multirun, one simulation a job, and in the end one table and one page over all of them."""
    folder = _output_folder(given(overrides, OUTPUT))
    ours = [o for o in overrides if not _is_hydras(o)]
    refuse_unknown(ours)
    if any(o.lstrip("+").startswith("hydra.sweep.dir=") for o in overrides):
        raise ConfigError("hydra.sweep.dir: give simulate.output, the folder of all results of a sweep")
    if any(folder.rglob(RESULT)):
        raise ConfigError(f"simulate.output={folder}: it holds results already; give a sweep a folder of its own")
    if given(ours, FROM_RUN) is None:
        ours = _with_preset(ours)
    _multirun(
        [
            "--multirun",
            f'hydra.sweep.dir="{folder}"',
            "hydra/job_logging=none",  # the loggers are set up
            "hydra/hydra_logging=none",
            *(o for o in ours if not is_own_key(o)),  # of no account here, and Hydra itself would refuse them
            *(o for o in overrides if _is_hydras(o)),
        ]
    )
    jobs = [json.loads(path.read_text()) for path in folder.rglob(f"*/{RESULT}")]
    jobs.sort(key=lambda job: job["job"])
    common = set.intersection(*(set(job["overrides"]) for job in jobs)) if jobs else set()
    reports = [
        dataclasses.replace(
            Report.from_json(job["reports"][0]), name=", ".join(o for o in job["overrides"] if o not in common) or "-"
        )
        for job in jobs
    ]
    _write_result(folder, reports, "", [], 0)
    _show(folder, "headway simulate --multirun", reports, "", terminal)
    return folder


def _multirun(arguments: Sequence[str]) -> None:
    """Let Hydra run `_job` for every combination. Raises ConfigError for what Hydra refuses, and what a job raised."""
    import hydra
    from hydra.core.config_store import ConfigStore
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    ConfigStore.instance().store("schema", node=Config)
    GlobalHydra.instance().clear()
    decorated = hydra.main(config_path=str(CONF_DIR), config_name="config", version_base="1.3")(_job)
    before = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = ["headway", *arguments]  # where Hydra looks for them
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors are raised, not printed
    try:
        decorated()
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(f"{error}\n{error.__cause__ or ''}".strip()) from error
    finally:
        sys.argv = before[0]
        if before[1] is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = before[1]
        GlobalHydra.instance().clear()


def _job(composed: DictConfig) -> float:
    """One job of a sweep: its configuration is what Hydra composed, or a run's with the job's overrides.

    Returns the mean step time, which is what a sweeper that optimises would minimise.
    """
    from hydra.core.hydra_config import HydraConfig

    job = HydraConfig.get()
    overrides = flat(job.overrides.task)
    if composed.simulate.from_run is None:
        config = OmegaConf.to_object(composed)
        assert isinstance(config, Config)
        validate_simulation(config)
    else:
        config = _configuration(overrides)
    reports, sentence = _run(config, overrides, rich.console.Console(stderr=True))
    _write_result(Path(job.runtime.output_dir), reports, sentence, overrides, job.job.num)
    return reports[0].summary["mean_step_s"]


def _is_hydras(override: str) -> bool:
    return override.lstrip("+~").startswith(("hydra.", "hydra/"))


# Results


def _write_result(folder: Path, reports: Sequence[Report], sentence: str, overrides: Sequence[str], job: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    result = {
        "job": job,
        "overrides": list(overrides),
        "advice": sentence,
        "meaning": dict(SUMMARY),
        "reports": [report.to_json() for report in reports],
    }
    write_json(folder / RESULT, result)


def _show(folder: Path, title: str, reports: Sequence[Report], sentence: str, terminal: rich.console.Console) -> None:
    write_page(folder / PAGE, title, reports, advice=sentence)
    view = table(reports, title)
    needed = Measurement.get(terminal, terminal.options.update(max_width=10_000), view).maximum
    terminal.width = max(terminal.width, needed)  # broken lines can be read, broken cells can't
    terminal.print(view)
    for report in reports:
        if report.starved:
            terminal.print(f"{report.name}: {report.starved}", style="yellow", markup=False)
    if sentence:
        terminal.print(sentence, style="bold", markup=False)
    terminal.print(f"{folder / PAGE}, {folder / RESULT}", markup=False, soft_wrap=True)


@contextmanager
def _progress(terminal: rich.console.Console) -> Iterator[Callable[[Scenario], None]]:
    """Shows which setting is being simulated; the yielded function says it."""
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=terminal, transient=True, disable=not terminal.is_terminal) as progress:
        task = progress.add_task("")
        count = itertools.count(1)

        def started(scenario: Scenario) -> None:
            text = f"simulation {next(count)}: {scenario.gpus} GPUs, staleness.max={scenario.staleness}"
            progress.update(task, description=text)

        yield started
