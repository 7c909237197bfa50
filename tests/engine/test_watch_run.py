"""A real run whose reward can be gamed: the checker beside it notices, and the run ends with what to look at."""

from __future__ import annotations

import collections
import statistics
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.journal import read_trajectories
from orchestrator.sinks import read_metrics

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

# The random model soon repeats one letter, which is all that the reward asks for; the checker wants different ones.
REWARDS = """
def letters(completion):
    return sum("a" <= c <= "z" for c in completion) / (len(completion) + 1)

def varied(completion):
    return len({c for c in completion if "a" <= c <= "z"}) / (len(completion) + 1)
"""


def test_a_gamed_reward_ends_the_run(launch: Callable, tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(REWARDS)
    run = launch(
        "reward=custom",
        f"reward.functions.letters.path={tmp_path / 'rewards.py'}:letters",
        f"reward.watch.checker.path={tmp_path / 'rewards.py'}:varied",
        "reward.watch.share=0.5",
        "reward.watch.window_batches=3",
        "reward.watch.on_gap=stop",
        "logging.wandb=offline",
        "run.batches=60",
        "learner.learning_rate=6e-3",
        "checkpoint.every_batches=0",
    )
    assert run.finish(400) == 1, run.output
    run.assert_nothing_left()
    message = run.output.split("headway: RewardGamed: ")[1]
    for piece in (
        "'letters' parts from its checker",
        "reward.watch.max_gap=0.2",
        "checker_value",
        "'Write ",
        "prompt main:",
    ):
        assert piece in message, piece
    assert "Traceback (most recent call last)" not in run.output
    assert not (run.folder / "model").exists()

    records = read_metrics(run.folder / "metrics.jsonl")
    watched = [record for record in records if "watch/gap" in record]
    assert watched[-1]["policy_version"] == records[-1]["policy_version"] < 60
    assert watched[-1]["watch/gap_growth"] > 0.2
    assert watched[-1]["watch/gap"] > watched[0]["watch/gap"] + 0.1
    assert all(record["watch/unscored_ratio"] == 0 for record in watched)
    # About half of the answers were watched; the journal has both values of those, from which the figures follow.
    rows = read_trajectories(run.folder).to_pylist()
    gaps = collections.defaultdict(list)
    for row in rows:
        if row["checker_value"] is not None:
            gaps[row["policy_version"] + 1].append(dict(row["reward_components"])["letters"] - row["checker_value"])
    assert 0.2 * len(rows) < sum(map(len, gaps.values())) < 0.8 * len(rows)
    in_time = [r for r in watched if r["watch/answers"] == len(gaps[r["policy_version"]])]
    assert len(in_time) > len(watched) / 2  # a verdict may come after its answers were journaled
    for record in in_time:
        assert record["watch/gap"] == pytest.approx(statistics.fmean(gaps[record["policy_version"]]))
    [log] = (run.folder / "wandb").glob("offline-run-*/*.wandb")
    assert b"The reward parts from its checker" in log.read_bytes()
