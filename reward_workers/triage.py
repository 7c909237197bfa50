"""The ticket-triage example: three rewards of one answer, two of which `reward_workers` has already.

The policy sorts a support ticket and answers `{"category": "billing"}`. Its form is judged by
`reward_workers.structured.grade_json` against a schema, its length by `reward_workers.shaping.over_characters`, its
category here: a data row lists the labels that are acceptable for its ticket (`labels`). `conf/reward/triage.yaml` puts
the three together.

The reward reads the category wherever it stands outside of a thought, so that it can be learned before the form is. The
checker of evaluation is written apart and asks for both.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from reward_workers.function import gold_written_by, rows_checked_by
from reward_workers.strict_json import after_thought
from rollout_workers.trajectory import RewardResult

CATEGORIES = ("billing", "technical", "shipping", "account")
_WORD = re.compile(rf"\b(?:{'|'.join(CATEGORIES)})\b", re.IGNORECASE)


def check_labels(labels: Sequence[str]) -> None:
    """Raises ValueError unless they are some, not all, of CATEGORIES."""
    if not isinstance(labels, list | tuple) or not labels or not set(labels) < set(CATEGORIES):
        raise ValueError(f"labels={labels!r}: expected a list of some of {', '.join(CATEGORIES)}")


def write_labels(labels: Sequence[str]) -> list[str]:
    """An answer in the right form for each acceptable label."""
    return [json.dumps({"category": label}) for label in labels]


@rows_checked_by(check_labels)
@gold_written_by(write_labels)
def category(completion: str, labels: Sequence[str]) -> RewardResult:
    """1 if the completion names one category, and that is an acceptable one, else 0.

    Naming several earns nothing, or a list of all would always be right. Metrics: `names_none` and `names_several`.
    """
    named = {word.lower() for word in _WORD.findall(after_thought(completion) or "")}
    return RewardResult(
        float(len(named) == 1 and named <= set(labels)),
        metrics={"names_none": float(not named), "names_several": float(len(named) > 1)},
    )


@rows_checked_by(check_labels)
@gold_written_by(write_labels)
def checker(completion: str, labels: Sequence[str]) -> float:
    """1 if the completion is a JSON object with `category` alone, and that is an acceptable one, else 0."""
    try:
        answer = json.loads(completion)
    except (ValueError, RecursionError):
        return 0.0
    return float(any(answer == {"category": label} for label in labels))
