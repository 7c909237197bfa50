"""Simulated settings side by side: a table for the terminal, and JSON that the page of plots is drawn from.

A `Report` is what is kept of one simulation: its summary, and series over the steps, thinned to at most `SERIES_POINTS` points. It
is plain data, so that it can be written by one process and read by another (`result.json` of a sweep's jobs).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from orchestrator.simulation.scenario import Scenario
from orchestrator.simulation.types import SimulationResult

SERIES_POINTS = 300
STRIP_STEPS = 12  # of the picture of who does what when


@dataclass(frozen=True)
class Report:
    """One simulated setting.

    `speedup` is the step time of the fastest synchronous way to use the same GPUs over this one's; None where the run made no
    full step. `series` are means over bins of steps, `x` the middle of each; `phases` the first steps' (start, taken, learned,
    acknowledged, end) and `busy` the share of engines that work from each moment on, in seconds.
    """

    name: str
    gpus: str
    staleness: int
    summary: Mapping[str, float]
    speedup: float | None
    starved: str | None
    timing: Mapping[str, float]
    histogram: Sequence[float]
    series: Mapping[str, Sequence[float]]
    phases: Sequence[Sequence[float]]
    busy: Sequence[Sequence[float]]

    @classmethod
    def of(
        cls, name: str, scenario: Scenario, result: SimulationResult, synchronous_step_s: float | None = None
    ) -> Report:
        """What is kept of a result. Without a synchronous step time, the setting is itself what others are compared with."""
        step_s = result.mean_step_s
        reference_s = step_s if synchronous_step_s is None else synchronous_step_s
        return cls(
            name=name,
            gpus=scenario.gpus,
            staleness=scenario.staleness,
            summary=result.summary(),
            speedup=reference_s / step_s if step_s > 0 and math.isfinite(reference_s) else None,
            starved=result.starved,
            timing=dataclasses.asdict(result.settings.timing),
            histogram=result.histogram.tolist(),
            series=_series(result),
            phases=_phases(result),
            busy=_busy(result),
        )

    def to_json(self) -> dict[str, Any]:
        """For a file; NaN becomes null, which strict JSON can hold."""
        return _finite(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Report:
        """The inverse of `to_json`."""
        summary = {name: math.nan if value is None else value for name, value in values["summary"].items()}
        return cls(**{**values, "summary": summary})


def _series(result: SimulationResult) -> dict[str, list[float]]:
    steps = result.steps
    count = len(steps)
    if not count:
        return {}
    size = math.ceil(count / SERIES_POINTS)
    starts = np.arange(0, count, size)
    widths = np.diff(np.append(starts, count))

    def binned(values: np.ndarray) -> np.ndarray:
        return np.add.reduceat(np.asarray(values, dtype=np.float64), starts) / widths

    answers = result.settings.queue.answers_per_group
    columns = {
        "x": binned(np.arange(1, count + 1)),
        "step_s": binned(steps.step_s),
        "stale_ratio": binned(steps.stale_ratio),
        "staleness_mean": binned(steps.staleness_mean),
        "generating": binned(steps.generating),
        "scoring": binned(steps.scoring),
        "ready": binned(steps.ready),
        "trained_length": binned(steps.trained_tokens) / np.maximum(binned(steps.answers), 1e-9),
        # A bin in which nothing was dispatched has no length.
        "dispatched_length": np.divide(
            binned(steps.dispatched_tokens),
            answers * binned(steps.dispatched_groups),
            out=np.full(len(starts), np.nan),
            where=binned(steps.dispatched_groups) > 0,
        ),
    }
    return {name: [float(f"{value:.5g}") for value in values] for name, values in columns.items()}


def _phases(result: SimulationResult) -> list[list[float]]:
    s = result.steps
    columns = (s.start_s, s.taken_s, s.learned_s, s.acknowledged_s, s.end_s)
    return [[float(column[i]) for column in columns] for i in range(min(len(s), STRIP_STEPS))]


def _busy(result: SimulationResult) -> list[list[float]]:
    """Thinned by averaging over time: a fleet's busy engines change at nearly every event."""
    if not len(result.steps):
        return []
    end_s = float(result.steps.end_s[min(len(result.steps), STRIP_STEPS) - 1])
    times, busy = np.append(result.trace_s, math.inf), result.trace_busy
    edges = np.linspace(0, end_s, 2 * SERIES_POINTS + 1)
    # The integral of the number of busy engines from 0 to each edge.
    whole = np.concatenate([[0.0], np.cumsum(np.diff(result.trace_s) * busy[:-1])])
    number = np.clip(np.searchsorted(times, edges, side="right") - 1, 0, len(busy) - 1)
    integral = whole[number] + (edges - result.trace_s[number]) * busy[number]
    shares = np.clip(np.diff(integral) / np.diff(edges) / result.settings.engines, 0.0, 1.0)  # but for rounding
    return [[float(at), float(share)] for at, share in zip(edges, shares, strict=False)]


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


# Heading (a line break where a terminal may break it), how to write it from the summary.
COLUMNS: tuple[tuple[str, str], ...] = (
    ("step\ns", "{mean_step_s:.4g}"),
    ("speed-\nup", "{speedup:.2f}x"),
    ("trained\ntokens/s", "{trained_tokens_per_s:,.0f}"),
    ("rollout\nidle", "{rollout_idle_share:.0%}"),
    ("learner\nidle", "{learner_idle_share:.0%}"),
    ("\nstale", "{stale_ratio:.0%}"),
    ("staleness\nmean, max", "{staleness_mean:.2f}, {staleness_max:.0f}"),
    ("held\nback", "{late_share:.0%}"),
    ("length\nbias", "{length_bias:.3f}"),
    ("fil-\ntered", "{filtered_share:.0%}"),
    ("\nwasted", "{wasted_token_share:.1%}"),
)
NOTES = (
    "GPUs: of rollout + of the learner, or all in turns. speed-up: over the fastest synchronous way to use the same GPUs. "
    "idle: share of time without work or at a standstill. stale: answers in the loss that an older version began. "
    "staleness: in versions. held back: time in which a batch was there but waited for late groups (staleness.on_late). "
    "length bias: mean length of consumed over that of judged answers. filtered: groups whose rewards do not differ. "
    "wasted: tokens written for nothing."
)


def cells(report: Report) -> list[str]:
    """A row of the table: name, GPUs, staleness, and what `COLUMNS` say; a dash where there is no number."""
    numbers = {**report.summary, "speedup": math.nan if report.speedup is None else report.speedup}
    values = [template.format(**numbers) for _, template in COLUMNS]
    return [report.name, report.gpus, str(report.staleness), *("-" if "nan" in value else value for value in values)]


def headings() -> list[str]:
    return ["setting", "GPUs", "stale-\nness.max", *(heading for heading, _ in COLUMNS)]


def table(reports: Sequence[Report], title: str) -> Table:
    """One row per setting."""
    view = Table(title=Text(title), caption=Text(NOTES), caption_justify="left", title_justify="left", box=SIMPLE_HEAD)
    for number, heading in enumerate(headings()):
        view.add_column(heading, justify="left" if number < 2 else "right", no_wrap=True)
    for report in reports:
        view.add_row(*map(Text, cells(report)))
    return view
