"""How a run looks in a terminal: a live view, or one plain line a batch where nothing can be drawn.

Contract: everything shown is plain data handed to `Console.update`; the console asks nobody, and keeps only
what a curve needs (the reward of past batches, the last warnings). While it is entered it owns the terminal:
log records are printed above the live view, none is lost, and the handlers that were there come back
afterwards. Each new version also logs one line, which stays in the scroll-back and in log files. Text that a
model wrote is shown as text: no markup, no control characters.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal, TypeAlias

import rich.console
from rich.console import Group, RenderableType
from rich.live import Live
from rich.logging import RichHandler
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

logger = logging.getLogger(__name__)

Values: TypeAlias = Mapping[str, float | int | None]

# What is worth showing of a batch: label, template, the metrics that fill it.
FIGURES = (
    ("reward", "{:.3f}", ("reward/mean",)),
    ("checker", "{:.3f} (gap {:+.3f})", ("watch/checker", "watch/gap")),
    ("stale", "{:.0%}", ("staleness/stale_ratio",)),
    ("groups", "{:g} kept, {:g} filtered, {:g} failed", ("group/trained", "group/filtered", "group/failed")),
    ("length", "{:.1f}, {:.0%} cut", ("response_length/mean", "response_length/truncated_ratio")),
    (
        "tokens/s",
        "{:.0f} written, {:.0f} trained",
        ("perf/generated_tokens_per_s", "perf/trained_tokens_per_s"),
    ),
)
# Of the last evaluation, which may be some batches old.
EVALUATION_FIGURES = (
    ("pass@1", "{:.3f} ({:.3f}-{:.3f})", ("eval/pass_at_1", "eval/pass_at_1_low", "eval/pass_at_1_high")),
)
PHASES = ("collect", "learn", "publish", "eval", "checkpoint")
WARNINGS_SHOWN = 3
CURVE_LENGTH = 16  # batches
LABEL_WIDTH = 10
BAR_LENGTH = 40  # characters of a phase that takes the whole batch
QUEUE_LENGTH = 24  # characters of a full queue
QUEUE_STYLES = {"generating": "cyan", "scoring": "yellow", "parked": "magenta", "ready": "green", "training": "blue"}
BLOCKS = "▁▂▃▄▅▆▇█"
TIME_FORMAT = "%H:%M:%S"


@dataclass(frozen=True)
class Sample:
    """An answer worth a look. `reward` is None where it was not scored."""

    prompt: str
    answer: str
    reward: float | None


@dataclass(frozen=True)
class QueueView:
    """`counts` are groups by state, in the order of a group's life; together at most `capacity`.

    `oldest` says which unfinished group has been under way the longest, `oldest_s` for how long (0 and "" for none).
    """

    counts: Mapping[str, int]
    capacity: int
    oldest: str = ""
    oldest_s: float = 0.0


@dataclass(frozen=True)
class ConsoleState:
    """What there is to see.

    `version` is the number of batches trained, `phase` what the loop does now, `metrics` the latest value of each
    metric by its name in `orchestrator.metrics`.
    """

    version: int = 0
    phase: str = "starting"
    queue: QueueView | None = None
    metrics: Values = field(default_factory=dict)
    sample: Sample | None = None


class Console:
    """The terminal's owner: `with Console(total_batches) as console: console.update(state)`.

    `auto` is live where standard output is a terminal that can draw, else plain. A resumed run says which
    version it begins with.
    """

    def __init__(
        self,
        total_batches: int,
        mode: Literal["auto", "live", "plain"] = "auto",
        *,
        title: str = "headway",
        start_version: int = 0,
        terminal: rich.console.Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._terminal = terminal or rich.console.Console()
        self.live = mode == "live" or (mode == "auto" and _can_draw(self._terminal))
        self._total_batches = total_batches
        self._title = title
        self._clock = clock
        self._started_at = self._version_at = self._updated_at = clock()
        self._state = ConsoleState(version=start_version)
        self._rewards: tuple[float, ...] = ()
        self._batch_times_s: tuple[float, ...] = ()
        self._warnings: tuple[str, ...] = ()
        self._handlers = (self._terminal_handler(), _Warnings(self._keep_warning))
        self._replaced: tuple[logging.Handler, ...] = ()
        self._view = Live(get_renderable=self.render, console=self._terminal, refresh_per_second=4)

    def __enter__(self) -> Console:
        root = logging.getLogger()
        self._replaced = tuple(handler for handler in root.handlers if _writes_to_terminal(handler))
        _exchange(root, self._replaced, self._handlers)
        if self.live:
            self._view.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.live:
            self._view.stop()
        _exchange(logging.getLogger(), self._handlers, self._replaced)

    def show_table(self, title: str, rows: Sequence[tuple[str, str]]) -> None:
        """Names and values under a title, such as the sizes that follow from the configuration."""
        if not self.live:
            for name, value in rows:
                logger.info("%s: %s = %s", title, name, value)
            return
        grid = Table.grid(padding=(0, 2))
        for name, value in rows:
            grid.add_row(Text(name, style="bold"), Text(_plain(value)))
        self._terminal.print(Panel(grid, title=Text(title), title_align="left", expand=False))

    def update(self, state: ConsoleState) -> None:
        """Shows a state. A higher version than before counts as a finished batch."""
        finished = state.version > self._state.version
        self._state, self._updated_at = state, self._clock()
        if finished:
            self._version_at = self._clock()
            self._rewards = _appended(self._rewards, state.metrics.get("reward/mean"))
            self._batch_times_s = _appended(self._batch_times_s, state.metrics.get("time_s/batch"))
            logger.info("%s", self._line())

    def remaining_s(self) -> float | None:
        """Seconds to the last batch at the mean pace of the last five, None before the first is finished."""
        recent = self._batch_times_s[-5:]
        if not recent:
            return None
        batches = self._total_batches - self._state.version
        return max(0.0, batches * sum(recent) / len(recent) - (self._clock() - self._version_at))

    def render(self) -> RenderableType:
        """The live view of the last state."""
        state = self._state
        details = Table.grid(padding=(0, 1))
        details.add_column(width=LABEL_WIDTH, style="bold")
        details.add_column(ratio=1)
        for label, text in self._queue():
            details.add_row(label, text)
        if state.sample is not None:
            reward = "not scored" if state.sample.reward is None else f"reward {state.sample.reward:.3g}"
            details.add_row("prompt", Text(_plain(state.sample.prompt, 65), style="dim"))
            details.add_row("answer", Text(f"({reward}) {_plain(state.sample.answer, 150)}", style="cyan"))
        for warning in self._warnings:
            details.add_row("warning", Text(_plain(warning, 65), style="yellow"))
        return Panel(
            Group(self._progress(), self._figures(), _phase_bars(state.metrics), details),
            title=Text(_plain(self._title)),
            title_align="left",
            subtitle=Text(state.phase),
            subtitle_align="left",
        )

    def _queue(self) -> Iterator[tuple[str, Text]]:
        """How full the queue is and of what, how old what was trained on is, and what is waited for."""
        queue = self._state.queue
        if queue is not None:
            bar = Text()
            for name, count in queue.counts.items():
                bar.append("█" * round(QUEUE_LENGTH * count / queue.capacity), style=QUEUE_STYLES[name])
            bar.append("·" * (QUEUE_LENGTH - len(bar)), style="dim")
            bar.append(f" {sum(queue.counts.values())} of at most {queue.capacity} groups")
            yield "queue", bar
            there = {name: count for name, count in queue.counts.items() if count}
            yield "", Text(", ").join(Text(f"{n} {name}", style=QUEUE_STYLES[name]) for name, n in there.items())
        shares = staleness_shares(self._state.metrics)
        if len(shares) > 1:
            yield "staleness", Text(" · ".join(f"{lag}: {share:.0%}" for lag, share in shares.items()))
        if queue is not None and queue.oldest:
            age_s = queue.oldest_s + self._clock() - self._updated_at
            yield "oldest", Text(f"{_plain(queue.oldest, 65)} for {_duration(age_s)}", style="dim")

    def _progress(self) -> RenderableType:
        remaining_s, elapsed_s = self.remaining_s(), self._clock() - self._started_at
        left = "" if remaining_s is None else f" · {_duration(remaining_s)} left"
        grid = Table.grid(padding=(0, 1), expand=True)
        grid.add_column(ratio=1)
        grid.add_column(no_wrap=True)
        grid.add_row(
            ProgressBar(total=max(1, self._total_batches), completed=self._state.version),
            f"{self._state.version}/{self._total_batches} batches · {_duration(elapsed_s)}{left}",
        )
        return grid

    def _figures(self) -> RenderableType:
        figures = dict(_filled((*FIGURES, *EVALUATION_FIGURES), self._state.metrics))
        if not figures:
            return Text("no batch finished yet", style="dim")
        if len(self._rewards) > 1:
            figures["reward"] += f" {sparkline(self._rewards)}"
        grid = Table.grid(padding=(0, 1))
        for width, style in ((LABEL_WIDTH, "bold"), (None, "green"), (None, "bold"), (None, "")):
            grid.add_column(width=width, style=style, no_wrap=True)
        cells = [(label, Text(text)) for label, text in figures.items()]
        for left, right in zip(cells[::2], [*cells[1::2], ("", Text())], strict=False):
            grid.add_row(*left, *right)
        return grid

    def _line(self) -> str:
        """The last batch in one line."""
        state, remaining_s = self._state, self.remaining_s()
        figures = [f"{label} {text}" for label, text in _filled(FIGURES, state.metrics)]
        if (batch_s := state.metrics.get("time_s/batch")) is not None:
            figures.append(f"time {batch_s:.1f} s")
        if remaining_s is not None:
            figures.append(f"left {_duration(remaining_s)}")
        return " | ".join([f"batch {state.version}/{self._total_batches}", *figures])

    def _terminal_handler(self) -> logging.Handler:
        if self.live:
            return RichHandler(console=self._terminal, show_path=False, log_time_format=TIME_FORMAT)
        handler = logging.StreamHandler(self._terminal.file)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", TIME_FORMAT))
        return handler

    def _keep_warning(self, message: str) -> None:
        self._warnings = (*self._warnings, message)[-WARNINGS_SHOWN:]


class _Warnings(logging.Handler):
    """Hands on the text of warnings and errors."""

    def __init__(self, keep: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._keep = keep

    def emit(self, record: logging.LogRecord) -> None:
        self._keep(record.getMessage())


def staleness_shares(metrics: Values) -> dict[int, float]:
    """Share of the trained answers by staleness in versions, fresh ones first."""
    prefix = "staleness/share/"
    shares = {int(name.removeprefix(prefix)): share for name, share in metrics.items() if name.startswith(prefix)}
    return {lag: share for lag, share in sorted(shares.items()) if share}


def sparkline(values: Sequence[float]) -> str:
    """One block character a value, the lowest to the highest of them."""
    low, high = min(values), max(values)
    if high == low:
        return BLOCKS[3] * len(values)
    return "".join(BLOCKS[round((value - low) / (high - low) * (len(BLOCKS) - 1))] for value in values)


def _filled(figures: Sequence[tuple[str, str, tuple[str, ...]]], metrics: Values) -> list[tuple[str, str]]:
    """Labels and texts of the figures that are there whole."""
    filled = []
    for label, template, names in figures:
        values = [metrics.get(name) for name in names]
        if None not in values:
            filled.append((label, template.format(*values)))
    return filled


def _phase_bars(metrics: Values) -> RenderableType:
    """Where the batch's time went: a bar for each phase."""
    times_s = {phase: metrics.get(f"time_s/{phase}") or 0.0 for phase in PHASES}
    whole_s = max(metrics.get("time_s/batch") or 0.0, *times_s.values())
    grid = Table.grid(padding=(0, 1))
    grid.add_column(width=LABEL_WIDTH, style="bold")
    for phase, time_s in times_s.items():
        if time_s > 0:
            bar = BLOCKS[-1] * max(1, round(BAR_LENGTH * time_s / whole_s))
            grid.add_row(phase, Text.assemble((bar, "blue"), f" {time_s:.1f} s"))
    return grid


def _appended(values: tuple[float, ...], value: float | int | None) -> tuple[float, ...]:
    return values if value is None else (*values, float(value))[-CURVE_LENGTH:]


def _plain(text: str, limit: int = 500) -> str:
    """One line without control characters: what a model writes can't move the cursor."""
    line = "".join(character if character.isprintable() else " " for character in text[:limit])
    return line + "…" * (len(text) > limit)


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def _can_draw(terminal: rich.console.Console) -> bool:
    return terminal.is_terminal and not terminal.is_dumb_terminal and terminal.encoding.startswith("utf")


def _writes_to_terminal(handler: logging.Handler) -> bool:
    streams = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    return isinstance(handler, logging.StreamHandler) and handler.stream in streams


def _exchange(target: logging.Logger, old: Sequence[logging.Handler], new: Sequence[logging.Handler]) -> None:
    for handler in old:
        target.removeHandler(handler)
    for handler in new:
        target.addHandler(handler)
