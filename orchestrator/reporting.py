"""What a run measures between two versions, gathered as it happens and turned into metric names once per batch."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from learner import mismatch
from learner.tally import Tally as LearnTally
from learner.worker import LearnReport
from orchestrator.fleet import BroadcastReport
from orchestrator.flight import Flight
from orchestrator.metrics import Population, bias_metrics, length_metrics, reward_metrics, summarise
from orchestrator.probe import ProbeReport
from orchestrator.sampling_queue import SamplingQueue
from orchestrator.sampling_types import Batch, Counts
from rollout_workers.trajectory import RewardResult


@dataclass
class EarlyStops:
    """What stopping overdue groups came to since this process started, and what controls say that it lost."""

    stopped: int = 0
    discarded_tokens: int = 0
    controls: int = 0
    useful_controls: int = 0
    control_tokens: int = 0  # written by controls after the moment at which they could have been stopped

    def metrics(self, stopped_now: int) -> dict[str, float]:
        """`early_stop/*`; empty where nothing could be stopped yet."""
        if not self.stopped + self.controls:
            return {}
        values: dict[str, float] = {
            "early_stop/stopped": stopped_now,
            "early_stop/discarded_tokens": self.discarded_tokens,
        }
        if self.controls:
            values |= {
                "early_stop/saved_tokens": self.stopped * self.control_tokens / self.controls,
                "early_stop/lost_useful_ratio": self.useful_controls / self.controls,
            }
        return values


class BatchReport:
    """Collects from one publish to the next; `values` gives the metrics and starts anew.

    `before` are the queue's counts at the start: a resumed run's go on from those of its checkpoint.
    """

    def __init__(self, filter_on: str, before: Counts) -> None:
        self._filter_on = filter_on
        self._scored = Population()
        self._consumed = Population()
        self._before = before
        self._early_stop = EarlyStops()
        self._reset()

    def _reset(self) -> None:
        self._began = time.monotonic()
        self._results: list[RewardResult] = []
        self._lengths: list[int] = []
        self._truncated: list[bool] = []
        self._generate_s: list[float] = []
        self._score_s: list[float] = []
        self._parked = self._stopped = 0
        self._phases: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time spent in a phase of the loop."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._phases[name] = self._phases.get(name, 0.0) + time.monotonic() - began

    def scored(self, flight: Flight) -> None:
        """A group was generated and judged, whatever becomes of it."""
        self._results.extend(flight.results.values())
        for index in flight.answered:
            self._lengths.append(flight.reports[index].response_length)
            self._truncated.append(flight.reports[index].truncated)
        self._scored += self._population(flight)
        if flight.generated_at is not None and flight.scored_at is not None:
            self._generate_s.append(flight.generated_at - flight.dispatched_at)
            self._score_s.append(flight.scored_at - flight.generated_at)

    def consumed(self, flight: Flight) -> None:
        """A group was trained on or filtered."""
        self._consumed += self._population(flight)

    def parked(self, answers: int) -> None:
        """So many answers were interrupted, to go on later."""
        self._parked += answers

    def stopped(self, flight: Flight) -> None:
        """An overdue group was stopped; what its unfinished answers had is thrown away."""
        self._stopped += 1
        self._early_stop.stopped += 1
        self._early_stop.discarded_tokens += sum(flight.reports[i].response_length for i in flight.parked)

    def went_on(self, flight: Flight, *, useful: bool) -> None:
        """A group that could have been stopped went on to its end, as a control."""
        assert flight.control is not None
        self._early_stop.controls += 1
        self._early_stop.useful_controls += useful
        self._early_stop.control_tokens += flight.tokens - flight.control

    def _population(self, flight: Flight) -> Population:
        """Its scored answers: how many, how long, how right."""
        scored = {i: r for i, r in flight.results.items() if r.value is not None}
        passed = sum(r.components.get(self._filter_on) or 0.0 for r in scored.values())
        return Population(len(scored), sum(flight.reports[i].response_length for i in scored), passed)

    def values(
        self,
        queue: SamplingQueue,
        batch: Batch,
        trained_lengths: list[int],
        reports: list[LearnReport],
        tally: LearnTally,
        broadcast: BroadcastReport,
        probe: ProbeReport,
    ) -> dict[str, float]:
        """All metrics of the batch that led to the version just published."""
        elapsed = time.monotonic() - self._began
        tokens = sum(trained_lengths)
        values: dict[str, float] = {
            "optimizer_step": reports[0].optimizer_step,
            "batch/groups": len(batch.groups),
            "batch/answers": len(trained_lengths),
            "batch/trained_tokens": tokens,
            "batch/model_tokens": sum(report.model_tokens for report in reports),
            "weights/pause_s": broadcast.pause_s,
            "weights/total_s": broadcast.total_s,
            "weights/sent_mib": broadcast.manifest.total_bytes / 2**20,
            "weights/probe_gap": probe.gap,
            "weights/probe_learner_change": probe.learner_change,
            "time_s/batch": elapsed,
            "perf/generated_tokens_per_s": sum(self._lengths) / elapsed,
            "perf/trained_tokens_per_s": tokens / elapsed,
            "perf/answers_per_s": len(self._lengths) / elapsed,
            "perf/learner_peak_memory_gib": max(report.peak_memory_bytes for report in reports) / 2**30,
            "perf/learner_busy_ratio": self._phases.get("learn", 0.0) / elapsed,
        }
        values |= {f"time_s/{name}": seconds for name, seconds in self._phases.items()}
        for name, seconds in (("generate", self._generate_s), ("score", self._score_s)):
            if (summary := summarise(seconds)) is not None:
                values[f"time_s/{name}"] = summary.mean
        if trained_lengths:
            values["batch/trained_response_length"] = tokens / len(trained_lengths)
        values |= reward_metrics(self._results)
        values |= length_metrics(self._lengths, self._truncated)
        values |= bias_metrics(self._consumed, self._scored)
        values |= self._group_values(queue, batch)
        values |= batch.staleness().metrics()
        values |= _left_out(batch)
        values |= {"rollout/retries": batch.tally.resampled_members, "rollout/parked": self._parked}
        values |= self._early_stop.metrics(self._stopped)
        values |= learner_metrics(reports, tally)
        self._reset()
        return values

    def _group_values(self, queue: SamplingQueue, batch: Batch) -> dict[str, float]:
        counts, t = queue.counts, batch.tally
        before = self._before
        self._before = counts
        values: dict[str, float] = {
            f"group/{name}": getattr(counts, name) - getattr(before, name)
            for name in ("dispatched", "trained", "filtered", "failed", "stale")
        }
        values |= {
            "group/scored": t.judged,
            "group/all_right": t.all_right,
            "group/all_wrong": t.all_wrong,
            "group/out_of_band": t.out_of_band,
            "group/not_kept": t.not_kept,
        }
        if t.judged:
            values["group/zero_variance_ratio"] = t.zero_variance / t.judged
        return values | queue_gauges(batch.counts)


def queue_gauges(counts: Counts) -> dict[str, float]:
    return {f"queue/{name}": getattr(counts, name) for name in ("generating", "scoring", "parked", "ready", "training")}


def _left_out(batch: Batch) -> dict[str, float]:
    excluded = [member for group in batch.groups for member in group.excluded]
    values: dict[str, float] = {"staleness/left_out": len(excluded)}
    if excluded:
        values["staleness/left_out_length_mean"] = sum(m.response_length for m in excluded) / len(excluded)
    return values


_ACTOR_MEANS = {
    "entropy": "entropy",
    "ppo_kl": "ppo_kl",
    "kl_ref": "kl_ref",
    "clip_ratio": "clipped",
    "masked_ratio": "masked",
    "correction_mean": "correction",
    "selected_ratio": "selected",
}
# What is also told for each staleness on its own.
_ACTOR_SPLIT = ("clip_ratio", "masked_ratio")
_MISMATCH_SPLIT = ("kl", "ess", "ratio_mean", "ratio_max")


def learner_metrics(reports: list[LearnReport], tally: LearnTally) -> dict[str, float]:
    """`actor/*` and `mismatch/*`: sums over all ranks first, one division at the end."""
    report = reports[0]
    updates = len(report.grad_norms)
    values: dict[str, float] = {"actor/skipped_updates": len(report.skipped)}
    if updates:  # none where algorithm.mask_truncated left nothing
        values |= {
            "actor/grad_norm": sum(report.grad_norms) / updates,
            "actor/lr": report.learning_rates[-1],
            "actor/loss": tally.total("loss") / updates,
        }
    values |= {f"actor/{name}": value for name, value in _actor(tally).items()}
    values |= {f"mismatch/{name}": value for name, value in mismatch.metrics(tally).items()}
    for staleness, part in enumerate(tally.split()):
        actor, apart = _actor(part), mismatch.metrics(part)
        values |= {f"actor/staleness_{staleness}/{name}": actor[name] for name in _ACTOR_SPLIT if name in actor}
        values |= {f"mismatch/staleness_{staleness}/{name}": apart[name] for name in _MISMATCH_SPLIT if name in apart}
        if apart:
            values[f"mismatch/staleness_{staleness}/tokens"] = part.total("mismatch_tokens")
    return values


def _actor(tally: LearnTally) -> dict[str, float]:
    """Means over the tokens of all passes, of what the objective counts; empty without tokens."""
    tokens = tally.total("tokens")
    return {name: tally.total(key) / tokens for name, key in _ACTOR_MEANS.items() if tokens and key in tally.sums}
