"""Optimizer updates that were left out because their gradient was not finite: counted, named, and not for ever.

The answers at fault are written to `skipped_updates.jsonl` in the run's folder, one line an update. A run whose updates are
all left out learns nothing: after so many in a row it ends.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path

from learner.worker import LearnReport

logger = logging.getLogger(__name__)

FILE = "skipped_updates.jsonl"


class GradientsNotFinite(RuntimeError):
    """No update was made for too long."""


class SkippedUpdates:
    """`limit` is learner.max_skipped_updates, in a row."""

    def __init__(self, folder: Path, limit: int) -> None:
        self._file = folder / FILE
        self._limit = limit
        self._in_a_row = 0

    def note(self, version: int, reports: Sequence[LearnReport]) -> int:
        """Take in the ranks' reports of the batch that improves `version`; how many of its updates were left out.

        Raises GradientsNotFinite when the limit is reached.
        """
        own = reports[0].skipped  # ranks skip together; each names its own answers
        for place, skipped in enumerate(own):
            answers = sorted(answer for report in reports for answer in report.skipped[place].answers)
            named = (
                ", ".join(f"{group_id}[{index}]" for group_id, index in answers) or "no answer: it overflowed backwards"
            )
            logger.warning(
                "version %d: update %d left out, its gradient is not finite, from %s", version, skipped.number, named
            )
            line = {"policy_version": version, "update": skipped.number}
            with self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line | {"answers": [{"group_id": g, "index": i} for g, i in answers]}) + "\n")
        self._in_a_row = _run_at_end(self._in_a_row, [s.number for s in own], len(reports[0].grad_norms) + len(own))
        if self._in_a_row >= self._limit:
            raise GradientsNotFinite(
                f"learner.max_skipped_updates={self._limit}: {self._in_a_row} optimizer updates in a row were left out, "
                f"their gradients are not finite. The answers at fault are in {self._file}. Look at actor/grad_norm before it: "
                "a norm that grew asks for a lower learner.learning_rate or learner.max_grad_norm; one that was small points to "
                "the loss, the reward's scale or model.dtype"
            )
        return len(own)


def _run_at_end(before: int, skipped: Sequence[int], total: int) -> int:
    """The length of the unbroken run of skipped updates at the end of `total` ones, with those `before` if it is all of them."""
    at_end = 0
    while at_end < total and total - 1 - at_end in skipped:
        at_end += 1
    return before + at_end if at_end == total else at_end
