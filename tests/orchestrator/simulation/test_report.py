"""What is kept of a simulation, the table, and the page."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import rich.console

from orchestrator.sampling_types import QueueSettings
from orchestrator.simulation.hardware import Layout
from orchestrator.simulation.page import write_page
from orchestrator.simulation.report import SERIES_POINTS, STRIP_STEPS, Report, cells, headings, table
from orchestrator.simulation.scenario import Scenario
from orchestrator.simulation.simulator import simulate
from orchestrator.simulation.types import SimulationResult, SimulationSettings, Timing
from orchestrator.simulation.workload import SyntheticWorkload

TIMING = Timing(
    decode_base_s=0.1,
    decode_per_answer_s=0.001,
    max_concurrent_answers=64,
    learn_s_per_token=0.01,
    publish_s=1.0,
    pause_s=0.5,
)
SCENARIO = Scenario(Layout(2, 1, 1, shared=False), 1)


def result(*, steps: int = 30, exhausting: bool = False) -> SimulationResult:
    workload = SyntheticWorkload(
        10, 50, 0.5, 200, pass_alpha=1e-3 if exhausting else 1, pass_beta=1e-9 if exhausting else 1
    )
    queue = QueueSettings(
        groups_per_batch=4, answers_per_group=4, filter=True, max_staleness=1, max_dispatches_per_batch=2
    )
    return simulate(SimulationSettings(queue, TIMING, workload, engines=2, steps=steps))


@pytest.fixture(scope="module")
def report() -> Report:
    return Report.of("asked", SCENARIO, result(), 20.0)


def test_a_report_survives_its_file(report: Report) -> None:
    assert Report.from_json(json.loads(json.dumps(report.to_json(), allow_nan=False))) == report


def test_numbers_are_those_of_the_simulation(report: Report) -> None:
    simulated = result()
    assert report.summary["mean_step_s"] == simulated.mean_step_s
    assert report.speedup == pytest.approx(20.0 / simulated.mean_step_s)
    assert report.gpus == "2 + 1"
    assert len(report.phases) == STRIP_STEPS
    assert report.phases[3] == [
        float(column[3])
        for column in (
            simulated.steps.start_s,
            simulated.steps.taken_s,
            simulated.steps.learned_s,
            simulated.steps.acknowledged_s,
            simulated.steps.end_s,
        )
    ]


def test_series_are_thinned_to_means() -> None:
    simulated = result(steps=SERIES_POINTS + 50)
    series = Report.of("", SCENARIO, simulated).series
    assert {len(values) for values in series.values()} == {math.ceil((SERIES_POINTS + 50) / 2)}
    assert series["step_s"][0] == pytest.approx(simulated.steps.step_s[:2].mean(), rel=1e-3)
    assert series["x"][0] == 1.5


def test_busy_engines_average_to_what_the_steps_say(report: Report) -> None:
    simulated = result()
    first = slice(0, STRIP_STEPS)
    busy = np.average(simulated.steps.engine_busy_ratio[first], weights=simulated.steps.step_s[first])
    assert np.mean([share for _, share in report.busy]) == pytest.approx(busy, abs=0.01)
    assert all(0 <= share <= 1 for _, share in report.busy)


def test_the_table_has_a_row_per_setting(report: Report) -> None:
    console = rich.console.Console(width=200, file=open("/dev/null", "w"), record=True)  # noqa: SIM115
    console.print(table([report, replace(report, name="other", staleness=4)], "title"))
    text = console.export_text()
    assert len(headings()) == len(cells(report))
    assert "asked" in text
    assert "other" in text
    assert f"{report.speedup:.2f}x" in text


def test_a_run_without_a_full_step_has_dashes() -> None:
    ended = result(exhausting=True)
    assert ended.starved
    report = Report.of("", SCENARIO, ended, 1.0)
    assert report.speedup is None
    assert cells(report)[3:5] == ["-", "-"]
    assert Report.from_json(json.loads(json.dumps(report.to_json(), allow_nan=False))).starved == ended.starved


def test_the_page_needs_no_network(report: Report, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    starved = Report.of("starved", SCENARIO, result(exhausting=True))
    write_page(path, "a <title>", [report, starved], advice="do & don't")
    text = path.read_text()
    assert "a &lt;title&gt;" in text
    assert "do &amp; don&#x27;t" in text
    assert not re.search(r"<(script|link|img)[^>]*(src|href)=", text)
    for title in ("Mean time of a step", "Idle share", "Staleness of the answers", "The queue when", "Mean length of"):
        assert title in text
    assert f"The first {STRIP_STEPS} steps" in text
    assert "Ended early: The data can" in text
