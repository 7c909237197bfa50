"""What goes into a simulation and comes out of it: timing, workload, settings, and one row of numbers per step.

`Timing` describes the machines, a `Workload` (`orchestrator.simulation.workload`) the answers, `QueueSettings` the sampling and
its staleness bound; `orchestrator.simulation.simulator.simulate` makes a `SimulationResult` of them. A step is a batch: it is
collected, learned from and published, and after that the loop is busy for `between_s`. Step i improves version i.

    start        taken         learned      acknowledged      end = start of the next
      |-- collect --|-- learn ----|-- publish ---|-- between ---|

Times are seconds since the start of the run. An answer is one sampled response, a group all answers to one prompt.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Protocol

import numpy as np

from orchestrator.metrics import Population, bias_metrics
from orchestrator.sampling_types import QueueSettings

TRACE_STEPS = 20  # steps for which the number of busy engines is kept, moment by moment


@dataclass(frozen=True)
class Timing:
    """How long things take. ValueError, naming the field, for a value that can't be.

    An engine with n answers in decoding gives each of them one token per step, and a step takes
    `decode_base_s + decode_per_answer_s * n` seconds. What arrives during a step joins at the next.
    """

    decode_base_s: float
    decode_per_answer_s: float
    max_concurrent_answers: int  # in decoding per engine; further ones wait in its queue, first come first served
    learn_s_per_token: float  # of the batch, prompts included
    learn_base_s: float = 0.0
    prefill_s_per_token: float = 0.0  # of the prompt, once per group; the engine's other answers stand still meanwhile
    score_s: float = 0.0  # last answer of a group to its verdict
    publish_s: float = 0.0  # end of learning to the new version's acknowledgement
    pause_s: float = 0.0  # the last part of `publish_s`, in which engines stand still
    between_s: float = 0.0  # acknowledgement to the earliest moment of the next batch: records, probe, checkpoints
    # Speed of the engines while the learner learns: 1 with devices of their own, less where they get in each other's
    # way, 0 where they take turns. There they stand still until the version is acknowledged: `pause_s` is `publish_s`.
    engine_speed_while_learning: float = 1.0
    # Speed of the learner while all engines generate, 1 when none does and linear in between. It learns at full speed
    # if the engines stand still for it (`engine_speed_while_learning` 0).
    learner_speed_while_generating: float = 1.0
    learner_shares_prefixes: bool = False  # a group's prompt counts once among the batch's tokens, not for every answer

    def __post_init__(self) -> None:
        for name in (field.name for field in fields(self)):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} must be finite and at least 0, got {value}")
        if self.decode_base_s + self.decode_per_answer_s <= 0:
            raise ValueError("decode_base_s and decode_per_answer_s are both 0: a decoding step must take time")
        if self.learn_base_s + self.learn_s_per_token <= 0:
            raise ValueError("learn_base_s and learn_s_per_token are both 0: learning must take time")
        if self.max_concurrent_answers < 1:
            raise ValueError(f"max_concurrent_answers must be at least 1, got {self.max_concurrent_answers}")
        if self.pause_s > self.publish_s:
            raise ValueError(f"pause_s is a part of publish_s={self.publish_s}, got {self.pause_s}")
        for name in ("engine_speed_while_learning", "learner_speed_while_generating"):
            if getattr(self, name) > 1:
                raise ValueError(f"{name} must be at most 1, got {getattr(self, name)}")


class Workload(Protocol):
    """How long the answers are and how often they are right."""

    @property
    def prompt_tokens(self) -> int:
        """Length of every prompt."""

    def sample(self, rng: np.random.Generator, groups: int, answers: int) -> tuple[np.ndarray, np.ndarray]:
        """Lengths in tokens, int64 [groups, answers], and rewards, float64 [groups, answers].

        A reward of NaN is an answer that has none: its generation or its verdict failed, after all retries.
        """


@dataclass(frozen=True)
class SimulationSettings:
    """A run of `steps` batches on `engines` engines. ValueError for what can't be.

    `queue.member_retries` makes no difference: the workload's failures are those that are left after all retries.
    """

    queue: QueueSettings
    timing: Timing
    workload: Workload
    engines: int
    steps: int
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("engines", "steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


@dataclass(frozen=True)
class Steps:
    """One entry per step, arrays of shape [steps] but for `histogram`.

    What is counted «during a step» happened between its start and its end. Gauges are of the moment at which the batch was
    taken, as a run's `queue/*`. An answer is in the loss unless the staleness bound leaves it out or it has no reward.
    """

    start_s: np.ndarray
    taken_s: np.ndarray
    learned_s: np.ndarray
    acknowledged_s: np.ndarray
    end_s: np.ndarray
    late_s: np.ndarray  # of the time in which the batch was collected: it was there, but held back for late groups
    groups: np.ndarray  # in the batch
    answers: np.ndarray  # in its loss
    trained_tokens: np.ndarray  # sampled tokens in its loss
    learned_tokens: np.ndarray  # the same with prompts: what the learner's time is proportional to
    dispatched_groups: np.ndarray  # during the step, as are the next ones
    dispatched_tokens: np.ndarray  # that the groups dispatched will come to
    generated_tokens: np.ndarray  # of groups that were judged
    filtered_groups: np.ndarray
    failed_groups: np.ndarray
    stale_groups: np.ndarray
    wasted_tokens: np.ndarray  # of failed and stale groups, and of answers of the batch that are left out of its loss
    consumed_answers: np.ndarray  # scored answers of trained and filtered groups, and their tokens
    consumed_tokens: np.ndarray
    scored_answers: np.ndarray  # scored answers of all groups that were judged, and their tokens
    scored_tokens: np.ndarray
    staleness_mean: np.ndarray  # over the answers in the loss, in versions; the sum of the next two
    in_flight_mean: np.ndarray
    in_queue_mean: np.ndarray
    staleness_max: np.ndarray
    stale_ratio: np.ndarray
    stale_token_ratio: np.ndarray
    histogram: np.ndarray  # int64 [steps, max_staleness + 1]: answers in the loss by staleness
    engine_busy_ratio: np.ndarray  # share of the engines' time in which there was work and they did not stand still
    generating: np.ndarray  # gauges, in groups
    scoring: np.ndarray
    ready: np.ndarray  # left over by the batch

    def __len__(self) -> int:
        return len(self.start_s)

    @property
    def collect_s(self) -> np.ndarray:
        return self.taken_s - self.start_s

    @property
    def learn_s(self) -> np.ndarray:
        return self.learned_s - self.taken_s

    @property
    def publish_s(self) -> np.ndarray:
        return self.acknowledged_s - self.learned_s

    @property
    def step_s(self) -> np.ndarray:
        return self.end_s - self.start_s

    @property
    def learner_busy_ratio(self) -> np.ndarray:
        """Share of the step in which the learner learns."""
        return self.learn_s / self.step_s


@dataclass(frozen=True)
class SimulationResult:
    """A finished simulation.

    The summary leaves out the first steps, in which the pipeline fills (`warmup_steps`), and the last ones, in which it
    drains because nothing is generated for batches that will never be (`drain_steps`); `measured` are the others. Where
    the run ended before the first batch, every number is NaN.
    """

    settings: SimulationSettings
    steps: Steps
    starved: str | None  # why the run ended early, as the queue said it; None: it made all its steps
    # Busy engines over the first TRACE_STEPS steps: from `trace_s[i]` to the next entry, `trace_busy[i]` engines were busy.
    trace_s: np.ndarray
    trace_busy: np.ndarray

    @property
    def warmup_steps(self) -> int:
        return min(2 * (self.settings.queue.max_staleness + 1) + 1, len(self.steps) // 2)

    @property
    def drain_steps(self) -> int:
        return min(self.settings.queue.max_staleness, (len(self.steps) - self.warmup_steps) // 2)

    @property
    def measured(self) -> slice:
        """The steps that the summary is about."""
        return slice(self.warmup_steps, len(self.steps) - self.drain_steps)

    @property
    def total_s(self) -> float:
        """From the first dispatch to the end of the last step, all steps included."""
        return float(self.steps.end_s[-1]) if len(self.steps) else math.nan

    @property
    def mean_step_s(self) -> float:
        return self._mean("step_s")

    @property
    def trained_tokens_per_s(self) -> float:
        return self._ratio("trained_tokens", "step_s")

    @property
    def generated_tokens_per_s(self) -> float:
        return self._ratio("generated_tokens", "step_s")

    @property
    def rollout_idle_share(self) -> float:
        """Engine time without work or at a standstill (a pause, the learner's turn)."""
        return 1 - self._weighted("engine_busy_ratio", "step_s")

    @property
    def learner_idle_share(self) -> float:
        """Learner time in which it does not learn: it waits for a batch, publishes, or the loop is between batches."""
        return 1 - self._ratio("learn_s", "step_s")

    @property
    def late_share(self) -> float:
        """Time in which a batch was there but held back for groups that would be too old after it (staleness.on_late)."""
        return self._ratio("late_s", "step_s")

    @property
    def stale_ratio(self) -> float:
        """Share of answers in the loss with a staleness above 0."""
        return self._weighted("stale_ratio", "answers")

    @property
    def stale_token_ratio(self) -> float:
        """Share of trained tokens whose own version is older than the one that learns from them."""
        return self._weighted("stale_token_ratio", "trained_tokens")

    @property
    def staleness_mean(self) -> float:
        return self._weighted("staleness_mean", "answers")

    @property
    def staleness_max(self) -> float:
        values = self.steps.staleness_max[self.measured]
        return float(values.max()) if len(values) else math.nan

    @property
    def histogram(self) -> np.ndarray:
        """Share of the answers in the loss by staleness, [max_staleness + 1]."""
        counts = self.steps.histogram[self.measured].sum(axis=0)
        return counts / counts.sum() if counts.any() else np.full(len(counts), math.nan)

    @property
    def length_bias(self) -> float:
        """`bias/trained_to_dispatched_length` as a run shows it after its last step: from its start, trained and filtered
        groups over all that were judged."""
        s = self.steps
        consumed = Population(int(s.consumed_answers.sum()), int(s.consumed_tokens.sum()))
        scored = Population(int(s.scored_answers.sum()), int(s.scored_tokens.sum()))
        return bias_metrics(consumed, scored).get("bias/trained_to_dispatched_length", math.nan)

    @property
    def trained_to_dispatched_length(self) -> float:
        """Mean length of the answers in the loss over that of the answers dispatched, within the measured steps.

        The filter has a part in it, where length and the prompt's pass rate are related; the staleness bound the other.
        """
        answers = self.settings.queue.answers_per_group
        return self._ratio("trained_tokens", "answers") / (
            self._ratio("dispatched_tokens", "dispatched_groups") / answers
        )

    @property
    def filtered_share(self) -> float:
        """Filtered groups among those that were trained, filtered, failed or stale."""
        return self._outcome_share("filtered_groups")

    @property
    def failed_share(self) -> float:
        return self._outcome_share("failed_groups")

    @property
    def stale_share(self) -> float:
        return self._outcome_share("stale_groups")

    @property
    def wasted_token_share(self) -> float:
        """Tokens of failed and stale groups and of answers left out of the loss, over those generated."""
        return self._ratio("wasted_tokens", "generated_tokens")

    def summary(self) -> dict[str, float]:
        """The numbers above by name; for tables and files."""
        return {name: getattr(self, name) for name in SUMMARY}

    def _sum(self, name: str) -> float:
        return float(getattr(self.steps, name)[self.measured].sum())

    def _mean(self, name: str) -> float:
        values = getattr(self.steps, name)[self.measured]
        return float(values.mean()) if len(values) else math.nan

    def _ratio(self, above: str, below: str) -> float:
        divisor = self._sum(below)
        return self._sum(above) / divisor if divisor else math.nan

    def _weighted(self, name: str, weight: str) -> float:
        weights = getattr(self.steps, weight)[self.measured]
        total = weights.sum()
        return float((getattr(self.steps, name)[self.measured] * weights).sum() / total) if total else math.nan

    def _outcome_share(self, name: str) -> float:
        outcomes = sum(self._sum(kind) for kind in ("groups", "filtered_groups", "failed_groups", "stale_groups"))
        return self._sum(name) / outcomes if outcomes else math.nan


# Name of each number of the summary, with its meaning and unit.
SUMMARY: Mapping[str, str] = {
    "mean_step_s": "mean time of a step, s",
    "total_s": "the whole run, s",
    "trained_tokens_per_s": "tokens in the loss per second",
    "generated_tokens_per_s": "tokens of judged groups per second",
    "rollout_idle_share": "engine time without work or at a standstill, share",
    "learner_idle_share": "learner time without learning, share",
    "late_share": "time in which a batch was held back for late groups, share",
    "stale_ratio": "answers in the loss with a staleness above 0, share",
    "stale_token_ratio": "trained tokens of an older version, share",
    "staleness_mean": "mean staleness of the answers in the loss, versions",
    "staleness_max": "largest staleness of an answer in the loss, versions",
    "length_bias": "length of consumed over judged answers since the start, 1 if unbiased",
    "trained_to_dispatched_length": "length of trained over dispatched answers, 1 if unbiased",
    "filtered_share": "groups filtered among those settled, share",
    "failed_share": "groups failed among those settled, share",
    "stale_share": "groups set aside as stale among those settled, share",
    "wasted_token_share": "tokens of failed and stale groups and of answers left out, over those generated",
}
