"""A batch as a run's journal has it, made into what the learner's plan and loss are computed from.

Contract: nothing is recomputed here and nothing is invented. Groups are in the order of dispatch, as in the batch that was
trained on; every answer keeps its index, and those that were never written down are errored members.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from learner.batch import Coefficients
from orchestrator.config import ConfigError
from orchestrator.flight import Flight
from orchestrator.journal import read_trajectories
from orchestrator.prompts import Prompt
from orchestrator.sampling_types import Batch, BatchGroup, Counts, Member, Tally
from orchestrator.sinks import read_metrics
from rollout_workers.trajectory import RewardResult, Status, Trajectory, VersionSpan
from rollout_workers.worker import report_of

_NUMBER = re.compile(r"g\d+-(\d+)")  # of a group's id: the order of dispatch

Answer = tuple[str, int]  # group id, index


@dataclass(frozen=True)
class RecordedBatch:
    """One batch as the journal has it. The payload number of a group is its place in `batch.groups`.

    `learner_logprobs` are float32 [sampled tokens] of each trained answer, `advantages` those that it was trained with, and
    `metrics` the record of the version that the batch led to, empty where there is none.
    """

    batch: Batch
    flights: Mapping[str, Flight]
    payloads: Mapping[int, tuple[Trajectory, ...]]
    learner_logprobs: Mapping[Answer, np.ndarray]
    advantages: Mapping[Answer, float | None]
    optimizer_step: int  # after the batch
    coefficients: Coefficients
    metrics: Mapping[str, float | None]


def recorded_versions(run_dir: Path) -> list[int]:
    """The versions whose batches the journal holds, ascending."""
    return sorted(set(read_trajectories(run_dir, columns=["policy_version"])["policy_version"].to_pylist()))


def read_batch(run_dir: Path, version: int) -> RecordedBatch:
    """The batch that improved `version`. Raises ConfigError, naming replay.version, when the journal has none."""
    table = read_trajectories(run_dir, version)
    if not len(table):
        there = recorded_versions(run_dir)
        between = f"those of {there[0]} to {there[-1]}" if there else "none at all"
        raise ConfigError(f"replay.version={version}: the journal of {run_dir} has no such batch; it has {between}")
    rows = _rows(table)
    by_group: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_group.setdefault(row["group_id"], []).append(row)
    # A batch is in the order of dispatch, as its groups are numbered; the journal's shards each hold some of them.
    groups, flights, payloads = [], {}, {}
    for number, (group_id, members) in enumerate(sorted(by_group.items(), key=lambda item: _order(item[0]))):
        members.sort(key=lambda row: row["index"])
        payloads[number] = tuple(_trajectory(row) for row in members)
        flights[group_id] = _flight(members, payloads[number])
        groups.append(_group(members, payloads[number]))
    batch = Batch(version, tuple(groups), len(groups), Tally(), Counts(*[0] * 11))
    return RecordedBatch(
        batch,
        flights,
        payloads,
        {_answer(row): _sampled(row) for row in rows if row["trained"]},
        {_answer(row): row["advantage"] for row in rows},
        rows[0]["optimizer_step_end"],
        Coefficients(rows[0]["kl_coefficient"], rows[0]["entropy_coefficient"]),
        _metrics(run_dir, version + 1),
    )


def _rows(table: pa.Table) -> list[dict[str, Any]]:
    """One dict per trajectory; the columns of tokens are arrays."""
    tokens = ("token_ids", "response_mask", "behaviour_logprobs", "learner_logprobs")
    rows = table.drop_columns(list(tokens)).to_pylist()
    for name in tokens:
        for row, values in zip(rows, _arrays(table[name]), strict=True):
            row[name] = values
    return rows


def _arrays(column: pa.ChunkedArray) -> Iterator[np.ndarray | None]:
    """Each list of a column as an array without a detour over Python numbers; nulls within are NaN."""
    for chunk in column.chunks:
        flat = chunk.flatten().to_numpy(zero_copy_only=False)
        lengths = chunk.value_lengths().to_pylist()
        start = 0
        for length in lengths:
            if length is None:
                yield None
                continue
            yield flat[start : start + length]
            start += length


def _answer(row: Mapping[str, Any]) -> Answer:
    return row["group_id"], row["index"]


def _order(group_id: str) -> tuple[int, str]:
    match = _NUMBER.fullmatch(group_id)
    return (int(match[1]) if match else 0), group_id


def _sampled(row: Mapping[str, Any]) -> np.ndarray:
    if row["learner_logprobs"] is None:
        raise ValueError(f"the journal has no learner logprobs of {named(_answer(row))}, which was trained on")
    return np.asarray(row["learner_logprobs"], dtype=np.float32)[row["response_mask"].astype(bool)]


def _trajectory(row: Mapping[str, Any]) -> Trajectory:
    reward = None
    if row["reward_status"] is not None:
        reward = RewardResult(
            row["reward_value"],
            Status(row["reward_status"]),
            dict(row["reward_components"] or ()),
            dict(row["reward_metrics"] or ()),
            json.loads(row["reward_detail"] or "{}"),
            row["reward_step_values"],
        )
    return Trajectory(
        group_id=row["group_id"],
        index=row["index"],
        prompt_id=row["prompt_id"],
        messages=tuple(json.loads(row["messages"])),
        token_ids=np.asarray(row["token_ids"], dtype=np.int32),
        response_mask=np.asarray(row["response_mask"], dtype=bool),
        behaviour_logprobs=np.asarray(row["behaviour_logprobs"], dtype=np.float32),
        version_spans=tuple(VersionSpan(s["start"], s["end"], s["version"]) for s in row["version_spans"]),
        finish_reason=row["finish_reason"],
        reward=reward,
        turns=row["turns"],
        metrics=dict(row["metrics"]),
        metadata=json.loads(row["metadata"]),
    )


def _flight(members: Sequence[Mapping[str, Any]], trajectories: Sequence[Trajectory]) -> Flight:
    first = trajectories[0]
    prompt = Prompt(first.prompt_id, "", tuple(first.prompt_messages), {}, None, members[0]["epoch"], None)
    flight = Flight(first.group_id, prompt, len(members), members[0]["dispatched_at_version"])
    for t in trajectories:
        flight.reports[t.index] = report_of(t)
        if t.reward is not None:
            flight.results[t.index] = t.reward
    return flight


def _group(members: Sequence[Mapping[str, Any]], trajectories: Sequence[Trajectory]) -> BatchGroup:
    """What the queue knew of a group; its trainable members are those that entered the loss."""
    known = [Member(index, Status.ERRORED) for index in range(1 + max(t.index for t in trajectories))]
    for t in trajectories:
        status, value = (Status.ERRORED, None) if t.reward is None else (t.reward.status, t.reward.value)
        known[t.index] = Member(
            t.index, status, value, value, report_of(t).token_versions, t.response_length, t.truncated
        )
    trained = tuple(row["index"] for row in members if row["trained"])
    first = trajectories[0]
    return BatchGroup(first.group_id, first.prompt_id, members[0]["epoch"], tuple(known), trained)


def _metrics(run_dir: Path, version: int) -> dict[str, float | None]:
    path = run_dir / "metrics.jsonl"
    records = read_metrics(path) if path.exists() else []
    found = [r for r in records if r["policy_version"] == version and "optimizer_step" in r]  # not an evaluation's
    return found[-1] if found else {}


def named(answer: Answer) -> str:
    return f"{answer[0]}[{answer[1]}]"
