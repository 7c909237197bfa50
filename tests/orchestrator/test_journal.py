"""The journal keeps everything exactly, and only the surviving lineage is read back."""

from __future__ import annotations

import errno
import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.journal import (
    JOURNAL,
    OUTCOMES,
    TRAJECTORIES,
    Outcome,
    TrajectoryRow,
    begin_lineage,
    read_outcomes,
    read_trajectories,
    write_outcomes,
    write_trajectories,
)
from rollout_workers.trajectory import RewardResult, Status, Trajectory, VersionSpan


def trajectory(group_id: str = "g0", index: int = 0, **changes: object) -> Trajectory:
    """Two prompt tokens, then three that the policy sampled under versions 3 and 4."""
    fields: dict[str, object] = {
        "group_id": group_id,
        "index": index,
        "prompt_id": "sums/17",
        "messages": ({"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2 ≠ 3"}),
        "token_ids": np.array([5, 6, 49151, 8, 9], dtype=np.int32),
        "response_mask": np.array([False, False, True, True, True]),
        "behaviour_logprobs": np.array([0, 0, -0.1, -1.7, -1e-7], dtype=np.float32),
        "version_spans": (VersionSpan(2, 3, 3), VersionSpan(3, 5, 4)),
        "finish_reason": "stop",
        "reward": RewardResult(
            0.75,
            components={"correct": 1.0, "style": None},
            metrics={"digits": 1},
            detail={"parsed": np.int64(2), "steps": np.array([1.5]), "odd": float("nan"), "set": {7}},
            step_values=[0.25, 0.5],
        ),
        "metrics": {"tool_calls": 2.0},
        "metadata": {"source": "sums"},
    }
    return Trajectory(**{**fields, **changes})  # type: ignore[arg-type]


def row(of: Trajectory, **changes: object) -> TrajectoryRow:
    fields: dict[str, object] = {
        "trajectory": of,
        "epoch": 1,
        "optimizer_step_start": 8,
        "optimizer_step_end": 10,
        "learner_logprobs": np.array([9, 9, -0.11, -1.71, -2e-7], dtype=np.float32),
        "trained": True,
        "advantage": -0.3333333333333333,
        "temperature": 0.7,
        "sampling": {"max_tokens": 64, "seed": 11},
        "dispatched_at_version": 3,
        "dispatched_at": 1.5,
        "generated_at": 2.5,
        "scored_at": 3.5,
        "trained_at": 4.5,
        "checker_value": 0.25,
    }
    return TrajectoryRow(**{**fields, **changes})  # type: ignore[arg-type]


def outcome(prompt_id: str, *, epoch: int = 0, fate: str = "trained", reason: str = "") -> Outcome:
    return Outcome(f"g/{prompt_id}", prompt_id, epoch, fate, [1.0, None], [3, 4], 0, 1.0, 2.0, reason)


def test_a_trajectory_is_read_back_exactly(tmp_path: Path) -> None:
    begin_lineage(tmp_path / JOURNAL, None)
    written = row(trajectory())
    path = write_trajectories(tmp_path / JOURNAL, 0, 4, 2, [written])
    assert "=" not in path.name
    table = read_trajectories(tmp_path, 4)
    assert table.schema.names == TRAJECTORIES.names
    [read] = table.to_pylist()
    assert read["token_ids"] == [5, 6, 49151, 8, 9]
    assert read["response_mask"] == [False, False, True, True, True]
    np.testing.assert_array_equal(
        np.array(read["behaviour_logprobs"], np.float32), written.trajectory.behaviour_logprobs
    )
    assert read["learner_logprobs"][:2] == [None, None]
    assert written.learner_logprobs is not None
    np.testing.assert_array_equal(np.array(read["learner_logprobs"][2:], np.float32), written.learner_logprobs[2:])
    assert read["version_spans"] == [
        {"start": 2, "end": 3, "version": 3},
        {"start": 3, "end": 5, "version": 4},
    ]
    assert json.loads(read["messages"])[1] == {"role": "assistant", "content": "2 ≠ 3"}
    assert (read["reward_value"], read["reward_status"]) == (0.75, "scored")
    assert dict(read["reward_components"]) == {"correct": 1.0, "style": None}
    assert dict(read["reward_metrics"]) == {"digits": 1.0}
    assert json.loads(read["reward_detail"]) == {"parsed": 2, "steps": [1.5], "odd": "nan", "set": "{7}"}
    assert read["reward_step_values"] == [0.25, 0.5]
    assert read["advantage"] == written.advantage
    assert read["checker_value"] == 0.25
    assert json.loads(read["sampling"]) == {"max_tokens": 64, "seed": 11}
    plain = ["lineage", "policy_version", "epoch", "index", "optimizer_step_start", "optimizer_step_end"]
    assert [read[name] for name in plain] == [0, 4, 1, 0, 8, 10]
    times = ["dispatched_at", "generated_at", "scored_at", "trained_at"]
    assert [read[name] for name in times] == [1.5, 2.5, 3.5, 4.5]


def test_members_without_reward_tokens_or_learner_logprobs_are_kept(tmp_path: Path) -> None:
    begin_lineage(tmp_path / JOURNAL, None)
    empty = trajectory(
        index=1,
        token_ids=np.empty(0, np.int32),
        response_mask=np.empty(0, bool),
        behaviour_logprobs=np.empty(0, np.float32),
        version_spans=(),
        reward=None,
    )
    failed = trajectory(index=2, reward=RewardResult(None, Status.TIMED_OUT, detail={"seen": "\ud83d"}))
    nan = trajectory(index=3, behaviour_logprobs=np.array([0, 0, np.nan, -1, -np.inf], np.float32))
    left_out = {"trained": False, "advantage": None, "learner_logprobs": None, "trained_at": None}
    rows = [row(empty, **left_out), row(failed, **left_out), row(nan)]
    write_trajectories(tmp_path / JOURNAL, 0, 4, 0, rows)
    read = read_trajectories(tmp_path).to_pylist()
    assert [r["token_ids"] for r in read] == [[], [5, 6, 49151, 8, 9], [5, 6, 49151, 8, 9]]
    assert [r["learner_logprobs"] is None for r in read] == [True, True, False]
    assert [r["reward_status"] for r in read] == [None, "timed_out", "scored"]
    assert [r["reward_value"] for r in read] == [None, None, 0.75]
    assert [r["trained"] for r in read] == [False, False, True]
    assert np.isnan(read[2]["behaviour_logprobs"][2])
    assert read[2]["behaviour_logprobs"][4] == -np.inf


def test_learner_logprobs_must_fit_the_tokens() -> None:
    with pytest.raises(ValueError, match="g0/0 has 5 tokens and 2 learner logprobs"):
        row(trajectory(), learner_logprobs=np.zeros(2, np.float32))


def test_shards_are_read_in_order_of_version_and_by_column(tmp_path: Path) -> None:
    begin_lineage(tmp_path / JOURNAL, None)
    for version, shard in [(10, 1), (2, 0), (10, 0)]:
        rows = [row(trajectory(f"g{version}-{shard}", index)) for index in range(2)]
        write_trajectories(tmp_path / JOURNAL, 0, version, shard, rows)
    table = read_trajectories(tmp_path, columns=["group_id", "index"])
    assert table.to_pydict() == {
        "group_id": ["g2-0", "g2-0", "g10-0", "g10-0", "g10-1", "g10-1"],
        "index": [0, 1, 0, 1, 0, 1],
    }
    assert read_trajectories(tmp_path, 10).num_rows == 4
    assert read_trajectories(tmp_path, 3).num_rows == 0


def test_a_run_without_rows_reads_as_empty_tables(tmp_path: Path) -> None:
    assert read_outcomes(tmp_path).schema == OUTCOMES
    begin_lineage(tmp_path / JOURNAL, None)
    write_outcomes(tmp_path / JOURNAL, 0, 0, [])
    assert read_outcomes(tmp_path).num_rows == 0
    assert read_trajectories(tmp_path).schema == TRAJECTORIES


def test_an_outcome_is_read_back(tmp_path: Path) -> None:
    begin_lineage(tmp_path / JOURNAL, None)
    write_outcomes(tmp_path / JOURNAL, 0, 7, [outcome("a", fate="failed", reason="half: \ud83d")])
    write_outcomes(tmp_path / JOURNAL, 0, 7, [outcome("b")], shard=1)
    read = read_outcomes(tmp_path).to_pylist()
    assert [(r["prompt_id"], r["outcome"], r["policy_version"]) for r in read] == [
        ("a", "failed", 7),
        ("b", "trained", 7),
    ]
    assert read[0]["reason"] == "half: \\ud83d"
    assert (read[0]["reward_values"], read[0]["response_lengths"]) == ([1.0, None], [3, 4])
    assert (read[0]["dispatched_at"], read[0]["settled_at"]) == (1.0, 2.0)


def test_a_prompt_settles_once_and_in_a_known_way(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="prompt a of epoch 0 settled more than once"):
        write_outcomes(tmp_path, 0, 7, [outcome("a"), outcome("b"), outcome("a", fate="stale")])
    with pytest.raises(ValueError, match=r"must be one of .* got 'lost'"):
        outcome("a", fate="lost")
    write_outcomes(tmp_path, 0, 7, [outcome("a"), outcome("a", epoch=1)])


def test_what_a_killed_writer_left_is_ignored_and_cleaned(tmp_path: Path) -> None:
    journal_dir = tmp_path / JOURNAL
    begin_lineage(journal_dir, None)
    path = write_outcomes(journal_dir, 0, 0, [outcome("a")])
    half = path.with_name(f".{path.name}.1234.temporary")
    half.write_bytes(path.read_bytes()[:40])
    assert read_outcomes(tmp_path)["prompt_id"].to_pylist() == ["a"]
    assert begin_lineage(journal_dir, 1) == 1
    assert not half.exists()
    assert read_outcomes(tmp_path)["prompt_id"].to_pylist() == ["a"]


def test_a_failed_write_leaves_the_old_file_and_names_the_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin_lineage(tmp_path / JOURNAL, None)
    path = write_outcomes(tmp_path / JOURNAL, 0, 0, [outcome("a")])

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: .*version-000000.*bytes free") as caught:
        write_outcomes(tmp_path / JOURNAL, 0, 0, [outcome("b")])
    assert caught.value.errno == errno.ENOSPC
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    assert read_outcomes(tmp_path)["prompt_id"].to_pylist() == ["a"]


def test_f04_a_resume_at_an_epoch_boundary_keeps_both_epochs(tmp_path: Path) -> None:
    """Case f04, one tenth in size: 6 batches an epoch, resumed after exactly one epoch."""
    journal_dir = tmp_path / JOURNAL
    for resumed, batches, epoch in [(None, range(0, 6), 0), (6, range(6, 12), 1)]:
        lineage = begin_lineage(journal_dir, resumed)
        for version in batches:
            write_outcomes(journal_dir, lineage, version, [outcome(f"p{version % 6}", epoch=epoch)])
    read = read_outcomes(tmp_path).to_pylist()
    assert [(r["epoch"], r["prompt_id"]) for r in read] == [(e, f"p{i}") for e in (0, 1) for i in range(6)]


def test_f11_a_resume_replaces_what_came_after_its_checkpoint(tmp_path: Path) -> None:
    """Case f11, one tenth in size: a checkpoint at 10, a crash at 15, a resume that gets to 12."""
    journal_dir = tmp_path / JOURNAL
    first = begin_lineage(journal_dir, None)
    for version in range(15):
        write_outcomes(journal_dir, first, version, [outcome(f"old{version}")])
    second = begin_lineage(journal_dir, 10)
    for version in (10, 11):
        write_outcomes(journal_dir, second, version, [outcome(f"new{version}")])
    write_outcomes(journal_dir, first, 12, [outcome("a late writer of the first lineage")])
    expected = [f"old{v}" for v in range(10)] + ["new10", "new11"]
    assert read_outcomes(tmp_path)["prompt_id"].to_pylist() == expected


def test_a_fresh_start_in_the_same_folder_replaces_everything(tmp_path: Path) -> None:
    journal_dir = tmp_path / JOURNAL
    write_outcomes(journal_dir, begin_lineage(journal_dir, None), 0, [outcome("old")])
    write_outcomes(journal_dir, begin_lineage(journal_dir, None), 0, [outcome("new")])
    assert read_outcomes(tmp_path)["prompt_id"].to_pylist() == ["new"]


@settings(max_examples=30, deadline=None)
@given(
    starts=st.lists(
        st.tuples(
            st.integers(0, 5),  # batches trained in this start
            st.sets(st.integers(0, 12)),  # versions at which it saves
            st.booleans(),  # whether the newest checkpoint is damaged afterwards
            st.booleans(),  # whether it dies between writing a batch's outcomes and publishing it
        ),
        min_size=1,
        max_size=5,
    )
)
def test_the_surviving_lineage_is_the_history_of_the_running_state(
    starts: list[tuple[int, set[int], bool, bool]],
) -> None:
    """Against a model: a state is the list of batches that led to it, a checkpoint is a copy of that list."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder)
        checkpoints: list[list[str]] = []
        on_disk: list[str] = []
        for start, (batches, saves, damaged, dies_midway) in enumerate(starts):
            history = list(checkpoints[-1]) if checkpoints else []
            lineage = begin_lineage(run_dir / JOURNAL, len(history) if checkpoints else None)
            assert lineage == start
            on_disk = list(history)
            first = len(history)
            for version in range(first, first + batches):
                batch = f"start {start} batch {version}"
                write_outcomes(run_dir / JOURNAL, lineage, version, [outcome(batch)])
                on_disk.append(batch)
                if dies_midway and version == first + 2:
                    break
                history.append(batch)
                if version + 1 in saves:
                    checkpoints.append(list(history))
            if damaged and checkpoints:
                checkpoints.pop()
            assert read_outcomes(run_dir)["prompt_id"].to_pylist() == on_disk
        # A resume makes the record agree with the state that it continues from.
        history = list(checkpoints[-1]) if checkpoints else []
        begin_lineage(run_dir / JOURNAL, len(history) if checkpoints else None)
        assert read_outcomes(run_dir)["prompt_id"].to_pylist() == history
