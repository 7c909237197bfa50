"""Simulated settings as one self-contained HTML page: the table, pictures that compare them, and pictures of each.

Colours tell settings apart in the comparisons, and what is plotted within a setting's own pictures.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator import page
from orchestrator.simulation.report import NOTES, Report, cells, headings

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

DETAILED = 12  # settings with pictures of their own; the table and the comparisons have all
PHASES = (("collect", "#E0E0E0"), ("learn", "#0072B2"), ("publish", "#D55E00"), ("between", "#E69F00"))


def write_page(path: Path, title: str, reports: Sequence[Report], *, advice: str = "") -> None:
    """Whole or not at all. `advice` is a paragraph above the table."""
    parts = [
        f"<p>{page.element('strong', advice)}</p>" if advice else "",
        _table(reports),
        page.element("p", NOTES, "notes"),
        *(page.picture(figure) for figure in (_step_times(reports), _idle(reports), _staleness(reports))),
    ]
    for report in reports[:DETAILED]:
        parts += [page.element("h2", _label(report)), _timing(report)]
        if report.series:
            parts += [page.picture(figure) for figure in (_strip(report), _queue(report), _lengths(report))]
    if len(reports) > DETAILED:
        note = f"The first {DETAILED} of {len(reports)} settings have pictures of their own."
        parts.append(page.element("p", note, "notes"))
    page.write_document(path, title, parts)


def _label(report: Report) -> str:
    return f"{report.name}: {report.gpus} GPUs, staleness.max={report.staleness}"


def _table(reports: Sequence[Report]) -> str:
    plain = [heading.replace("-\n", "").replace("\n", " ") for heading in headings()]
    return page.table(plain, map(cells, reports))


def _timing(report: Report) -> str:
    values = ", ".join(f"{name} = {value:.4g}" for name, value in report.timing.items())
    ended = f" Ended early: {report.starved}" if report.starved else ""
    return page.element("p", values + "." + ended, "timing")


def _figure(title: str, x: str, y: str, **layout: object) -> Figure:
    figure = page.figure(title, x, y, **layout)
    figure.update_yaxes(rangemode="tozero")
    return figure


# Comparisons


def _step_times(reports: Sequence[Report]) -> Figure:
    figure = _figure("Mean time of a step", "", "s", showlegend=False)
    speedups = ["" if r.speedup is None else f"{r.speedup:.2f}x" for r in reports]
    figure.add_bar(x=[_label(r) for r in reports], y=[r.summary["mean_step_s"] for r in reports], text=speedups)
    return figure


def _idle(reports: Sequence[Report]) -> Figure:
    figure = _figure("Idle share", "", "share of time", barmode="group", yaxis_range=[0, 1])
    for side in ("rollout", "learner"):
        idle = [r.summary[f"{side}_idle_share"] for r in reports]
        figure.add_bar(name=side, x=[_label(r) for r in reports], y=idle)
    return figure


def _staleness(reports: Sequence[Report]) -> Figure:
    figure = _figure("Staleness of the answers in the loss", "versions", "share of answers", barmode="group")
    for report in reports:
        figure.add_bar(name=_label(report), x=list(range(len(report.histogram))), y=list(report.histogram))
    figure.update_xaxes(dtick=1)
    return figure


# One setting


def _strip(report: Report) -> Figure:
    """Who does what when: the learner's phases above the share of engines at work."""
    figure = _figure(
        f"The first {len(report.phases)} steps: what the learner does, and how many engines work",
        "s",
        "",
        barmode="stack",
        yaxis2={"title": "busy engines", "range": [0, 1.05], "tickformat": ".0%", "domain": [0, 0.6]},
        yaxis={"domain": [0.7, 1]},
    )
    for number, (phase, colour) in enumerate(PHASES):
        figure.add_bar(
            name=phase,
            orientation="h",
            base=[times[number] for times in report.phases],
            x=[times[number + 1] - times[number] for times in report.phases],
            y=["learner"] * len(report.phases),
            marker_color=colour,
            offsetgroup="learner",
            width=0.9,
        )
    figure.add_scatter(
        name="engines",
        x=[at for at, _ in report.busy],
        y=[share for _, share in report.busy],
        fill="tozeroy",
        line={"shape": "hv", "width": 1, "color": "#009E73"},
        yaxis="y2",
    )
    return figure


def _queue(report: Report) -> Figure:
    figure = _figure("The queue when a batch was taken", "step", "groups")
    for name in ("generating", "scoring", "ready"):
        figure.add_scatter(name=name, x=report.series["x"], y=report.series[name], mode="lines")
    return figure


def _lengths(report: Report) -> Figure:
    figure = _figure("Mean length of answers, by step", "step", "tokens")
    for name in ("dispatched", "trained"):
        figure.add_scatter(name=name, x=report.series["x"], y=report.series[f"{name}_length"], mode="lines")
    return figure
