"""A run that only pretends: it drives the real queue and writes the folder of a run, with times that are known.

Deliberately not the simulator: noise on every duration, one event loop of its own. Engines are the simulator's, whose exactness has
its own tests.
"""

from __future__ import annotations

import heapq
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import OmegaConf

from orchestrator.compose import load
from orchestrator.derived import queue_settings
from orchestrator.journal import JOURNAL, Outcome, TrajectoryRow, begin_lineage, write_outcomes, write_trajectories
from orchestrator.sampling_queue import SamplingQueue
from orchestrator.sampling_types import Batch, Commands, Done, Member, Stage
from orchestrator.simulation.engines import Engine, Fleet, SpeedClock
from orchestrator.simulation.types import Timing
from rollout_workers.trajectory import RewardResult, Status, Trajectory, VersionSpan

PROMPT_TOKENS, LONGEST = 20, 60  # tokens
EPOCH_S = 1.7e9  # when it pretends to have begun


class PretendRun:
    """`overrides` are those of a run; noise is the standard deviation of a duration's logarithm."""

    def __init__(
        self, folder: Path, timing: Timing, overrides: Sequence[str], *, noise: float = 0.05, seed: int = 0
    ) -> None:
        base = ["experiment=tiny", "placement=split", f"rollout.max_response_tokens={LONGEST}"]
        self.config = load([*base, *overrides])
        self.folder, self.timing, self.noise = folder, timing, noise
        self.rng = np.random.default_rng(seed)
        self.queue = SamplingQueue(queue_settings(self.config))
        self.clock = SpeedClock()
        self.publishes: list[float] = []
        places = timing.max_concurrent_answers
        engines = self.config.rollout.replicas
        self.fleet = Fleet(
            [Engine(timing.decode_base_s, timing.decode_per_answer_s, places, self.publishes) for _ in range(engines)]
        )
        self.now_s = 0.0
        self.number = 0
        self.groups: dict[int, dict[str, Any]] = {}
        self.verdicts: list[tuple[float, int]] = []
        self.outcomes: list[Outcome] = []
        self.records: list[dict[str, Any]] = []

    def write(self) -> Path:
        """Run it, and return its folder."""
        self.folder.mkdir(parents=True)
        begin_lineage(self.folder / JOURNAL, None)
        (self.folder / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.structured(self.config)))
        self._dispatch()
        free_s = 0.0  # when the loop looks for the next batch
        while self.queue.version < self.config.run.batches:
            self._until(free_s)
            while (batch := self.queue.take_batch()) is None:
                self._until(self._next())
            free_s = self._train(batch, collect_s=self.now_s - free_s)
        lines = [{"lineage": 0, "resumed_from": None, "time": EPOCH_S}, *self.records]
        (self.folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return self.folder

    def _noisy(self, seconds: float) -> float:
        return seconds * float(np.exp(self.noise * self.rng.standard_normal()))

    def _next(self) -> float:
        """The next thing that happens to a group."""
        return min(self.clock.when(self.fleet.next_finish()), self.verdicts[0][0] if self.verdicts else math.inf)

    def _until(self, end_s: float) -> None:
        while (at_s := self._next()) <= end_s:
            self.now_s = at_s
            if self.verdicts and self.verdicts[0][0] <= at_s:
                self._judge(heapq.heappop(self.verdicts)[1])
            else:
                stay = self.fleet.finish()
                group = self.groups[stay.key]
                group |= {"generated_at": at_s, "spans": stay.token_versions()}
                self.queue.generated(group["id"])
                heapq.heappush(self.verdicts, (at_s + self._noisy(self.timing.score_s), stay.key))
        self.now_s = max(self.now_s, end_s)

    def _dispatch(self) -> None:
        rest = (self.config.run.batches - self.queue.version) * self.config.sampling.groups_per_batch
        while min(self.queue.room(), rest - self.queue.counts.untrained) > 0:
            size = self.config.sampling.answers_per_group
            lengths = (
                np.clip(np.rint(12 * np.exp(0.5 * self.rng.standard_normal(size))), 1, LONGEST).astype(int).tolist()
            )
            rewards = (self.rng.random(size) < self.rng.beta(1.5, 1.5)).astype(float).tolist()
            group_id = f"g0-{self.number:06d}"
            self.groups[self.number] = {
                "id": group_id,
                "lengths": lengths,
                "rewards": rewards,
                "dispatched_at": self.now_s,
                "version": self.queue.version,
            }
            self.queue.dispatched(group_id, f"p{self.number}", 0)
            self.fleet.add(self.number, lengths, 0.0, self.clock.at(self.now_s))
            self.number += 1

    def _judge(self, number: int) -> None:
        group = self.groups[number]
        group["scored_at"] = self.now_s
        members = [
            Member(i, Status.SCORED, reward, reward, spans, length)
            for i, (reward, spans, length) in enumerate(
                zip(group["rewards"], group["spans"], group["lengths"], strict=True)
            )
        ]
        self._carry_out(self.queue.scored(group["id"], members))

    def _carry_out(self, commands: Commands) -> None:
        for command in commands:
            if isinstance(command, Done):  # of a prompt that is offered again nothing is written
                group = self.groups[int(command.group_id[3:])]
                self.outcomes.append(
                    Outcome(
                        command.group_id,
                        command.prompt_id,
                        command.epoch,
                        command.outcome.value,
                        group["rewards"],
                        group["lengths"],
                        group["version"],
                        EPOCH_S + group["dispatched_at"],
                        EPOCH_S + self.now_s,
                        "" if command.outcome is Stage.TRAINED else "why",
                    )
                )
        self._dispatch()

    def _train(self, batch: Batch, collect_s: float) -> float:
        """Learn and publish; returns when the next batch is looked for."""
        t, taken_s = self.timing, self.now_s
        numbers = [int(group.group_id[3:]) for group in batch.groups]
        tokens = sum(sum(self.groups[number]["lengths"]) for number in numbers)
        model_tokens = tokens + PROMPT_TOKENS * len(numbers)
        self.clock.set_speed(taken_s, t.engine_speed_while_learning)
        # In small pieces, because the learner's speed depends on whether the engines work.
        left_s = self._noisy(t.learn_base_s + t.learn_s_per_token * model_tokens)
        while left_s > 1e-9:
            slowed = t.engine_speed_while_learning and self.fleet.busy
            speed = t.learner_speed_while_generating if slowed else 1.0
            piece_s = min(left_s, 0.01)
            self._until(self.now_s + piece_s / speed)
            left_s -= piece_s
        learned_s = self.now_s
        self.clock.set_speed(learned_s, 1.0)
        publish_s = self._noisy(t.publish_s)
        pause_s = min(publish_s, self._noisy(t.pause_s))
        self._until(learned_s + publish_s - pause_s)
        self.clock.set_speed(self.now_s, 0.0)
        self._until(learned_s + publish_s)
        self.clock.set_speed(self.now_s, 1.0)
        self.publishes.append(self.clock.at(self.now_s))
        self._carry_out(self.queue.acknowledged(batch.version + 1))
        staleness = batch.staleness()
        self._write_journal(batch, numbers, learned_s)
        self.records.append(
            {
                "policy_version": batch.version + 1,
                "lineage": 0,
                "time": EPOCH_S + self.now_s,
                "batch/groups": len(numbers),
                "batch/answers": staleness.trajectories,
                "batch/trained_tokens": staleness.tokens,
                "batch/model_tokens": model_tokens,
                "staleness/stale_ratio": staleness.stale_ratio,
                "time_s/collect": collect_s,
                "time_s/learn": learned_s - taken_s,
                "time_s/publish": publish_s,
                "weights/pause_s": pause_s,
            }
        )
        return self.now_s + self._noisy(t.between_s)

    def _write_journal(self, batch: Batch, numbers: Sequence[int], learned_s: float) -> None:
        rows = []
        for number in numbers:
            group = self.groups[number]
            for index, (length, reward) in enumerate(zip(group["lengths"], group["rewards"], strict=True)):
                size = PROMPT_TOKENS + length
                trajectory = Trajectory(
                    group_id=group["id"],
                    index=index,
                    prompt_id=f"p{number}",
                    messages=(),
                    token_ids=np.zeros(size, np.int32),
                    response_mask=np.arange(size) >= PROMPT_TOKENS,
                    behaviour_logprobs=np.zeros(size, np.float32),
                    version_spans=(VersionSpan(PROMPT_TOKENS, size, group["version"]),),
                    finish_reason="stop",
                    reward=RewardResult(reward),
                )
                rows.append(
                    TrajectoryRow(
                        trajectory,
                        epoch=0,
                        optimizer_step_start=batch.version,
                        optimizer_step_end=batch.version + 1,
                        learner_logprobs=None,
                        trained=True,
                        advantage=0.0,
                        temperature=1.0,
                        sampling={},
                        dispatched_at_version=group["version"],
                        dispatched_at=EPOCH_S + group["dispatched_at"],
                        generated_at=EPOCH_S + group["generated_at"],
                        scored_at=EPOCH_S + group["scored_at"],
                        trained_at=EPOCH_S + learned_s,
                    )
                )
        write_trajectories(self.folder / JOURNAL, 0, batch.version, 0, rows)
        write_outcomes(self.folder / JOURNAL, 0, batch.version, self.outcomes)
        self.outcomes = []
