"""The alarm on failing rewards: a run must not train on what is left when verifiers fail.

Contract: pure. It is fed every verdict and says when too large a share of the latest ones is errored or timed
out, with the function to look at and its commonest message. What to do then is the caller's decision.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass

from reward_workers.reward import FAILED, RewardResult


@dataclass(frozen=True)
class Alarm:
    """Of the last `seen` verdicts `failed` failed, most often (`failures` times) in `function`."""

    failed: int
    seen: int
    limit: float
    function: str
    message: str
    failures: int

    def __str__(self) -> str:
        return (
            f"{self.failed} of the last {self.seen} rewards errored or timed out "
            f"({self.failed / self.seen:.0%}, the limit is {self.limit:.0%}); most often reward function "
            f"{self.function!r} ({self.failures} times): {self.message}"
        )


class ErrorAlarm:
    """Watches the share of failed verdicts among the last `window`, once there are `minimum` of them."""

    def __init__(self, limit: float = 0.05, window: int = 200, minimum: int = 20) -> None:
        if not 0 <= limit <= 1:
            raise ValueError(f"the limit is a share between 0 and 1, got {limit}")
        if not 1 <= minimum <= window:
            raise ValueError(f"the minimum must lie between 1 and the window, {window}, got {minimum}")
        self._limit = limit
        self._minimum = minimum
        self._recent: deque[tuple[tuple[str, str], ...]] = deque(maxlen=window)  # per verdict: who failed, and how

    def add(self, results: Iterable[RewardResult]) -> Alarm | None:
        """Take verdicts in; the alarm if the share is over the limit now, else None."""
        self._recent.extend(_causes(result) for result in results)
        failed = sum(bool(causes) for causes in self._recent)
        seen = len(self._recent)
        if seen < self._minimum or failed <= self._limit * seen:
            return None
        causes = [cause for of_one in self._recent for cause in of_one]
        function, failures = Counter(name for name, _ in causes).most_common(1)[0]
        message = Counter(text for name, text in causes if name == function).most_common(1)[0][0]
        return Alarm(failed, seen, self._limit, function, message, failures)


def _causes(result: RewardResult) -> tuple[tuple[str, str], ...]:
    """The functions that failed in a verdict with their messages; empty for a verdict that did not fail."""
    if result.status not in FAILED:
        return ()
    found = tuple(
        (name, str(part["error"])) for name, part in result.detail.items() if isinstance(part, dict) and "error" in part
    )
    return found or (("unknown", result.status.value),)
