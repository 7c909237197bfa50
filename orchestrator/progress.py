"""A count on its way to a known total, in a terminal: for work that is not a run of batches.

`Progress` owns the terminal as `orchestrator.console.Console` does, with a bar, rate and time left in place of the run's view.
Where nothing can be drawn it logs a line now and then.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Literal

import rich.console
from rich.console import RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.text import Text

from orchestrator.console import Console

logger = logging.getLogger(__name__)

LINE_EVERY_S = 10.0
SPEED_PERIOD_S = 300.0  # answers of a group arrive together: a shorter look back would make the rate jump


class Progress(Console):
    """`with (progress := Progress(total, "prompts")): progress.advance()`. `done` of them are there from the start."""

    def __init__(
        self,
        total: int,
        unit: str,
        mode: Literal["auto", "live", "plain"] = "auto",
        *,
        done: int = 0,
        terminal: rich.console.Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._line_at = clock()
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            _Rate(),
            TimeRemainingColumn(),
            auto_refresh=False,
            expand=True,
            get_time=clock,
            speed_estimate_period=SPEED_PERIOD_S,
        )
        self._bar.add_task(unit, total=total, completed=done)
        super().__init__(total, mode, terminal=terminal, clock=clock)  # last, because it renders

    def advance(self) -> None:
        """One more is done."""
        [task] = self._bar.tasks
        self._bar.advance(task.id)
        now = self._clock()
        if not self.live and (now - self._line_at >= LINE_EVERY_S or task.finished):
            self._line_at = now
            rate = "" if task.speed is None else f", {task.speed:.2f}/s, {task.time_remaining or 0:.0f} s left"
            logger.info("%.0f/%.0f %s%s", task.completed, task.total, task.description, rate)

    def show_table(self, title: str, rows: Sequence[tuple[str, str]]) -> None:
        if self.live:
            super().show_table(title, rows)
            return
        width = max(len(name) for name, _ in rows)
        logger.info("%s\n%s", title, "\n".join(f"{name:<{width}} {value}" for name, value in rows))

    def render(self) -> RenderableType:
        return self._bar.get_renderable()


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text("" if task.speed is None else f"{task.speed:.2f}/s")
