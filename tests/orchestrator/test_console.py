"""The view fits 80 columns, shows what it was given, and loses no log record."""

from __future__ import annotations

import io
import logging
import sys

import pytest
import rich.console

from orchestrator.console import Console, ConsoleState, QueueView, Sample, sparkline
from orchestrator.metrics import find

METRICS = {
    "reward/mean": 0.7123,
    "staleness/stale_ratio": 0.125,
    "watch/checker": 0.65,
    "watch/gap": 0.0625,
    "eval/pass_at_1": 0.8,
    "eval/pass_at_1_low": 0.74,
    "eval/pass_at_1_high": 0.85,
    "group/trained": 8,
    "group/filtered": 3,
    "group/failed": 1,
    "response_length/mean": 17.25,
    "response_length/truncated_ratio": 0.02,
    "perf/generated_tokens_per_s": 312.0,
    "perf/trained_tokens_per_s": 120.0,
    "time_s/batch": 20.0,
    "time_s/collect": 10.0,
    "time_s/learn": 8.0,
    "time_s/publish": 0.5,
}

OLDEST = "g0-000017 (prompt main:4f) generating"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def terminal(width: int = 80) -> rich.console.Console:
    return rich.console.Console(width=width, record=True, file=io.StringIO(), force_terminal=True)


def drawn(console: Console, width: int = 80) -> str:
    paper = rich.console.Console(width=width, record=True, file=io.StringIO())
    paper.print(console.render())
    return paper.export_text()


@pytest.fixture(autouse=True)
def _info_level() -> object:
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.INFO)
    yield
    root.setLevel(level)


def test_the_live_view_shows_the_run_in_80_columns() -> None:
    clock = Clock()
    with Console(20, "live", title="headway · quickstart · tiny", terminal=terminal(), clock=clock) as console:
        for version in range(1, 6):
            clock.now += 20.0
            console.update(ConsoleState(version, metrics=METRICS | {"reward/mean": version / 10}))
        logging.getLogger("somewhere").warning("actor 1 restarted\nafter 3 s")
        console.update(
            ConsoleState(
                5,
                "collect",
                QueueView({"generating": 12, "scoring": 3, "parked": 0, "ready": 2, "training": 8}, 32, OLDEST, 64.0),
                METRICS | {"staleness/share/0": 0.875, "staleness/share/1": 0.1, "staleness/share/2": 0.025},
                Sample("What is 2+2?", "It is [bold]4[/bold].\x1b[2J\n", 1.0),
            )
        )
        text = drawn(console)
    assert all(len(line) <= 80 for line in text.splitlines())
    assert len(text.splitlines()) <= 23
    for piece in (
        "quickstart",
        "5/20 batches",
        "1:40",
        "5:00 left",
        "0.712 ▁▃▄▆█",
        "0.650 (gap +0.062)",
        "12%",
        "0.800 (0.740-0.850)",
        "8 kept, 3 filtered, 1 failed",
        "312 written, 120 trained",
        "17.2, 2% cut",
        "█" * 9 + "█" * 2 + "█" * 2 + "█" * 6 + "·" * 5 + " 25 of at most 32 groups",
        "12 generating, 3 scoring, 2 ready, 8 training",
        "0: 88% · 1: 10% · 2: 2%",
        "g0-000017 (prompt main:4f) generating for 1:04",
        "collect",
        "10.0 s",
        "actor 1 restarted after 3 s",
        "What is 2+2?",
        "(reward 1) It is [bold]4[/bold].",
    ):
        assert piece in text, piece
    assert "\x1b" not in text


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_view_draws_before_the_first_batch_and_with_endless_text(width: int) -> None:
    console = Console(0, "live", terminal=terminal(width))
    assert "no batch finished yet" in drawn(console, width)
    console.update(ConsoleState(1, sample=Sample("p" * 5000, "漢字 " * 2000, None), metrics={"reward/mean": None}))
    text = drawn(console, width)
    assert "not scored" in text
    assert len(text.splitlines()) < 23


def test_the_time_left_follows_the_last_five_batches_and_runs_down() -> None:
    clock = Clock()
    console = Console(30, "live", start_version=10, terminal=terminal(), clock=clock)
    assert console.remaining_s() is None
    for version, time_s in enumerate([100.0, 10.0, 10.0, 10.0, 10.0, 10.0], start=11):
        console.update(ConsoleState(version, metrics={"time_s/batch": time_s}))
    assert console.remaining_s() == pytest.approx(14 * 10.0)
    clock.now += 4.0
    assert console.remaining_s() == pytest.approx(136.0)
    clock.now += 1000.0
    assert console.remaining_s() == 0.0


def test_log_records_and_prints_stay_on_the_terminal_above_the_live_view() -> None:
    screen = terminal()
    root = logging.getLogger()
    stream = logging.StreamHandler(sys.stderr)
    root.addHandler(stream)
    before = list(root.handlers)
    try:
        with Console(2, "live", terminal=screen) as console:
            assert stream not in root.handlers  # it would write into the view
            logging.getLogger("x").info("engine [0] is up")
            sys.stdout.write("printed by a library\n")
            console.update(ConsoleState(1, metrics=METRICS))
            console.show_table("sizes", [("answers per batch", "64"), ("capacity", "16 groups")])
        assert sorted(map(id, root.handlers)) == sorted(map(id, before))
    finally:
        root.removeHandler(stream)
    text = screen.export_text()
    for piece in (
        "engine [0] is up",
        "printed by a library",
        "batch 1/2",
        "sizes",
        "answers per batch",
        "16 groups",
    ):
        assert piece in text, piece


def test_without_a_terminal_a_batch_is_one_plain_line() -> None:
    output = io.StringIO()
    with Console(20, terminal=rich.console.Console(file=output)) as console:
        assert not console.live
        console.show_table("sizes", [("answers per batch", "64")])
        console.update(ConsoleState(0, "collect", {"generating": 3}))
        console.update(ConsoleState(1, metrics=METRICS))
        console.update(ConsoleState(1, "learn", metrics=METRICS))
        logging.getLogger("x").warning("careful")
    lines = output.getvalue().splitlines()
    assert len(lines) == 3
    assert "sizes: answers per batch = 64" in lines[0]
    assert "batch 1/20 | reward 0.712 | checker 0.650 (gap +0.062) | stale 12%" in lines[1]
    assert "time 20.0 s | left 6:" in lines[1]
    assert "WARNING careful" in lines[2]
    output.getvalue().encode("ascii")  # a log may go anywhere


def test_the_terminal_is_given_back_after_an_error() -> None:
    before = list(logging.getLogger().handlers)
    with pytest.raises(KeyboardInterrupt), Console(1, "live", terminal=terminal()):
        raise KeyboardInterrupt
    assert logging.getLogger().handlers == before


def test_what_is_shown_are_metrics_of_the_catalogue() -> None:
    asked: set[str] = set()

    class Asked(dict):
        def get(self, name, default=None):
            asked.add(name)
            return default

    Console(1, "live", terminal=terminal()).update(ConsoleState(1, metrics=Asked()))
    console = Console(1, "live", terminal=terminal())
    console.update(ConsoleState(0, metrics=Asked()))
    drawn(console)
    assert len(asked) > 10
    for name in asked:
        find(name)


def test_sparkline() -> None:
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert len(set(sparkline([2.0, 2.0]))) == 1
