"""The journal: everything that was trained on, and what became of every prompt, as Parquet.

    journal/lineage-0001.json                                              a start of the run
    journal/trajectories/lineage-0001-version-000012-shard-000.parquet     rows of `TRAJECTORIES`
    journal/outcomes/lineage-0001-version-000012-shard-000.parquet         rows of `OUTCOMES`

A row's `policy_version` is the version that its batch improves: the batch of version v leads to version v+1.
Each start of a run is a lineage 0, 1, 2, …; a resumed one continues from a checkpoint, which holds the state
after `resumed_from_version` publishes.

Invariants
- Append-only: a file is there whole or not at all, and only a retry of the same write replaces it.
- The fence: a lineage that resumed from version V replaces what earlier lineages wrote under versions >= V;
  one that started afresh replaces everything. What is left is the surviving lineage, all that readers return.
- A resume is exact if the checkpoint at V and the journal below V agree: an outcome that the checkpoint's
  prompt frontier counts as done is written, under a version below V, before V is committed; any other one
  goes under V or above.

Writers need nothing but their arguments, so shards can be written by tasks on the nodes that hold the tokens;
the folder must then be shared. Readers take the run's folder and order rows by version, then shard.
"""

from __future__ import annotations

import json
import logging
import math
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.parquet as pq

from orchestrator.durable import remove_temporaries, whole_file, write_json
from rollout_workers.trajectory import Trajectory

logger = logging.getLogger(__name__)

JOURNAL = "journal"  # folder within the run's
FATES = ("trained", "filtered", "failed", "stale")

_TRAJECTORIES, _OUTCOMES = "trajectories", "outcomes"
_SHARD_NAME = re.compile(r"lineage-(\d+)-version-(\d+)-shard-(\d+)\.parquet")
_LINEAGE_NAME = re.compile(r"lineage-(\d+)\.json")


def _required(name: str, kind: pa.DataType) -> pa.Field:
    return pa.field(name, kind, nullable=False)


_JSON = pa.string()  # columns that hold JSON, because users decide what is in them
# Tokens start (inclusive) to end (exclusive) were sampled under version.
_SPAN = pa.struct([("start", pa.int32()), ("end", pa.int32()), ("version", pa.int64())])
_NUMBERS = pa.map_(pa.string(), pa.float64())

TRAJECTORIES = pa.schema(
    [
        _required("lineage", pa.int32()),
        _required("policy_version", pa.int64()),  # the version the batch improves
        _required("optimizer_step_start", pa.int64()),  # the batch's updates: start inclusive,
        _required("optimizer_step_end", pa.int64()),  # end exclusive
        _required("group_id", pa.string()),
        _required("prompt_id", pa.string()),
        _required("epoch", pa.int32()),
        _required("index", pa.int32()),  # within the group
        _required("token_ids", pa.list_(pa.int32())),  # [T], as the engine sampled them
        _required("response_mask", pa.list_(pa.bool_())),  # [T], True where the policy sampled
        _required("behaviour_logprobs", pa.list_(pa.float32())),  # [T], the engine's
        # [T], the learner's at its first pass over the answer: before the batch's first update with one update a batch or
        # algorithm.proximal=recompute, else before the answer's own update; null where the policy did not sample
        pa.field("learner_logprobs", pa.list_(pa.float32())),
        _required("version_spans", pa.list_(_SPAN)),
        _required("finish_reason", pa.string()),
        _required("turns", pa.int32()),
        _required("messages", _JSON),
        _required("metrics", _NUMBERS),
        _required("metadata", _JSON),
        pa.field("reward_value", pa.float64()),  # null where there is no number
        pa.field("reward_status", pa.string()),  # null where it was never judged
        pa.field("reward_components", _NUMBERS),
        pa.field("reward_metrics", _NUMBERS),
        pa.field("reward_detail", _JSON),
        pa.field("reward_step_values", pa.list_(pa.float64())),
        pa.field("checker_value", pa.float64()),  # of reward.watch; null where it was not asked or not done yet
        _required("trained", pa.bool_()),  # False: in the batch, but left out of the loss
        pa.field("advantage", pa.float64()),  # null where it has none
        pa.field("kl_coefficient", pa.float64()),  # of the batch, where it is adapted (algorithm.kl_target), else null
        pa.field("entropy_coefficient", pa.float64()),  # likewise (algorithm.entropy_target)
        _required("temperature", pa.float64()),
        _required("sampling", _JSON),  # the other sampling parameters of the request
        _required("dispatched_at_version", pa.int64()),
        pa.field("dispatched_at", pa.float64()),  # Unix seconds, here and below
        pa.field("generated_at", pa.float64()),
        pa.field("scored_at", pa.float64()),
        pa.field("trained_at", pa.float64()),
    ]
)

OUTCOMES = pa.schema(
    [
        _required("lineage", pa.int32()),
        _required("policy_version", pa.int64()),
        _required("group_id", pa.string()),
        _required("prompt_id", pa.string()),
        _required("epoch", pa.int32()),
        _required("outcome", pa.string()),  # one of FATES
        _required("reward_values", pa.list_(pa.float64())),  # by index; null where unscored
        _required("response_lengths", pa.list_(pa.int32())),  # sampled tokens, by index
        _required("reason", pa.string()),  # why it did not train; empty if it did
        _required("dispatched_at_version", pa.int64()),
        pa.field("dispatched_at", pa.float64()),  # Unix seconds
        _required("settled_at", pa.float64()),
    ]
)


@dataclass(frozen=True)
class TrajectoryRow:
    """One trajectory of a batch with what the learner and the queue know about it.

    `learner_logprobs` float32 [T] are the learner's at its first pass over the answer (temperature applied), None
    if it computed none. The batch's optimizer updates are `optimizer_step_start` (inclusive)
    to `optimizer_step_end` (exclusive). `trained` is False for a member that was left out of the loss (stale,
    masked, unscored), `advantage` None where it has none. `sampling` holds the request's parameters besides
    the temperature. Times are Unix seconds, None where a phase was never reached. `checker_value` is the verdict
    of reward.watch where there was one by then. The coefficients are the batch's, None where they are not adapted.

    Raises ValueError, naming the trajectory, when the learner's logprobs are not as many as its tokens.
    """

    trajectory: Trajectory
    epoch: int
    optimizer_step_start: int
    optimizer_step_end: int
    learner_logprobs: np.ndarray | None
    trained: bool
    advantage: float | None
    temperature: float
    sampling: Mapping[str, Any]
    dispatched_at_version: int
    dispatched_at: float | None = None
    generated_at: float | None = None
    scored_at: float | None = None
    trained_at: float | None = None
    checker_value: float | None = None
    kl_coefficient: float | None = None
    entropy_coefficient: float | None = None

    def __post_init__(self) -> None:
        expected = len(self.trajectory.token_ids)
        if self.learner_logprobs is not None and len(self.learner_logprobs) != expected:
            raise ValueError(
                f"trajectory {self.trajectory.group_id}/{self.trajectory.index} has {expected} tokens "
                f"and {len(self.learner_logprobs)} learner logprobs"
            )


@dataclass(frozen=True)
class Outcome:
    """What finally became of one offered prompt in one epoch: `outcome` is one of `FATES`.

    `reward_values` (None: unscored) and `response_lengths` (sampled tokens) are by member index. Times are
    Unix seconds. Raises ValueError when `outcome` is none of `FATES`.
    """

    group_id: str
    prompt_id: str
    epoch: int
    outcome: str
    reward_values: Sequence[float | None]
    response_lengths: Sequence[int]
    dispatched_at_version: int
    dispatched_at: float | None
    settled_at: float
    reason: str = ""

    def __post_init__(self) -> None:
        if self.outcome not in FATES:
            raise ValueError(f"outcome of prompt {self.prompt_id} must be one of {FATES}, got {self.outcome!r}")


def begin_lineage(journal_dir: Path, resumed_from_version: int | None) -> int:
    """Fence what earlier starts wrote after the checkpoint that this one resumes from (None: afresh).

    Returns the lineage's number. Call it once per start, after the checkpoint is chosen and before
    anything is written. Temporary files of killed writers are removed.
    """
    journal_dir.mkdir(parents=True, exist_ok=True)
    remove_temporaries(journal_dir)
    lineage = max(_resume_points(journal_dir), default=-1) + 1
    start = {"lineage": lineage, "resumed_from_version": resumed_from_version, "started_at": time.time()}
    write_json(journal_dir / f"lineage-{lineage:04d}.json", start)
    logger.info("lineage %d of the journal starts from version %s", lineage, resumed_from_version or 0)
    return lineage


def write_trajectories(
    journal_dir: Path, lineage: int, policy_version: int, shard: int, rows: Sequence[TrajectoryRow]
) -> Path:
    """Write one shard of a batch's trajectories, whole or not at all; the same shard again replaces it.

    Trajectories are written as they are, except that what JSON can't hold in messages, metadata, detail and
    sampling becomes its `repr`, and `routed_experts` is left out. Raises OSError that names the file and the
    bytes free.
    """
    trajectories = [row.trajectory for row in rows]
    masks = [np.asarray(t.response_mask, dtype=bool) for t in trajectories]
    rewards = [t.reward for t in trajectories]
    columns = {
        "lineage": [lineage] * len(rows),
        "policy_version": [policy_version] * len(rows),
        "optimizer_step_start": [row.optimizer_step_start for row in rows],
        "optimizer_step_end": [row.optimizer_step_end for row in rows],
        "group_id": [t.group_id for t in trajectories],
        "prompt_id": [t.prompt_id for t in trajectories],
        "epoch": [row.epoch for row in rows],
        "index": [t.index for t in trajectories],
        "token_ids": _token_lists([t.token_ids for t in trajectories], np.int32),
        "response_mask": _token_lists(list(masks), np.bool_),
        "behaviour_logprobs": _token_lists([t.behaviour_logprobs for t in trajectories], np.float32),
        "learner_logprobs": _token_lists([row.learner_logprobs for row in rows], np.float32, masks),
        "version_spans": [
            [{"start": s.start, "end": s.end, "version": s.version} for s in t.version_spans] for t in trajectories
        ],
        "finish_reason": [t.finish_reason for t in trajectories],
        "turns": [t.turns for t in trajectories],
        "messages": [_json(t.messages) for t in trajectories],
        "metrics": [_numbers(t.metrics) for t in trajectories],
        "metadata": [_json(t.metadata) for t in trajectories],
        "reward_value": [r and r.value for r in rewards],
        "reward_status": [r and r.status.value for r in rewards],
        "reward_components": [r and _numbers(r.components) for r in rewards],
        "reward_metrics": [r and _numbers(r.metrics) for r in rewards],
        "reward_detail": [r and _json(r.detail) for r in rewards],
        "reward_step_values": [r and r.step_values for r in rewards],
        "checker_value": [row.checker_value for row in rows],
        "trained": [row.trained for row in rows],
        "advantage": [row.advantage for row in rows],
        "kl_coefficient": [row.kl_coefficient for row in rows],
        "entropy_coefficient": [row.entropy_coefficient for row in rows],
        "temperature": [row.temperature for row in rows],
        "sampling": [_json(row.sampling) for row in rows],
        "dispatched_at_version": [row.dispatched_at_version for row in rows],
        "dispatched_at": [row.dispatched_at for row in rows],
        "generated_at": [row.generated_at for row in rows],
        "scored_at": [row.scored_at for row in rows],
        "trained_at": [row.trained_at for row in rows],
    }
    table = pa.table(columns, schema=TRAJECTORIES)
    return _write(journal_dir / _TRAJECTORIES, lineage, policy_version, shard, table)


def write_outcomes(
    journal_dir: Path, lineage: int, policy_version: int, outcomes: Sequence[Outcome], shard: int = 0
) -> Path:
    """Write what became of the prompts that settled with the batch of `policy_version`, whole or not at all.

    What settles between a run's last batch and its final checkpoint belongs to that batch's version too, as a further `shard`:
    under the next version, a resume from this checkpoint would fence it. Raises ValueError when a prompt settles
    twice, OSError that names the file and the bytes free.
    """
    times = Counter((outcome.prompt_id, outcome.epoch) for outcome in outcomes)
    twice = [key for key, count in times.items() if count > 1]
    if twice:
        prompt_id, epoch = twice[0]
        raise ValueError(f"prompt {prompt_id} of epoch {epoch} settled more than once under version {policy_version}")
    columns: dict[str, list[Any]] = {name: [getattr(o, name) for o in outcomes] for name in OUTCOMES.names[2:]}
    columns["reason"] = [_text(o.reason) for o in outcomes]
    head = {"lineage": [lineage] * len(outcomes), "policy_version": [policy_version] * len(outcomes)}
    table = pa.table({**head, **columns}, schema=OUTCOMES)
    return _write(journal_dir / _OUTCOMES, lineage, policy_version, shard, table)


def read_outcomes(run_dir: Path) -> pa.Table:
    """The outcomes of the surviving lineage, with the columns of `OUTCOMES`."""
    return _read(run_dir / JOURNAL, _OUTCOMES, OUTCOMES, None, None)


def read_trajectories(
    run_dir: Path, policy_version: int | None = None, columns: Sequence[str] | None = None
) -> pa.Table:
    """The trajectories of the surviving lineage, of one batch or of all, with the columns of `TRAJECTORIES`.

    A large run's tokens do not fit in memory: name a `policy_version` or the `columns` that are needed.
    """
    return _read(run_dir / JOURNAL, _TRAJECTORIES, TRAJECTORIES, policy_version, columns)


def _write(folder: Path, lineage: int, policy_version: int, shard: int, table: pa.Table) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"lineage-{lineage:04d}-version-{policy_version:06d}-shard-{shard:03d}.parquet"
    with whole_file(path) as file:
        pq.write_table(table, file, compression="zstd")
    return path


def _read(
    journal_dir: Path, kind: str, schema: pa.Schema, policy_version: int | None, columns: Sequence[str] | None
) -> pa.Table:
    survivors = []
    fences = _resume_points(journal_dir)
    for path in (journal_dir / kind).glob("*.parquet"):
        match = _SHARD_NAME.fullmatch(path.name)
        if match is None:
            continue  # being written
        lineage, version, shard = map(int, match.groups())
        fenced = any(later > lineage and resumed <= version for later, resumed in fences.items())
        if not fenced and policy_version in (None, version):
            survivors.append((version, shard, path))
    names = list(schema.names if columns is None else columns)
    if not survivors:
        return schema.empty_table().select(names)
    paths = [str(path) for _, _, path in sorted(survivors)]
    return pads.dataset(paths, schema=schema, format="parquet").to_table(columns=names)


def _resume_points(journal_dir: Path) -> dict[int, int]:
    """The first version that each lineage writes: what it resumed from, 0 where it started afresh."""
    points = {}
    for path in journal_dir.glob("lineage-*.json"):
        match = _LINEAGE_NAME.fullmatch(path.name)
        if match is not None:
            points[int(match[1])] = json.loads(path.read_bytes())["resumed_from_version"] or 0
    return points


def _token_lists(
    arrays: Sequence[np.ndarray | None], dtype: type[np.generic], masks: Sequence[np.ndarray] | None = None
) -> pa.ListArray:
    """One list per array (null for None) without a detour over Python numbers; null where a mask is False."""
    present = [np.asarray(a, dtype=dtype) for a in arrays if a is not None]
    flat = np.concatenate([np.empty(0, dtype), *present])
    nulls = None
    if masks is not None:
        kept = [mask for mask, a in zip(masks, arrays, strict=True) if a is not None]
        nulls = ~np.concatenate([np.empty(0, bool), *kept])
    offsets = np.cumsum([0, *(0 if a is None else len(a) for a in arrays)], dtype=np.int32)
    missing = pa.array([a is None for a in arrays], pa.bool_())
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat, mask=nulls), mask=missing)


def _numbers(values: Mapping[str, float | None]) -> list[tuple[str, float | None]]:
    return [(name, None if value is None else float(value)) for name, value in values.items()]


def _json(value: Any) -> str:
    return json.dumps(_plain(value), allow_nan=False)


def _plain(value: Any) -> Any:
    """What strict JSON can hold: arrays as lists, and whatever else a user put there as its `repr`."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if value is None or isinstance(value, str | bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return repr(value)


def _text(text: str) -> str:
    """Error messages may quote half a character, which UTF-8 and so Parquet can't hold."""
    return text.encode("utf-8", "backslashreplace").decode()
