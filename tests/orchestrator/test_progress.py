"""The progress of a count: drawn in a terminal, said in lines elsewhere."""

from __future__ import annotations

import io
import logging

import pytest
import rich.console

from orchestrator.progress import LINE_EVERY_S, Progress


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_lines_come_now_and_then_and_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    clock, terminal = Clock(), rich.console.Console(file=io.StringIO())
    with (
        caplog.at_level(logging.INFO),
        Progress(40, "prompts", "plain", done=10, terminal=terminal, clock=clock) as progress,
    ):
        assert isinstance(progress, Progress)
        for _ in range(30):
            clock.now += LINE_EVERY_S / 5
            progress.advance()
    assert [record.getMessage() for record in caplog.records] == [
        "15/40 prompts, 0.50/s, 50 s left",
        "20/40 prompts, 0.50/s, 40 s left",
        "25/40 prompts, 0.50/s, 30 s left",
        "30/40 prompts, 0.50/s, 20 s left",
        "35/40 prompts, 0.50/s, 10 s left",
        "40/40 prompts, 0.50/s, 0 s left",
    ]


def test_a_terminal_shows_count_rate_and_time_left() -> None:
    clock = Clock()
    terminal = rich.console.Console(file=io.StringIO(), force_terminal=True, width=100, color_system=None)
    progress = Progress(1000, "prompts", "live", done=100, terminal=terminal, clock=clock)
    for _ in range(20):
        clock.now += 2
        progress.advance()
    with terminal.capture() as shown:
        terminal.print(progress.render())
    assert "prompts" in shown.get()
    assert "120/1000" in shown.get()
    assert "0.50/s" in shown.get()
    assert "0:29:20" in shown.get()  # 880 prompts at this pace: what was there from the start counts for nothing
