"""From a finished run to machines and answers like its own, so that other settings of it can be simulated.

What is fitted, and to what (`orchestrator.simulation.recording` says where it is read):

- Answers: whole groups of the run, drawn with replacement; of another size as `orchestrator.simulation.regrouping` makes them.
- Decoding: the run's groups are sent, at the moments at which they were, to the engines that the simulator uses, which slow
  down or stand still when those of the run did. `decode_base_s`, `decode_per_answer_s` and, where both sides worked at
  once, the engines' speed meanwhile are those that come closest to the groups' real durations (least squares, by a pattern
  search), with the mean duration met.
- Learning: seconds are regressed on the batch's tokens, relative to the time it took, so that slow batches do not decide. A
  constant part is assumed only where the data show one (more than two standard errors above 0), and the mean is met.
- That engines and learner slow each other down is assumed only where the data show it as well: where it makes the errors so
  much smaller that the likelihood ratio over independent batches exceeds `EVIDENCE`.
- Everything else (verdicts, publishing, pauses, what comes between batches) is the mean.

The first batches are left out: processes warm up, kernels are compiled. Where all groups were generated under like conditions, what
depends on the number of answers can't be told from what does not; then the fit stays close to half and half.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from orchestrator.config import ConfigError, SimulateConfig
from orchestrator.simulation.engines import Engine, Fleet, SpeedClock
from orchestrator.simulation.hardware import Layout, speeds
from orchestrator.simulation.recording import RecordedGroup, RecordedSteps, Recording, read_recording
from orchestrator.simulation.regrouping import regrouped
from orchestrator.simulation.types import Timing
from orchestrator.simulation.workload import EmpiricalWorkload

WARMUP_STEPS = 2  # whose times are not used
MOST_GROUPS = 400  # that decoding is fitted to: the last ones
LEAST_SPEED = 0.05
SAME_MEAN = 1e-3  # of the logarithms of two mean durations
EVIDENCE = 6.0  # twice the log-likelihood ratio: 5% by chance for two parameters
PLAUSIBLE = 0.002  # weight of staying close to half and half, against the relative squared error


@dataclass(frozen=True)
class Fit:
    """Machines and task of a run; `orchestrator.simulation.hardware.Machines`. `measured` is of the run's own layout."""

    recording: Recording
    measured: Timing
    decode_error: float  # root mean square of a group's duration, fitted minus real, over the mean duration
    keys: SimulateConfig = field(default_factory=SimulateConfig)

    def workload(self, answers_per_group: int) -> EmpiricalWorkload:
        """The run's groups, or groups of another size made of them."""
        groups = [(group.lengths, group.rewards) for group in self.recording.groups]
        most_tokens = self.recording.config.rollout.max_response_tokens
        return EmpiricalWorkload(self.recording.prompt_tokens, regrouped(groups, answers_per_group, most_tokens))

    def timing(self, layout: Layout) -> Timing:
        """Of other numbers of GPUs: more engines like the run's, and a learner whose time per token is split among its GPUs.

        Speeds that `keys` set are taken from there. Raises ConfigError for engines of another width: the run says nothing of them.
        """
        own = self.recording.layout
        if layout.gpus_per_engine != own.gpus_per_engine:
            raise ConfigError(
                f"simulate.gpus_per_engine={layout.gpus_per_engine}: the run in simulate.from_run has engines of "
                f"{own.gpus_per_engine}, from which the speed of others does not follow"
            )
        timing = replace(
            self.measured, learn_s_per_token=self.measured.learn_s_per_token * own.learner_gpus / layout.learner_gpus
        )
        if layout.shared and not own.shared:
            timing = replace(
                timing,
                learn_base_s=timing.learn_base_s + self.keys.turn_s,
                pause_s=timing.publish_s,
            )
        if layout.shared != own.shared or self.keys.engine_speed_while_learning is not None:
            timing = replace(timing, engine_speed_while_learning=speeds(self.keys, layout)[0])
        if layout.shared != own.shared or self.keys.learner_speed_while_generating is not None:
            timing = replace(timing, learner_speed_while_generating=speeds(self.keys, layout)[1])
        return timing


def fit_run(run_dir: Path, keys: SimulateConfig | None = None) -> Fit:
    """Raises ConfigError where the folder is no run's, or the run is too short."""
    fitted = fit(read_recording(run_dir))
    return fitted if keys is None else replace(fitted, keys=keys)


def fit(recording: Recording) -> Fit:
    """Everything that a run tells; see the module's docstring."""
    steps, shared = recording.steps, recording.layout.shared
    kept = slice(WARMUP_STEPS, None)
    publish_s = float(np.mean((steps.acknowledged_s - steps.learned_s)[kept]))
    pause_s = publish_s if shared else min(publish_s, float(np.mean(steps.pause_s[kept])))
    overlap = np.zeros(len(steps)) if shared else _generating_share(recording)
    base_s, per_token_s, learner_speed = _learning(steps, overlap, kept)
    decoding, error = _decoding(recording)
    timing = Timing(
        decode_base_s=decoding.base_s,
        decode_per_answer_s=decoding.per_answer_s,
        max_concurrent_answers=recording.config.rollout.max_concurrent_answers,
        learn_base_s=base_s,
        learn_s_per_token=per_token_s,
        score_s=recording.score_s,
        publish_s=publish_s,
        pause_s=pause_s,
        between_s=float(np.mean(steps.between_s[kept])),
        engine_speed_while_learning=decoding.speed_while_learning,
        learner_speed_while_generating=learner_speed,
        learner_shares_prefixes=recording.shares_prefixes,
    )
    return Fit(recording, timing, error)


# Decoding


@dataclass(frozen=True)
class _Decoding:
    base_s: float
    per_answer_s: float
    speed_while_learning: float

    def times(self, factor: float) -> _Decoding:
        return replace(self, base_s=self.base_s * factor, per_answer_s=self.per_answer_s * factor)


def _decoding(recording: Recording) -> tuple[_Decoding, float]:
    """The parameters whose groups take as long as the run's, and the error that is left."""
    warm_s = recording.steps.acknowledged_s[WARMUP_STEPS - 1]
    groups = recording.groups[-MOST_GROUPS:]
    durations = np.array([group.generated_s - group.dispatched_s for group in groups])
    kept = np.isfinite(durations) & np.array([group.dispatched_s >= warm_s for group in groups])
    if kept.sum() < 8:
        raise ConfigError(
            f"simulate.from_run={recording.run_dir}: the journal holds the duration of {kept.sum()} groups after the first "
            f"{WARMUP_STEPS} batches; a fit needs at least 8"
        )
    mean_s = float(durations[kept].mean())
    longest = float(np.mean([max(group.lengths) for group in groups]))
    answers = recording.config.sampling.answers_per_group
    together = not recording.layout.shared and recording.config.staleness.max > 0

    def scaled(guess: Sequence[float]) -> tuple[_Decoding, np.ndarray]:
        """The guess, sped up or slowed down until the mean duration is the run's."""
        share, speed = guess
        step_s = mean_s / longest
        decoding = _Decoding(step_s * (1 - share), step_s * share / answers, speed)
        replayed = _replay(recording, groups, decoding)
        elasticity = (
            1.0  # by how many percent the mean duration grows with 1% longer decoding steps: busy engines queue
        )
        for _ in range(6):
            off = math.log(float(replayed[kept].mean()) / mean_s)
            if abs(off) < SAME_MEAN:
                break
            change = -off / elasticity
            decoding = decoding.times(math.exp(change))
            replayed = _replay(recording, groups, decoding)
            now_off = math.log(float(replayed[kept].mean()) / mean_s)
            elasticity = min(max((now_off - off) / change, 0.5), 8.0)
        return decoding, replayed

    def error(guess: Sequence[float]) -> float:
        share, _ = guess
        _, replayed = scaled(guess)
        squares = float(np.mean(((replayed - durations)[kept] / mean_s) ** 2))
        return squares + PLAUSIBLE * (share - 0.5) ** 2

    def search(*speeds: float) -> tuple[float, ...]:
        """From the best of a few points on."""
        start = min(itertools.product((0.1, 0.5, 0.9), speeds), key=error)
        return _pattern_search(error, start, ((0.0, 1.0), (min(speeds), max(speeds))), first_step=0.2, last_step=0.01)

    best = search(0.0 if recording.layout.shared else 1.0)
    if together:
        slowed = search(LEAST_SPEED, 0.35, 0.7, 1.0)
        if _is_evident(error(best), error(slowed), len(recording.steps) - WARMUP_STEPS):
            best = slowed
    decoding, replayed = scaled(best)
    return decoding, float(np.sqrt(np.mean(((replayed - durations)[kept] / mean_s) ** 2)))


def _replay(recording: Recording, groups: Sequence[RecordedGroup], decoding: _Decoding) -> np.ndarray:
    """Seconds that each group would have taken, had the engines been like this."""
    first_s = groups[0].dispatched_s
    arrivals = [(group.dispatched_s, number, group.lengths) for number, group in enumerate(groups)]
    # Of a group that nothing was written about the length is not known: it was like the others.
    lost_s = [at_s for at_s in recording.lost_s if at_s >= first_s]
    arrivals += [(at_s, len(groups) + n, groups[n % len(groups)].lengths) for n, at_s in enumerate(lost_s)]
    arrivals.sort()
    changes = _speed_changes(recording, decoding.speed_while_learning)
    clock = SpeedClock()
    places = recording.config.rollout.max_concurrent_answers
    engines = [Engine(decoding.base_s, decoding.per_answer_s, places, ()) for _ in range(recording.layout.engines)]
    fleet = Fleet(engines)
    durations = np.full(len(groups), np.nan)
    arrival = change = 0
    while True:
        arrival_s = arrivals[arrival][0] if arrival < len(arrivals) else math.inf
        change_s = changes[change][0] if change < len(changes) else math.inf
        finish_s = clock.when(fleet.next_finish())
        if finish_s <= min(arrival_s, change_s):
            if finish_s == math.inf:
                return durations
            number = fleet.finish().key
            if number < len(groups):
                durations[number] = finish_s - groups[number].dispatched_s
        elif change_s <= arrival_s:
            clock.set_speed(*changes[change])
            change += 1
        else:
            at_s, number, lengths = arrivals[arrival]
            fleet.add(number, lengths, 0.0, clock.at(at_s))
            arrival += 1


def _speed_changes(recording: Recording, speed_while_learning: float) -> list[tuple[float, float]]:
    """When the run's engines changed their speed, and to which."""
    s = recording.steps
    pauses_s = s.acknowledged_s - s.learned_s if recording.layout.shared else s.pause_s
    changes = []
    for taken_s, learned_s, acknowledged_s, pause_s in zip(
        s.taken_s, s.learned_s, s.acknowledged_s, pauses_s, strict=True
    ):
        stops_s = max(learned_s, acknowledged_s - pause_s)
        changes += [(taken_s, speed_while_learning), (learned_s, 1.0), (stops_s, 0.0), (acknowledged_s, 1.0)]
    return changes


# Learning


def _generating_share(recording: Recording) -> np.ndarray:
    """How much of the engines was busy while each batch was learned, 0 to 1."""
    durations = np.array([group.generated_s - group.dispatched_s for group in recording.groups])
    usual_s = float(np.nanmean(durations))
    begins = np.array([group.dispatched_s for group in recording.groups])
    ends = np.sort(begins + np.where(np.isfinite(durations), durations, usual_s))
    shares = []
    for taken_s, learned_s in zip(recording.steps.taken_s, recording.steps.learned_s, strict=True):
        moments = np.linspace(taken_s, learned_s, 101)
        generating = np.searchsorted(np.sort(begins), moments) - np.searchsorted(ends, moments)
        shares.append(np.minimum(generating / recording.layout.engines, 1.0).mean())
    return np.array(shares)


def _learning(steps: RecordedSteps, overlap: np.ndarray, kept: slice) -> tuple[float, float, float]:
    """Seconds of a batch, seconds of a token, and the learner's speed while all engines generate."""
    learn_s, tokens, overlap = steps.learn_s[kept], steps.learned_tokens[kept], overlap[kept]

    def at(speed: float) -> tuple[float, float, float, float]:
        """The error that is left, and the three."""
        work_s = learn_s * (1 - (1 - speed) * overlap)  # what it would have taken alone
        base_s, per_token_s = _line(tokens, work_s)
        fitted_s = base_s + per_token_s * tokens
        factor = float(work_s.mean() / fitted_s.mean())
        return float(np.mean((fitted_s / work_s - 1) ** 2)), base_s * factor, per_token_s * factor, speed

    alone = at(1.0)
    slowed = min(at(float(speed)) for speed in np.arange(1.0, LEAST_SPEED, -0.05))
    return (slowed if _is_evident(alone[0], slowed[0], len(learn_s)) else alone)[1:]


def _is_evident(error_alone: float, error_slowed: float, batches: int) -> bool:
    """Whether a slow-down explains so much more that it is no chance; the errors are means of squares."""
    return error_slowed > 0 and batches * math.log(error_alone / error_slowed) > EVIDENCE


def _line(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Constant and slope, neither negative, by least squares of the relative error; see the module's docstring."""
    through_origin = float((x / y).sum() / ((x / y) ** 2).sum())
    design = np.stack([1 / y, x / y], axis=1)
    normal = design.T @ design
    if len(x) < 4 or np.linalg.cond(normal / np.sqrt(np.outer(np.diag(normal), np.diag(normal)))) > 1e10:
        return 0.0, through_origin
    constant, slope = np.linalg.solve(normal, design.sum(axis=0))
    residual = float(((design @ [constant, slope] - 1) ** 2).sum()) / (len(x) - 2)
    if slope <= 0 or constant < 2 * math.sqrt(residual * np.linalg.inv(normal)[0, 0]):
        return 0.0, through_origin
    return float(constant), float(slope)


def _pattern_search(
    function: Callable[[Sequence[float]], float],
    start: Sequence[float],
    bounds: Sequence[tuple[float, float]],
    *,
    first_step: float,
    last_step: float,
) -> tuple[float, ...]:
    """Where the function is smallest nearby: one coordinate at a time, steps halved where none helps (Hooke and Jeeves, 1961)."""
    best = tuple(start)
    value = function(best)
    step = first_step
    while step >= last_step:
        improved = False
        for i, (low, high) in enumerate(bounds):
            for sign in (1, -1):
                moved = min(max(best[i] + sign * step, low), high)
                if moved == best[i]:
                    continue
                trial = (*best[:i], moved, *best[i + 1 :])
                if (found := function(trial)) < value:
                    best, value, improved = trial, found, True
                    break
        if not improved:
            step /= 2
    return best
