"""A run in simulated time: the real sampling queue, driven as a run drives it, by workers that only take time.

`simulate` goes from event to event. There are three kinds: a group's last answer ends on an engine, a group's verdict
arrives, and the loop's own (a batch is learned, the engines pause, a version is acknowledged, the loop is ready for the
next batch). At each, the same methods of the queue are called in the same order as in a run: after every decision of the
queue its room is filled, a batch is taken as soon as there is one while the loop collects, and nothing is generated
for batches that will never be.

Prompts never run out and are not repeated, but for those that the queue offers again: they come before new ones, and get
the same answers as before. The same settings give the same result, bit for bit.

Left out: the driver's own time but for `Timing.between_s`, differences between engines, lost and restarted workers, a limit on
verdicts at once, `sampling.early_stop`, `staleness.adaptive`, and the work of taking up again what engines interrupt.
"""

from __future__ import annotations

import enum
import gc
import math
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields
from functools import partial
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np

from orchestrator.sampling_queue import SamplingQueue
from orchestrator.sampling_types import Batch, Commands, Done, Member, OfferAgain, OnStarved, Stage
from orchestrator.simulation.engines import Engine, Fleet, SpeedClock, Stay
from orchestrator.simulation.types import TRACE_STEPS, SimulationResult, SimulationSettings, Steps
from rollout_workers.trajectory import Status

CHUNK = 4096  # groups that are sampled at once


def simulate(settings: SimulationSettings) -> SimulationResult:
    """Run it to its end: all steps are made, or the queue says that the data can't fill another batch."""
    with _no_collector():
        return _Simulation(settings).run()


@contextmanager
def _no_collector() -> Iterator[None]:
    """Within, no search for reference cycles: a simulation's many small objects form none, and make searching slow."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class _Phase(enum.Enum):
    COLLECT = enum.auto()
    LEARN = enum.auto()
    SEND = enum.auto()  # the part of publishing in which engines go on
    PAUSE = enum.auto()  # the part in which they stand still
    BETWEEN = enum.auto()


class _Prompt(NamedTuple):
    """A prompt and the answers that it gets."""

    prompt_id: str
    lengths: list[int]
    rewards: list[float]
    tokens: int
    scored_answers: int  # those that get a reward, and their tokens
    scored_tokens: int


@dataclass(slots=True)
class _Totals:
    """Counts since the start of the run; what a step adds is the difference. Named as in `Steps`, but for the last."""

    dispatched_groups: int = 0
    dispatched_tokens: int = 0
    generated_tokens: int = 0
    wasted_tokens: int = 0
    consumed_answers: int = 0
    consumed_tokens: int = 0
    scored_answers: int = 0
    scored_tokens: int = 0
    filtered_groups: int = 0
    failed_groups: int = 0
    stale_groups: int = 0
    engine_busy_s: float = 0.0


class _Simulation:
    def __init__(self, settings: SimulationSettings) -> None:
        self.settings = settings
        self.timing = t = settings.timing
        self.queue = SamplingQueue(settings.queue)
        self.capacity = self.queue.policy.capacity
        self.clock = SpeedClock()
        self.publishes: list[float] = []
        self.fleet = Fleet(
            [
                Engine(t.decode_base_s, t.decode_per_answer_s, t.max_concurrent_answers, self.publishes)
                for _ in range(settings.engines)
            ]
        )
        self.prefill_s = t.prefill_s_per_token * settings.workload.prompt_tokens
        self.new_prompts = self._prompts()
        self.offered_again: deque[_Prompt] = deque()
        self.flights: dict[str, _Prompt] = {}
        self.scoring: deque[tuple[float, Stay]] = deque()  # with the moment of the verdict; first come first served
        self.contends = t.learner_speed_while_generating < 1  # with the engines, for the learner's speed
        self.phase = _Phase.COLLECT
        self.phase_ends_s = math.inf
        self.work_s = 0.0  # of the batch in learning, at full speed, left at `settled_s`; elsewhere without meaning
        self.now_s = 0.0
        self.settled_s = 0.0
        self.busy = 0  # engines with work since then
        self.totals = _Totals()
        self.late_since_s: float | None = None  # a batch is there, but held back for late groups
        self.starved: str | None = None
        self.over = False
        self.step = {"start_s": 0.0, "late_s": 0.0}  # the present one, by the names of `Steps`
        self.steps: list[dict[str, float]] = []
        self.after: list[_Totals] = []  # at the end of each step
        self.histograms: list[np.ndarray] = []
        self.trace: list[tuple[float, int]] = [(0.0, 0)]

    def run(self) -> SimulationResult:
        self._dispatch()
        while not self.over:
            finish_s = self.clock.when(self.fleet.next_finish())
            score_s = self.scoring[0][0] if self.scoring else math.inf
            if finish_s <= score_s and finish_s <= self.phase_ends_s:
                if finish_s > self.now_s:  # rounding must not turn time back
                    self.now_s = finish_s
                self._finish()
            elif score_s <= self.phase_ends_s:
                self.now_s = score_s
                self._score(self.scoring.popleft()[1])
            elif self.phase_ends_s < math.inf:
                self.now_s = self.phase_ends_s
                self._next_phase()
            else:
                raise RuntimeError(f"nothing can happen any more after {self.now_s} s: {self.queue.counts}")
        return self._result()

    # Groups

    def _prompts(self) -> Iterator[_Prompt]:
        rng = np.random.default_rng(self.settings.seed)
        number = 0
        while True:
            lengths, rewards = self.settings.workload.sample(rng, CHUNK, self.settings.queue.answers_per_group)
            scored = ~np.isnan(rewards)
            sums = (lengths.sum(axis=1), scored.sum(axis=1), (lengths * scored).sum(axis=1))
            for row in zip(*(column.tolist() for column in (lengths, rewards, *sums)), strict=True):
                yield _Prompt(f"p{number}", *row)
                number += 1

    def _dispatch(self) -> None:
        while self.queue.room() > 0 and self._wanted() > 0:
            prompt = self.offered_again.popleft() if self.offered_again else next(self.new_prompts)
            number = self.totals.dispatched_groups
            group_id = f"g{number}"
            self.flights[group_id] = prompt
            self.queue.dispatched(group_id, prompt.prompt_id, 0)
            self.totals.dispatched_groups += 1
            self.totals.dispatched_tokens += prompt.tokens
            self.fleet.add(number, prompt.lengths, self.prefill_s, self.clock.at(self.now_s))
            self._engines_changed()

    def _wanted(self) -> int:
        """Groups that the rest of the run can still use: nothing is generated for batches that will never be."""
        rest = (self.settings.steps - self.queue.version) * self.settings.queue.groups_per_batch
        if rest >= self.capacity:  # then admission alone asks for no more
            return rest
        return rest - self.queue.counts.untrained

    def _finish(self) -> None:
        """The last answer of a group is written."""
        stay = self.fleet.finish()
        self._engines_changed()
        self.queue.generated(f"g{stay.key}")
        self.scoring.append((self.now_s + self.timing.score_s, stay))

    def _score(self, stay: Stay) -> None:
        """The verdict on a group arrives."""
        group_id = f"g{stay.key}"
        prompt = self.flights[group_id]
        self.totals.scored_answers += prompt.scored_answers
        self.totals.scored_tokens += prompt.scored_tokens
        self.totals.generated_tokens += prompt.tokens
        self._carry_out(self.queue.scored(group_id, _members(prompt, stay)))

    def _carry_out(self, commands: Commands) -> None:
        """What the queue decided about groups."""
        totals = self.totals
        for command in commands:
            prompt = self.flights.pop(command.group_id)
            if isinstance(command, OfferAgain):
                self.offered_again.append(prompt)
                totals.stale_groups += 1
                totals.wasted_tokens += prompt.tokens
                continue
            assert isinstance(command, Done)  # no member is reported as missing, so none is asked for again
            if command.outcome in (Stage.TRAINED, Stage.FILTERED):
                totals.consumed_answers += prompt.scored_answers
                totals.consumed_tokens += prompt.scored_tokens
                totals.filtered_groups += command.outcome is Stage.FILTERED
            else:
                totals.failed_groups += command.outcome is Stage.FAILED
                totals.stale_groups += command.outcome is Stage.STALE
                totals.wasted_tokens += prompt.tokens
        self._dispatch()
        if self.phase is _Phase.COLLECT:
            self._collect()

    # The loop

    def _collect(self) -> None:
        """Take a batch if there is one."""
        if self.late_since_s is not None:
            self.step["late_s"] += self.now_s - self.late_since_s
            self.late_since_s = None
        batch = self.queue.take_batch(shrink=self.settings.queue.on_starved is OnStarved.SHRINK)
        if batch is not None:
            self._learn(batch)
        elif (starvation := self.queue.starvation()) is not None:
            self.starved, self.over = str(starvation), True
        elif self.queue.waits_for_late():
            self.late_since_s = self.now_s

    def _learn(self, batch: Batch) -> None:
        staleness = batch.staleness()
        histogram = np.zeros(self.settings.queue.max_staleness + 1, np.int64)
        histogram[list(staleness.histogram)] = list(staleness.histogram.values())
        self.histograms.append(histogram)
        prompts = len(batch.groups) if self.timing.learner_shares_prefixes else staleness.trajectories
        learned_tokens = staleness.tokens + prompts * self.settings.workload.prompt_tokens
        self.step |= {
            "taken_s": self.now_s,
            "groups": len(batch.groups),
            "answers": staleness.trajectories,
            "trained_tokens": staleness.tokens,
            "learned_tokens": learned_tokens,
            "staleness_mean": staleness.mean,
            "in_flight_mean": staleness.in_flight_mean,
            "in_queue_mean": staleness.in_queue_mean,
            "staleness_max": staleness.max,
            "stale_ratio": staleness.stale_ratio,
            "stale_token_ratio": staleness.stale_token_ratio,
            "generating": batch.counts.generating,
            "scoring": batch.counts.scoring,
            "ready": batch.counts.ready,
        }
        sampled = sum(self.flights[group.group_id].tokens for group in batch.groups)
        self.totals.wasted_tokens += sampled - staleness.tokens
        self._settle()
        self.phase = _Phase.LEARN
        self.work_s = self.timing.learn_base_s + self.timing.learn_s_per_token * learned_tokens
        self._set_speed(self.timing.engine_speed_while_learning)
        self._foresee()

    def _next_phase(self) -> None:
        """The present phase is over."""
        self._settle()
        t = self.timing
        if self.phase is _Phase.LEARN:
            self.step["learned_s"] = self.now_s
            self.phase, self.phase_ends_s = _Phase.SEND, self.now_s + (t.publish_s - t.pause_s)
            self._set_speed(1.0)
        elif self.phase is _Phase.SEND:
            self.phase, self.phase_ends_s = _Phase.PAUSE, self.step["learned_s"] + t.publish_s
            if t.pause_s:
                self._set_speed(0.0)
        elif self.phase is _Phase.PAUSE:
            self.step["acknowledged_s"] = self.now_s
            self.phase, self.phase_ends_s = _Phase.BETWEEN, self.now_s + t.between_s
            self.publishes.append(self.clock.at(self.now_s))
            self._set_speed(1.0)
            self._carry_out(self.queue.acknowledged(self.queue.version + 1))
        else:
            self.step["end_s"] = self.now_s
            self.steps.append(self.step)
            self.after.append(_Totals(*astuple(self.totals)))
            self.step = {"start_s": self.now_s, "late_s": 0.0}
            self.phase, self.phase_ends_s = _Phase.COLLECT, math.inf
            self.over = len(self.steps) == self.settings.steps
            if not self.over:
                self._dispatch()
                self._collect()

    # Time and speed

    def _engines_changed(self) -> None:
        """Engines may have got work, or run out of it."""
        if self.fleet.busy != self.busy:
            self._settle()
            self.busy = self.fleet.busy
            self._trace()
            if self.contends and self.phase is _Phase.LEARN:
                self._foresee()

    def _settle(self) -> None:
        """Account for the time since the last change of what is busy and how fast."""
        elapsed_s = self.now_s - self.settled_s
        if self.clock.speed:
            self.totals.engine_busy_s += self.busy * elapsed_s
        if self.contends:
            self.work_s -= elapsed_s * self._learner_speed()
        self.settled_s = self.now_s

    def _set_speed(self, speed: float) -> None:
        self.clock.set_speed(self.now_s, speed)
        self._trace()

    def _foresee(self) -> None:
        """When the batch will be learned if nothing changes."""
        speed = self._learner_speed()
        self.phase_ends_s = self.now_s + max(self.work_s, 0.0) / speed if speed else math.inf

    def _learner_speed(self) -> float:
        if not self.clock.speed:
            return 1.0
        return 1 - (1 - self.timing.learner_speed_while_generating) * self.busy / self.settings.engines

    def _trace(self) -> None:
        busy = self.busy if self.clock.speed else 0
        if len(self.steps) < TRACE_STEPS and busy != self.trace[-1][1]:
            if self.trace[-1][0] == self.now_s:
                self.trace.pop()
            self.trace.append((self.now_s, busy))

    # Result

    def _result(self) -> SimulationResult:
        totals = [astuple(after) for after in (_Totals(), *self.after)]
        during = zip((field.name for field in fields(_Totals)), np.diff(np.array(totals), axis=0).T, strict=True)
        columns = {name: values if name == "engine_busy_s" else values.astype(np.int64) for name, values in during}
        columns |= {name: np.array([step[name] for step in self.steps]) for name in _OF_A_STEP}
        bound = self.settings.queue.max_staleness + 1
        columns["histogram"] = np.array(self.histograms[: len(self.steps)], np.int64).reshape(-1, bound)
        step_s = columns["end_s"] - columns["start_s"]
        columns["engine_busy_ratio"] = columns.pop("engine_busy_s") / (self.settings.engines * step_s)
        trace = np.array(self.trace)
        return SimulationResult(self.settings, Steps(**columns), self.starved, trace[:, 0], trace[:, 1])


# What `Steps` holds and `_Simulation.step` gathers.
_OF_A_STEP = {field.name for field in fields(Steps)} - {field.name for field in fields(_Totals)}
_OF_A_STEP -= {"histogram", "engine_busy_ratio"}


def _members(prompt: _Prompt, stay: Stay) -> list[Member]:
    """What the queue is told of a group's answers."""
    rewards: list[Any] = prompt.rewards
    statuses: Iterable[Status] = repeat(Status.SCORED)
    if prompt.scored_answers < len(rewards):
        rewards = [reward if reward == reward else None for reward in rewards]
        statuses = [Status.ERRORED if reward is None else Status.SCORED for reward in rewards]
    columns = (range(len(rewards)), statuses, rewards, rewards, stay.token_versions(), prompt.lengths, repeat(False))
    return list(map(_make_member, zip(*columns, strict=False)))


_make_member = partial(tuple.__new__, Member)  # what `Member._make` does, in half the time
