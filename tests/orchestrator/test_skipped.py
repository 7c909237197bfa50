"""Updates that are not finite are named and counted, and end a run in which nothing else happens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from learner.worker import LearnReport, SkippedUpdate
from orchestrator.skipped import FILE, GradientsNotFinite, SkippedUpdates


def report(made: int, *skipped: SkippedUpdate) -> LearnReport:
    return LearnReport({}, {}, (1.0,) * made, (1e-6,) * made, skipped, made, 0, 0)


def test_answers_of_all_ranks_are_written_down(tmp_path: Path) -> None:
    updates = SkippedUpdates(tmp_path, limit=2)
    ranks = [report(1, SkippedUpdate(1, (("b", 0),))), report(1, SkippedUpdate(1, (("a", 3), ("a", 1))))]
    assert updates.note(7, ranks) == 1
    [line] = [json.loads(line) for line in (tmp_path / FILE).read_text().splitlines()]
    answers = [{"group_id": g, "index": i} for g, i in (("a", 1), ("a", 3), ("b", 0))]
    assert line == {"policy_version": 7, "update": 1, "answers": answers}


def test_a_batch_without_any_writes_nothing(tmp_path: Path) -> None:
    assert SkippedUpdates(tmp_path, limit=1).note(0, [report(4)]) == 0
    assert not (tmp_path / FILE).exists()


def test_so_many_in_a_row_end_the_run(tmp_path: Path) -> None:
    updates = SkippedUpdates(tmp_path, limit=3)
    updates.note(0, [report(1, SkippedUpdate(1, ()))])
    updates.note(1, [report(0, SkippedUpdate(0, ()))])
    with pytest.raises(GradientsNotFinite, match=r"max_skipped_updates=3: 3 .*skipped_updates.jsonl"):
        updates.note(2, [report(0, SkippedUpdate(0, (("g", 1),)))])


def test_an_update_that_is_made_breaks_the_row(tmp_path: Path) -> None:
    updates = SkippedUpdates(tmp_path, limit=3)
    for version in range(5):
        updates.note(version, [report(1, SkippedUpdate(0, ()), SkippedUpdate(1, ()))])  # the third is made
        updates.note(version, [report(1, SkippedUpdate(1, ()), SkippedUpdate(2, ()))])  # the first is made
