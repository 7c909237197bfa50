"""What a finished run tells about time: when its batches were taken, learned and published, and its groups generated.

Read from the run's folder: `config.yaml`, `metrics.jsonl` and the journal. Times are seconds since the first dispatch. A resumed
run counts from its last start on, because nothing is known of the time in between.

    trajectories  generated_at, scored_at of a group; trained_at: the end of its batch's learning
    outcomes      dispatched_at of every group; settled_at, which for a trained one is its version's acknowledgement
    metrics       time_s/collect, park, learn, publish, from which follows when a batch was taken; weights/pause_s; batch/*

Where engines and learner take turns (`placement.mode=shared`), parking the engines counts as learning, and a version as
acknowledged when the engines go on, at the end of publishing.

Groups that went stale and whose prompt was offered again are in no file. That they were there is known from the gap in the
numbers of the groups.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from orchestrator.config import Config, ConfigError
from orchestrator.simulation.hardware import Layout

LEAST_STEPS = 8  # batches that a run must have made, to learn something of it
_NUMBER = re.compile(r"g\d+-(\d+)")


@dataclass(frozen=True)
class RecordedGroup:
    """One group. `generated_s` is known of trained ones, NaN for others; rewards are NaN where an answer has none."""

    dispatched_s: float
    generated_s: float
    lengths: tuple[int, ...]
    rewards: tuple[float, ...]


@dataclass(frozen=True)
class RecordedSteps:
    """One entry per batch, all arrays [steps]. Times as in `orchestrator.simulation.types.Steps`."""

    taken_s: np.ndarray
    learned_s: np.ndarray
    acknowledged_s: np.ndarray
    collect_s: np.ndarray
    pause_s: np.ndarray
    answers: np.ndarray
    learned_tokens: np.ndarray  # sampled tokens in the loss, with prompts
    stale_ratio: np.ndarray

    def __len__(self) -> int:
        return len(self.taken_s)

    @property
    def learn_s(self) -> np.ndarray:
        return self.learned_s - self.taken_s

    @property
    def between_s(self) -> np.ndarray:
        """From an acknowledgement to the moment at which the next batch is looked for, [steps - 1]."""
        return np.maximum(self.taken_s[1:] - self.collect_s[1:] - self.acknowledged_s[:-1], 0.0)


@dataclass(frozen=True)
class Recording:
    """A run's times. `groups` are in order of dispatch, those that are in no file (see above) left out: their dispatches are
    `lost_s`.
    """

    run_dir: Path
    config: Config
    layout: Layout
    steps: RecordedSteps
    groups: tuple[RecordedGroup, ...]
    lost_s: tuple[float, ...]
    prompt_tokens: int
    shares_prefixes: bool
    score_s: float

    @property
    def measured(self) -> slice:
        """The steps without those in which the pipeline fills or drains, as `SimulationResult.measured` counts them."""
        steps, ahead = len(self.steps), self.config.staleness.max
        warmup = min(2 * (ahead + 1) + 1, steps // 2)
        return slice(warmup, steps - min(ahead, (steps - warmup) // 2))

    @property
    def mean_step_s(self) -> float:
        """From acknowledgement to acknowledgement."""
        ends = self.steps.acknowledged_s
        first, last = self.measured.start, self.measured.stop
        return float((ends[last - 1] - ends[first - 1]) / (last - first))

    @property
    def stale_ratio(self) -> float:
        answers = self.steps.answers[self.measured]
        return float((self.steps.stale_ratio[self.measured] * answers).sum() / answers.sum())


def read_recording(run_dir: Path) -> Recording:
    """Raises ConfigError, saying what is missing, for a folder that is no run's or a run that is too short."""
    from orchestrator.journal import JOURNAL, read_outcomes, read_trajectories
    from orchestrator.sinks import read_metrics

    where = f"simulate.from_run={run_dir}"
    for name in ("config.yaml", "metrics.jsonl", JOURNAL):
        if not (run_dir / name).exists():
            raise ConfigError(f"{where}: there is no {name}; expected the folder of a run, such as runs/NAME")
    config = run_config(run_dir)
    rows = read_outcomes(run_dir).to_pylist()
    columns = ["lineage", "policy_version", "group_id", "dispatched_at", "generated_at", "scored_at", "trained_at"]
    trajectories = read_trajectories(run_dir, columns=columns).to_pylist()
    lineage = max((row["lineage"] for row in trajectories), default=0)
    rows = [row for row in rows if row["lineage"] == lineage and row["dispatched_at"] is not None]
    of_group = {row["group_id"]: row for row in trajectories if row["lineage"] == lineage}
    batches = _batches(rows, of_group.values(), read_metrics(run_dir / "metrics.jsonl"))
    if len(batches) < LEAST_STEPS:
        raise ConfigError(
            f"{where}: only {len(batches)} batches were trained since the run's last start; a fit needs at least {LEAST_STEPS}"
        )
    # What was decided after the last batch fed none: the run ended, or starved.
    rows = [row for row in rows if row["policy_version"] <= max(batches)]
    first_s = min(row["dispatched_at"] for row in rows)
    prompt_tokens = _prompt_tokens(run_dir, max(batches), rows)
    rows.sort(key=lambda row: row["dispatched_at"])
    shares = _shares_prefixes(batches.values(), prompt_tokens)
    prompts = [b["batch/groups"] if shares else b["batch/answers"] for b in batches.values()]
    tokens = [b["batch/trained_tokens"] for b in batches.values()]

    def column(name: str) -> np.ndarray:
        return np.array([b.get(name) or 0.0 for b in batches.values()], dtype=np.float64)

    layout = Layout.of_run(config)
    learned_s = column("trained_at") - first_s
    turn_ends_s = learned_s + column("time_s/publish")
    return Recording(
        run_dir=run_dir,
        config=config,
        layout=layout,
        steps=RecordedSteps(
            taken_s=learned_s - column("time_s/learn") - column("time_s/park"),
            learned_s=learned_s,
            acknowledged_s=turn_ends_s if layout.shared else column("acknowledged_at") - first_s,
            collect_s=column("time_s/collect"),
            pause_s=column("weights/pause_s"),
            answers=column("batch/answers"),
            learned_tokens=np.array(tokens) + prompt_tokens * np.array(prompts, dtype=np.float64),
            stale_ratio=column("staleness/stale_ratio"),
        ),
        groups=tuple(_group(row, of_group.get(row["group_id"]), first_s) for row in rows),
        lost_s=tuple(_lost(rows, first_s)),
        prompt_tokens=prompt_tokens,
        shares_prefixes=shares,
        score_s=_score_s(of_group.values()),
    )


def run_config(run_dir: Path) -> Config:
    """The configuration of a run, as it was written at its start; keys that are newer have their defaults."""
    try:
        merged = OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.load(run_dir / "config.yaml"))
        config = OmegaConf.to_object(merged)
    except (OmegaConfBaseException, OSError) as error:
        raise ConfigError(f"simulate.from_run={run_dir}: its config.yaml can't be used: {error}") from error
    assert isinstance(config, Config)
    return config


def _score_s(rows: Iterable[dict[str, Any]]) -> float:
    """From the last answer of a batch to its last verdict: the part of scoring that batches wait for. Mean over the batches."""
    answered: dict[int, float] = defaultdict(float)
    judged: dict[int, float] = defaultdict(float)
    for row in rows:
        if row["generated_at"] is not None and row["scored_at"] is not None:
            version = row["policy_version"]
            answered[version] = max(answered[version], row["generated_at"])
            judged[version] = max(judged[version], row["scored_at"])
    return float(np.mean([judged[version] - answered[version] for version in judged])) if judged else 0.0


def _batches(
    rows: Sequence[dict[str, Any]], trajectories: Iterable[dict[str, Any]], records: Sequence[dict[str, Any]]
) -> dict[int, dict[str, Any]]:
    """By the version that a batch improves: its metrics, the end of its learning and its acknowledgement."""
    metrics: dict[int, dict[str, Any]] = defaultdict(dict)
    for record in records:  # an evaluation has a record of its own
        metrics[record["policy_version"] - 1] |= record
    learned = {row["policy_version"]: row["trained_at"] for row in trajectories if row["trained_at"] is not None}
    acknowledged = {row["policy_version"]: row["settled_at"] for row in rows if row["outcome"] == "trained"}
    needed = ("time_s/learn", "batch/trained_tokens", "staleness/stale_ratio")
    return {
        version: metrics[version] | {"trained_at": learned[version], "acknowledged_at": acknowledged[version]}
        for version in sorted(learned.keys() & acknowledged.keys())
        if all(metrics[version].get(name) is not None for name in needed)
    }


def _group(row: dict[str, Any], trajectory: dict[str, Any] | None, first_s: float) -> RecordedGroup:
    generated_at = math.nan
    if trajectory is not None and trajectory["generated_at"] is not None:
        generated_at = trajectory["generated_at"]
    rewards = [math.nan if value is None else value for value in row["reward_values"]]
    if row["outcome"] == "filtered" and any(value == value for value in rewards):
        # What did not differ may have been one component of the reward: here it is the whole.
        right = float(np.nanmean(rewards) > 0.5)
        rewards = [right if value == value else value for value in rewards]
    return RecordedGroup(
        row["dispatched_at"] - first_s, generated_at - first_s, tuple(row["response_lengths"]), tuple(rewards)
    )


def _lost(rows: Sequence[dict[str, Any]], first_s: float) -> list[float]:
    """When groups were dispatched of which nothing was written: with the one whose number comes before."""
    numbers = {int(match[1]): row["dispatched_at"] for row in rows if (match := _NUMBER.fullmatch(row["group_id"]))}
    lost, before_s = [], first_s
    for number in range(min(numbers, default=0), max(numbers, default=-1) + 1):
        if number in numbers:
            before_s = numbers[number]
        else:
            lost.append(before_s - first_s)
    return lost


def _prompt_tokens(run_dir: Path, version: int, rows: Sequence[dict[str, Any]]) -> int:
    """Mean length of the prompts of one batch: of all that was not sampled."""
    import pyarrow.compute

    from orchestrator.journal import read_trajectories

    table = read_trajectories(run_dir, version, ["group_id", "index", "token_ids"])
    lengths = pyarrow.compute.list_value_length(table["token_ids"]).to_pylist()
    sampled = {row["group_id"]: row["response_lengths"] for row in rows}
    prompts = [
        length - sampled[group][index]
        for group, index, length in zip(table["group_id"].to_pylist(), table["index"].to_pylist(), lengths, strict=True)
        if group in sampled
    ]
    return round(float(np.mean(prompts))) if prompts else 0


def _shares_prefixes(batches: Iterable[dict[str, Any]], prompt_tokens: int) -> bool:
    """Whether the learner computed a group's prompt once: which count comes closer to the tokens that went through it."""
    batches = list(batches)
    model = sum(b.get("batch/model_tokens") or 0 for b in batches)
    sampled = sum(b["batch/trained_tokens"] for b in batches)
    once = sampled + prompt_tokens * sum(b["batch/groups"] for b in batches)
    each = sampled + prompt_tokens * sum(b["batch/answers"] for b in batches)
    return abs(model - once) < abs(model - each)
