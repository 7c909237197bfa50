"""How a reward check is shown: lines for the log, tables for the terminal, `report.json`, and a page of pictures.

`report.json` holds everything, all cases of every finding included; what is shown elsewhere is a part of it.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator import page
from orchestrator.config import Config
from orchestrator.durable import write_json
from orchestrator.prepare import Task
from orchestrator.reward_check import Checked
from orchestrator.reward_findings import Agreement, Case, Figures, Finding, Verdicts
from orchestrator.reward_probes import KINDS
from reward_workers.code import grade_code
from reward_workers.function import load_function
from reward_workers.sandbox.pool import POOL
from reward_workers.sandbox.probes import LEVELS

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

REPORT, PAGE = "report.json", "report.html"
CASES_LOGGED = 3
CASES_ON_PAGE = 20
Rows = list[tuple[str, str]]


@dataclasses.dataclass(frozen=True)
class Report:
    """A check's figures by source, and its findings."""

    figures: Mapping[str, Mapping[str, Figures]]
    agreements: Mapping[str, Agreement | str]  # or why there is none
    latencies_s: Mapping[str, Sequence[float]]
    sandbox: Mapping[str, str] | None
    findings: Sequence[Finding]
    sources: Mapping[str, Mapping[str, Any]]
    totals: Mapping[str, Mapping[str, Sequence[float]]]  # of each answer, by source and kind

    @property
    def clean(self) -> bool:
        """No finding is an error."""
        return all(finding.level != "error" for finding in self.findings)

    @classmethod
    def of(cls, checked: Checked, findings: Sequence[Finding], config: Config) -> Report:
        verdicts = {source.key: Verdicts(source, checked.task.rewards, config) for source in checked.sources}
        return cls(
            figures={key: of_source.figures() for key, of_source in verdicts.items()},
            agreements={
                key: of_source.agreement() or of_source.source.no_comparison or "no answer has a value from both"
                for key, of_source in verdicts.items()
            },
            latencies_s=checked.latencies_s,
            sandbox=sandbox_of(checked.task),
            findings=findings,
            sources={
                source.key: {
                    "judged_by": checked.task.rewards.primary if source.judge == "reward" else "eval.checker",
                    "rows": len(source.rows),
                    "left_out": source.skipped,
                }
                for source in checked.sources
            },
            totals={key: _totals(of_source) for key, of_source in verdicts.items()},
        )

    def write(self, folder: Path, title: str) -> None:
        """The page, then `report.json`, each whole or not at all."""
        page.write_document(folder / PAGE, title, self._page())
        write_json(folder / REPORT, self.to_json())

    def to_json(self) -> dict[str, Any]:
        return {
            "clean": self.clean,
            "findings": [dataclasses.asdict(finding) for finding in self.findings],
            "sources": {
                key: {
                    **about,
                    "probes": {kind: _figures_json(figures) for kind, figures in self.figures[key].items()},
                    "agreement": _agreement_json(self.agreements[key]),
                }
                for key, about in self.sources.items()
            },
            "latency_s": {name: _latency(seconds) for name, seconds in self.latencies_s.items() if seconds},
            "sandbox": self.sandbox,
        }

    # Terminal

    def tables(self) -> Iterator[tuple[str, Rows]]:
        """Titles with rows of a name and its figures."""
        for key, by_kind in self.figures.items():
            about = self.sources[key]
            title = f"{key}: {about['rows']} rows, judged by {about['judged_by']}"
            yield title, probe_rows(by_kind)
        heading = ("", "".join(f"{name:>10}" for name in ("calls", "p50 s", "p95 s", "max s")))
        yield "time of a call", [heading, *((name, _latency_cells(seconds)) for name, seconds in self._timed())]
        compared = {key: found for key, found in self.agreements.items() if isinstance(found, Agreement)}
        if compared:
            names = ("both pay", "reward only", "checker only", "neither", "agree")
            heading = ("", "".join(f"{name:>14}" for name in names))
            yield "reward and eval.checker", [heading, *((k, _agreement_cells(a)) for k, a in compared.items())]
        if self.sandbox is not None:
            yield "sandbox", list(self.sandbox.items())

    def _timed(self) -> Iterator[tuple[str, Sequence[float]]]:
        return ((name, seconds) for name, seconds in self.latencies_s.items() if seconds)

    # Page

    def _page(self) -> Iterator[str]:
        errors = sum(finding.level == "error" for finding in self.findings)
        said = f"{errors} errors, {len(self.findings) - errors} warnings" if self.findings else "Nothing was found."
        yield f"<p>{page.element('strong', said)}</p>"
        for finding in self.findings:
            yield page.element("h3", f"{finding.level}: {finding.source}: {finding.message}")
            yield _case_table(finding.cases)
        for key, by_kind in self.figures.items():
            about = self.sources[key]
            yield page.element("h2", key)
            said = f"{about['rows']} rows, judged by {about['judged_by']}."
            yield page.element("p", said, "notes")
            yield _probe_table(by_kind)
            yield page.picture(_paid_picture(by_kind))
            yield page.picture(_totals_picture(self.totals[key]))
            if len({name for figures in by_kind.values() for name in figures.components}) > 1:
                yield page.picture(_components_picture(by_kind))
            yield from _agreement_part(self.agreements[key])
        yield page.element("h2", "Time of a call")
        yield page.table(
            ("function", "calls", "p50 s", "p95 s", "max s"),
            ((name, *_latency_cells(seconds).split()) for name, seconds in self._timed()),
        )
        yield page.picture(_latency_picture(dict(self._timed())))
        if self.sandbox is not None:
            yield page.element("h2", "Sandbox")
            yield page.table(("", ""), self.sandbox.items(), text=True)


def log_lines(finding: Finding, limit: int = CASES_LOGGED) -> str:
    """A finding and its first cases."""
    lines = [f"{finding.source}: {finding.message}"]
    for case in finding.cases[:limit]:
        note = f" ({case.note})" if case.note else ""
        lines.append(f"    row {case.prompt_id!r}, {case.probe}: {case.answer} earns {_number(case.total)}{note}")
    if len(finding.cases) > limit:
        lines.append(f"    and {len(finding.cases) - limit} more")
    return "\n".join(lines)


def sandbox_of(task: Task) -> dict[str, str] | None:
    """What this machine's sandbox enforces, where a reward or the checker runs programs; None where none does."""
    functions = [function for judges in (task.rewards, task.checker) if judges for function in judges.functions]
    if not any(load_function(f.function) is grade_code for f in functions if not isinstance(f.function, bytes)):
        return None
    able = POOL.capabilities()
    lacks = [text for texts in able.missing.values() for text in texts]
    return {
        "level": f"{able.level} ({LEVELS[able.level]})",
        "layers": able.layers,
        "missing": "; ".join(lacks) or "nothing: every probe was denied",
    }


def probe_rows(by_kind: Mapping[str, Figures]) -> Rows:
    """By kind: answers, share that pays, mean reward, mean of each component where there are several, other statuses."""
    names = _component_names(by_kind)
    width = max([11, *(len(name) + 2 for name in names)])
    heading = f"{'answers':>9}{'pay':>7}{'reward':>9}" + "".join(f"{name:>{width}}" for name in names)
    rows = [("", heading)]
    for kind, figures in by_kind.items():
        cells = [f"{figures.answers:>9}{figures.paid / figures.answers:>7.0%}{_number(figures.mean):>9}"]
        means = (figures.components[name][0] if name in figures.components else None for name in names)
        cells += [f"{_number(mean):>{width}}" for mean in means]
        rows.append((kind, f"{''.join(cells)}  {_others(figures)}".rstrip()))
    return rows


def _component_names(by_kind: Mapping[str, Figures]) -> list[str]:
    """None where the only one is the total."""
    names = list(dict.fromkeys(name for figures in by_kind.values() for name in figures.components))
    return names if len(names) > 1 else []


def _others(figures: Figures) -> str:
    return ", ".join(f"{count} {status}" for status, count in figures.statuses.items() if status != "scored")


def _totals(verdicts: Verdicts) -> dict[str, list[float]]:
    by_kind: dict[str, list[float]] = {}
    for _, judged in verdicts.answers():
        if (total := verdicts.result(judged).value) is not None:
            by_kind.setdefault(judged.probe.kind, []).append(total)
    return {kind: by_kind[kind] for kind in KINDS if kind in by_kind}


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _figures_json(figures: Figures) -> dict[str, Any]:
    components = {name: {"mean": mean, "std": std} for name, (mean, std) in figures.components.items()}
    return {
        **dataclasses.asdict(figures),
        "components": components,
        "paid_share": figures.paid / figures.answers,
    }


def _latency(seconds: Sequence[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    p95 = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
    return {"calls": len(ordered), "p50": statistics.median(ordered), "p95": p95, "max": ordered[-1]}


def _latency_cells(seconds: Sequence[float]) -> str:
    of = _latency(seconds)
    return f"{of['calls']:>10.0f}" + "".join(f"{of[name]:>10.3g}" for name in ("p50", "p95", "max"))


def _agreement_json(agreement: Agreement | str) -> dict[str, Any]:
    if isinstance(agreement, str):
        return {"none": agreement}
    return {
        **{name: agreement.counts[key] for name, key in _CELLS.items()},
        "share": agreement.share,
        "differing": [dataclasses.asdict(case) for case in agreement.differing],
    }


_CELLS = {
    "both_pay": (True, True),
    "reward_only": (True, False),
    "checker_only": (False, True),
    "neither": (False, False),
}


def _agreement_cells(agreement: Agreement) -> str:
    return "".join(f"{agreement.counts[key]:>14}" for key in _CELLS.values()) + f"{agreement.share:>14.1%}"


def _agreement_part(agreement: Agreement | str) -> Iterator[str]:
    yield page.element("h3", "Reward and eval.checker")
    if isinstance(agreement, str):
        yield page.element("p", f"Not compared: {agreement}.", "notes")
        return
    yield page.table(
        (f"{agreement.share:.1%} agree", "checker: right", "checker: wrong"),
        (
            (name, str(agreement.counts[paid, True]), str(agreement.counts[paid, False]))
            for name, paid in (("reward pays", True), ("reward does not", False))
        ),
    )
    yield _case_table(agreement.differing)


def _case_table(cases: Sequence[Case]) -> str:
    if not cases:
        return ""
    rows = ((c.prompt_id, c.probe, c.answer, _number(c.total), c.note) for c in cases[:CASES_ON_PAGE])
    more = f"The first {CASES_ON_PAGE} of {len(cases)}." if len(cases) > CASES_ON_PAGE else ""
    table = page.table(("row", "probe", "answer", "reward", "note"), rows, text=True)
    return table + (page.element("p", more, "notes") if more else "")


def _probe_table(by_kind: Mapping[str, Figures]) -> str:
    names = _component_names(by_kind)
    rows = []
    for kind, figures in by_kind.items():
        means = (figures.components[name][0] if name in figures.components else None for name in names)
        paid = f"{figures.paid / figures.answers:.0%}"
        rows.append(
            (
                kind,
                KINDS[kind].meaning,
                str(figures.answers),
                paid,
                _number(figures.mean),
                *map(_number, means),
                _others(figures),
            )
        )
    return page.table(("probe", "what it is", "answers", "pay", "mean reward", *names, "without a value"), rows)


def _paid_picture(by_kind: Mapping[str, Figures]) -> Figure:
    figure = page.figure(
        "Answers that pay", "", "share", yaxis={"range": [0, 1], "tickformat": ".0%"}, barmode="overlay"
    )
    names = {"gold": "must pay", "error": "must not", "warning": "should not", "shown": "may"}
    for level, name in names.items():
        kinds = [kind for kind in by_kind if KINDS[kind].level == level]
        if kinds:
            figure.add_bar(name=name, x=kinds, y=[by_kind[kind].paid / by_kind[kind].answers for kind in kinds])
    return figure


def _totals_picture(totals: Mapping[str, Sequence[float]]) -> Figure:
    figure = page.figure("Reward of each answer", "", "reward", showlegend=False)
    for kind, values in totals.items():
        figure.add_box(name=kind, y=list(values), boxpoints="all", jitter=0.5, pointpos=0)
    return figure


def _components_picture(by_kind: Mapping[str, Figures]) -> Figure:
    names = _component_names(by_kind)
    figure = page.figure("Mean of each component", "", "")
    figure.add_heatmap(
        x=list(by_kind),
        y=names,
        z=[[figures.components.get(name, (None,))[0] for figures in by_kind.values()] for name in names],
        colorscale="Viridis",
    )
    return figure


def _latency_picture(latencies_s: Mapping[str, Sequence[float]]) -> Figure:
    figure = page.figure("Time of a call", "", "s", showlegend=False, yaxis_type="log")
    for name, seconds in latencies_s.items():
        figure.add_box(name=name, y=list(seconds))
    return figure
