"""`headway doctor` from its configuration to its results: `doctor.json`, and a table for a person.

Nothing heavy is imported before the actors start, so that what can be wrong without them is said at once.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from orchestrator.config import Config
from orchestrator.console import Console
from orchestrator.doctor_checks import Check, Verdict
from orchestrator.durable import write_json
from orchestrator.prepare import Prepared

logger = logging.getLogger(__name__)

REPORT = "doctor.json"
BATCHES = 2  # the second one shows that the weights of the first arrived
# Of the throw-away updates. The first step of Adam moves every parameter by about so much: a warm-up's rate would be lost in
# bfloat16, and a rate at which training is bold says little about the direction of a gradient.
LEARNING_RATE, LORA_LEARNING_RATE = 1e-5, 1e-4


def for_doctor(config: Config) -> Config:
    """The configuration that the parts see: the run's, but for what is said here."""
    c = config
    return dataclasses.replace(
        c,
        run=dataclasses.replace(c.run, batches=BATCHES),
        data=dataclasses.replace(c.data, eval={}, epochs=None),
        reward=dataclasses.replace(c.reward, watch=dataclasses.replace(c.reward.watch, share=0.0)),
        # The canary is a check of its own here.
        rollout=dataclasses.replace(c.rollout, weights=dataclasses.replace(c.rollout.weights, canary=False)),
        sampling=dataclasses.replace(
            c.sampling,
            groups_per_batch=min(c.doctor.groups, c.sampling.groups_per_batch),
            on_starved="shrink",
            early_stop=dataclasses.replace(c.sampling.early_stop, after_s=None),
            difficulty=dataclasses.replace(c.sampling.difficulty, sampler=False),
        ),
        # Synchronous: the second batch is all of the new version.
        staleness=dataclasses.replace(c.staleness, max=0, adaptive=False),
        algorithm=dataclasses.replace(c.algorithm, updates_per_batch=1, epochs_per_batch=1),
        learner=dataclasses.replace(
            c.learner,
            learning_rate=LORA_LEARNING_RATE if c.model.lora.rank else LEARNING_RATE,
            warmup_steps=0,
            schedule="constant",
        ),
        checkpoint=dataclasses.replace(c.checkpoint, resume="never", every_batches=0),
        eval=dataclasses.replace(c.eval, at_start=False, at_end=False, every_batches=0),
    )


def doctor_folder(config: Config) -> Path:
    """Where the results are, or will be."""
    return Path(config.doctor.out or Path(config.run.dir) / (config.run.name or "") / "doctor").resolve()


async def carry_out(prepared: Prepared, asked: Config, folder: Path) -> list[Check]:
    """Start the actors of `prepared`, examine them and write the report to `folder`; `asked` is what the user configured."""
    from orchestrator.cluster import Cluster
    from orchestrator.doctor import Doctor

    changed = asyncio.Event()
    with Console(BATCHES, asked.logging.console, title="headway doctor") as console:  # type: ignore[arg-type]
        logger.info("starting engines and learner")
        async with Cluster(prepared, on_change=changed.set) as cluster:
            cluster.link_logs(folder / "logs")
            found = await Doctor(prepared, asked, cluster, folder, console=console, changed=changed).examine()
    write_json(
        folder / REPORT,
        {"passed": all(check.passed for check in found), "checks": [dataclasses.asdict(check) for check in found]},
    )
    return found


def table(found: Sequence[Check]) -> Table:
    """For a person: one row per check; what to do stands under those that failed."""
    view = Table(title=Text("headway doctor"), box=SIMPLE_HEAD)
    for heading in ("check", "", "measured", "limit"):
        view.add_column(heading)
    styles = {Verdict.PASS: "green", Verdict.FAIL: "bold red", Verdict.SKIPPED: "yellow"}
    for check in found:
        measured = Text(check.measured)
        if check.verdict is Verdict.FAIL and check.advice:
            measured.append(f"\n-> {check.advice}", style="bold")
        view.add_row(
            Text(check.name), Text(check.verdict.value, style=styles[check.verdict]), measured, Text(check.limit)
        )
    return view
