"""Is the training reward being gamed? The gap between it and an independent checker on the same training answers.

Contract: pure. It is fed the two values of every answer that was compared, group by group, and closes with each batch. The
gap is mean(reward) - mean(checker). A reward may always be kinder than its checker, so what counts is the gap's growth: its
mean over the last `window_batches` batches minus that over the first ones, the baseline. Batches without a compared answer
are in neither.

The alarm is raised once when the growth passes `max_gap` by more than chance explains, and again only after the growth fell
below half of it. Chance: the growth must be above `CERTAINTY` times its standard error, taken over groups, because the answers
of one group are alike. A fall of the gap is no alarm.

A failure is not a zero: an answer that lacks one of the two values is in no mean. Those without the checker's are counted.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from reward_workers.judge_agreement import Agreement, agreement

CERTAINTY = 3.0  # standard errors
EXAMPLES = 3  # answers kept of a batch, and shown in an alarm


class RewardGamed(RuntimeError):
    """The training reward parted from its checker and reward.watch.on_gap=stop; the message says how far and where."""


@dataclass(frozen=True)
class Compared:
    """Sums over compared answers, and over their groups what the standard error of the mean gap takes."""

    groups: int = 0
    answers: int = 0
    reward: float = 0.0
    checker: float = 0.0
    gap_squares: float = 0.0  # over groups: (sum of the group's gaps)^2
    gap_answers: float = 0.0  # over groups: sum of its gaps x its answers
    answer_squares: int = 0  # over groups: (its answers)^2
    agreement: Agreement = field(default_factory=Agreement)

    @classmethod
    def of(cls, pairs: Sequence[tuple[float, float]]) -> Compared:
        """One group's (reward, checker) of each answer that has both."""
        if not pairs:
            return cls()
        rewards, checkers = zip(*pairs, strict=True)
        count, reward, checker = len(pairs), math.fsum(rewards), math.fsum(checkers)
        gap = reward - checker
        return cls(1, count, reward, checker, gap**2, gap * count, count**2, agreement(rewards, checkers))

    def __add__(self, other: Compared) -> Compared:
        return Compared(*(getattr(self, f.name) + getattr(other, f.name) for f in dataclasses.fields(self)))

    @property
    def gap(self) -> float:
        return (self.reward - self.checker) / self.answers

    @property
    def gap_error(self) -> float:
        """Standard error of `gap`: that of a ratio of sums over independent groups. Infinite for fewer than two."""
        if self.groups < 2:
            return math.inf
        gap = self.gap
        squares = self.gap_squares - 2 * gap * self.gap_answers + gap**2 * self.answer_squares
        return math.sqrt(max(0.0, squares) * self.groups / (self.groups - 1)) / self.answers

    def __str__(self) -> str:
        return f"{self.reward / self.answers:.3f} and {self.checker / self.answers:.3f}, a gap of {self.gap:+.3f}"


@dataclass(frozen=True)
class Example:
    """An answer that the reward rates higher than the checker does, to look at."""

    prompt_id: str
    group_id: str
    prompt: str
    answer: str
    reward: float
    checker: float

    @property
    def excess(self) -> float:
        return self.reward - self.checker

    def __str__(self) -> str:
        return (
            f"reward {self.reward:.3g}, checker {self.checker:.3g}, prompt {self.prompt_id}, group {self.group_id}: "
            f"{self.prompt!r} -> {self.answer!r}"
        )


@dataclass(frozen=True)
class GapAlarm:
    """The gap of `window` has grown by `growth` (standard error `error`) over that of `baseline`; `max_gap` was allowed."""

    primary: str
    window: Compared
    baseline: Compared
    growth: float
    error: float
    max_gap: float
    window_batches: int
    examples: Sequence[Example]

    def __str__(self) -> str:
        rate = self.window.agreement.rate
        agreed = "" if rate is None else f" Of answers that the checker tells apart, they order {rate:.0%} alike."
        examples = "".join(f"\n  {example}" for example in self.examples)
        return (
            f"The training reward {self.primary!r} parts from its checker: over the last {self.window_batches} batches they are "
            f"{self.window} ({self.window.answers} answers), over the first ones {self.baseline}. The gap has grown by "
            f"{self.growth:.3f} (standard error {self.error:.3f}), reward.watch.max_gap={self.max_gap:g} is allowed.{agreed} "
            "Either the policy found something that the reward pays for and should not, or the checker misses what is right. "
            "To look at: these answers, and in the journal (orchestrator.journal.read_trajectories) those whose "
            f"reward_components and checker_value differ.{examples}"
        )


class GapWatch:
    """Of the reward function `primary`, beside its checker. `max_gap` is in the reward's units."""

    def __init__(self, primary: str, *, window_batches: int, max_gap: float) -> None:
        self._primary = primary
        self._window_batches = window_batches
        self._max_gap = max_gap
        self._open = Compared()
        self._unscored = 0
        self._examples: list[Example] = []  # of the open batch, worst first
        self._baseline = Compared()
        self._baseline_left = window_batches  # batches that it still lacks
        self._window: deque[tuple[Compared, Sequence[Example]]] = deque(maxlen=window_batches)
        self._raised = False

    def observe(self, rewards: Sequence[float | None], checkers: Sequence[float | None]) -> None:
        """Take in one group: both values of each answer, None where there is none.

        Raises ValueError if the two are not equally many.
        """
        values = list(zip(rewards, checkers, strict=True))
        self._open += Compared.of([(r, c) for r, c in values if r is not None and c is not None])
        self._unscored += sum(r is not None and c is None for r, c in values)

    def wants(self, excess: float) -> bool:
        """Whether an answer with this reward - checker would be among the worst of the batch so far."""
        return excess > 0 and (len(self._examples) < EXAMPLES or excess > self._examples[-1].excess)

    def show(self, example: Example) -> None:
        """Keep it if it is among the worst of the batch so far."""
        self._examples = sorted([*self._examples, example], key=lambda kept: -kept.excess)[:EXAMPLES]

    def close_batch(self) -> tuple[dict[str, float], GapAlarm | None]:
        """`watch/*` of what was observed since the last call, and the alarm if it is to be raised now."""
        batch, unscored, examples = self._open, self._unscored, self._examples
        self._open, self._unscored, self._examples = Compared(), 0, []
        values: dict[str, float] = {}
        if batch.answers + unscored:
            values = {"watch/answers": batch.answers, "watch/unscored_ratio": unscored / (batch.answers + unscored)}
        if not batch.answers:
            return values, None
        values |= {
            "watch/reward": batch.reward / batch.answers,
            "watch/checker": batch.checker / batch.answers,
            "watch/gap": batch.gap,
        }
        if batch.agreement.rate is not None:
            values["watch/agreement"] = batch.agreement.rate
        self._window.append((batch, examples))
        if self._baseline_left:
            self._baseline += batch
            self._baseline_left -= 1
        if self._baseline_left:
            return values, None
        now = self._standing()
        values["watch/gap_growth"] = now.growth
        if math.isfinite(now.error):
            values["watch/gap_growth_error"] = now.error
        return values, now if self._crosses(now.growth, now.error) else None

    def _standing(self) -> GapAlarm:
        """How the gap of the last batches stands to the baseline's: what an alarm says, if there is to be one."""
        window = sum((batch for batch, _ in self._window), Compared())
        # The newest first among equals: `sorted` keeps their order.
        examples = [example for _, of_batch in reversed(self._window) for example in of_batch]
        return GapAlarm(
            self._primary,
            window,
            self._baseline,
            window.gap - self._baseline.gap,
            math.hypot(window.gap_error, self._baseline.gap_error),
            self._max_gap,
            len(self._window),
            tuple(sorted(examples, key=lambda example: -example.excess)[:EXAMPLES]),
        )

    def _crosses(self, growth: float, error: float) -> bool:
        """Whether the alarm is to be raised now."""
        if self._raised:
            self._raised = growth > self._max_gap / 2
            return False
        self._raised = growth > max(self._max_gap, CERTAINTY * error)
        return self._raised

    def state(self) -> dict[str, Any]:
        """Everything observed, of JSON's types."""
        return {
            "open": dataclasses.asdict(self._open),
            "unscored": self._unscored,
            "examples": [dataclasses.asdict(example) for example in self._examples],
            "baseline": dataclasses.asdict(self._baseline),
            "baseline_left": self._baseline_left,
            "window": [
                [dataclasses.asdict(batch), [dataclasses.asdict(example) for example in examples]]
                for batch, examples in self._window
            ],
            "raised": self._raised,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on exactly from `state`. A baseline that was complete stays, also with another `window_batches`."""
        self._open = _compared(state["open"])
        self._unscored = state["unscored"]
        self._examples = [Example(**fields) for fields in state["examples"]]
        self._baseline = _compared(state["baseline"])
        self._baseline_left = state["baseline_left"]
        self._window = deque(
            ((_compared(batch), [Example(**fields) for fields in examples]) for batch, examples in state["window"]),
            maxlen=self._window_batches,
        )
        self._raised = state["raised"]


def _compared(fields: Mapping[str, Any]) -> Compared:
    return Compared(**{**fields, "agreement": Agreement(**fields["agreement"])})
