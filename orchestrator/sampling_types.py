"""What goes into the sampling queue and comes out of it.

Small frozen values: settings, what the queue knows of an answer (`Member`), the commands it gives its driver,
the batch, and the counts that metrics, console and dumps read. They hold metadata only; token data travels by
reference, outside the queue.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from orchestrator.staleness import BatchStaleness, StalenessPolicy, batch_staleness
from rollout_workers.trajectory import Status, Trajectory


class Stage(enum.StrEnum):
    """Where a group is. The last five are final."""

    GENERATING = "generating"
    SCORING = "scoring"
    PARKED = "parked"  # its generation is interrupted and will be resumed
    READY = "ready"
    TRAINING = "training"
    TRAINED = "trained"
    FILTERED = "filtered"  # it teaches nothing: its rewards do not differ, or another filter says so
    FAILED = "failed"  # too few members could be generated or scored
    STALE = "stale"  # too few members are within the staleness bound
    CANCELLED = "cancelled"


UNFINISHED = frozenset({Stage.GENERATING, Stage.SCORING, Stage.PARKED})
LIVE = UNFINISHED | {Stage.READY, Stage.TRAINING}


class OnStarved(enum.StrEnum):
    """What to do when the data can't fill a batch."""

    SHRINK = "shrink"
    STOP = "stop"
    ERROR = "error"


class OnLate(enum.StrEnum):
    """What to do when an unfinished group would be too old after one more batch without it."""

    WAIT = "wait"  # for it: the batch is held back
    DROP = "drop"  # train on others; the group is set aside as stale when it is finished


@dataclass(frozen=True)
class QueueSettings:
    """The queue's settings. ValueError, naming the key, for one that could deadlock or train nothing.

    `filter` sets groups aside whose rewards do not differ, `pass_rate_band` those whose mean filter value is outside of
    it (ends included), `keep` those of whose scored members it says False; in this order, each only where it is set.
    """

    groups_per_batch: int
    answers_per_group: int
    filter: bool
    filter_tolerance: float = 1e-6
    pass_rate_band: tuple[float, float] | None = None
    keep: Callable[[Sequence[Member]], bool] | None = None
    min_scored_fraction: float = 1.0
    window_batches: float = 1.0
    max_dispatches_per_batch: int = 10  # times groups_per_batch
    on_starved: OnStarved = OnStarved.SHRINK
    member_retries: int = 0  # rounds of Resample for one group
    max_staleness: int = 0  # versions
    on_late: OnLate = OnLate.WAIT

    def __post_init__(self) -> None:
        least = {
            "sampling.groups_per_batch": (self.groups_per_batch, 1),
            # One answer alone never differs: with the filter on, every group would be set aside.
            "sampling.answers_per_group": (self.answers_per_group, 2 if self.filter else 1),
            "sampling.window_batches": (self.window_batches, 0),
            "sampling.max_dispatches_per_batch": (self.max_dispatches_per_batch, 1),
            "staleness.max": (self.max_staleness, 0),
            "rollout.retries": (self.member_retries, 0),
        }
        for key, (value, minimum) in least.items():
            if not value >= minimum:  # so put, it refuses nan too
                raise ValueError(f"{key} must be at least {minimum} (sampling.filter={self.filter}), got {value}")
        if not 0 <= self.filter_tolerance < math.inf:
            raise ValueError(f"sampling.filter_tolerance must be finite, at least 0; got {self.filter_tolerance}")
        if not 0 < self.min_scored_fraction <= 1:
            raise ValueError(f"sampling.min_scored_fraction must be in (0, 1]; got {self.min_scored_fraction}")
        if self.pass_rate_band is not None and not self.pass_rate_band[0] <= self.pass_rate_band[1]:
            low, high = self.pass_rate_band
            raise ValueError(f"sampling.pass_rate_band must be [low, high] with low <= high; got [{low}, {high}]")

    @property
    def policy(self) -> StalenessPolicy:
        return StalenessPolicy(self.max_staleness, self.groups_per_batch)

    @property
    def min_trainable(self) -> int:
        """Members within the bound that make a group worth training: 2, or 1 where groups have one answer."""
        return min(2, self.answers_per_group)

    @property
    def min_scored(self) -> int:
        """Scored members that make a group trainable."""
        share = self.min_scored_fraction * self.answers_per_group
        return max(math.ceil(share - 1e-9), self.min_trainable)


class _MemberFields(NamedTuple):
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody needs of a member
    status: Status
    reward: float | None = None
    filter_value: float | None = None
    token_versions: tuple[tuple[int, int], ...] = ()
    response_length: int = 0
    truncated: bool = False


class Member(_MemberFields):
    """What the queue knows of one answer of a group.

    `reward` is a number exactly when `status` is scored. `filter_value` is the component named by
    `sampling.filter_on`, None where that component skipped this answer. `token_versions` are `(version, token
    count)` spans as the engine reported them; together they are `response_length` tokens. A member whose
    generation failed is `Member(index, Status.ERRORED)`.

    A tuple, because a simulation makes millions: `Member._make(values)` leaves the checks out.
    """

    __slots__ = ()

    def __new__(
        cls,
        index: int,
        status: Status,
        reward: float | None = None,
        filter_value: float | None = None,
        token_versions: tuple[tuple[int, int], ...] = (),
        response_length: int = 0,
        truncated: bool = False,
    ) -> Member:
        if (status is Status.SCORED) != (reward is not None):
            raise ValueError(f"member {index}: a reward is a number or a status, got {reward} with {status}")
        for value in (reward, filter_value):
            if value is not None and not math.isfinite(value):
                raise ValueError(f"member {index}: a reward must be finite, got {value}")
        tokens = sum([count for _, count in token_versions])
        if tokens != response_length:
            raise ValueError(f"member {index}: version spans cover {tokens} of {response_length} sampled tokens")
        return cls._make((index, status, reward, filter_value, token_versions, response_length, truncated))

    @classmethod
    def of(cls, trajectory: Trajectory, filter_on: str) -> Member:
        """The metadata of a judged trajectory. Raises ValueError when it has no reward."""
        reward = trajectory.reward
        if reward is None:
            raise ValueError(f"trajectory {trajectory.group_id}/{trajectory.index} was not judged")
        return cls(
            index=trajectory.index,
            status=reward.status,
            reward=reward.value,
            filter_value=reward.components.get(filter_on),
            token_versions=tuple((span.version, span.end - span.start) for span in trajectory.version_spans),
            response_length=trajectory.response_length,
            truncated=trajectory.truncated,
        )


@dataclass(frozen=True)
class Resample:
    """Generate these members again, elsewhere if possible; then report the group generated once more."""

    group_id: str
    indexes: tuple[int, ...]


@dataclass(frozen=True)
class OfferAgain:
    """The group is gone without its prompt being used up: hand the prompt out once more, before new ones."""

    group_id: str
    prompt_id: str
    epoch: int


class Done(NamedTuple):
    """The prompt is used up in this epoch. `outcome` is trained, filtered, failed or stale."""

    group_id: str
    prompt_id: str
    epoch: int
    outcome: Stage
    reason: str = ""


Command = Resample | OfferAgain | Done
Commands = tuple[Command, ...]


@dataclass(frozen=True)
class Counts:
    """How many groups are in each stage now; the final stages count since the start of the run's lineage."""

    dispatched: int
    generating: int
    scoring: int
    parked: int
    ready: int
    training: int
    trained: int
    filtered: int
    failed: int
    stale: int
    cancelled: int

    @property
    def in_flight(self) -> int:
        return self.generating + self.scoring + self.parked

    @property
    def untrained(self) -> int:
        return self.in_flight + self.ready + self.training


@dataclass(frozen=True)
class Tally:
    """What came of groups over some period: the run's lineage, or since the previous batch was taken.

    `judged` groups had enough scored members; `zero_variance` of these do not differ, by filter value or by
    total reward, filtered or not. Where the filter values are equal they are `all_right` if their mean is
    above 0.5 and `all_wrong` otherwise (the queue does not know the best possible value). `out_of_band`,
    `not_kept` and `stopped_early` say of filtered groups why, where it was not for want of variance alone.
    `excluded_members` and `excluded_tokens` are answers of trained groups left out of the loss by the staleness bound.
    """

    judged: int = 0
    zero_variance: int = 0
    all_right: int = 0
    all_wrong: int = 0
    filtered: int = 0
    out_of_band: int = 0
    not_kept: int = 0
    stopped_early: int = 0
    failed: int = 0
    stale: int = 0
    cancelled: int = 0
    resampled_members: int = 0
    excluded_members: int = 0
    excluded_tokens: int = 0

    def __sub__(self, earlier: Tally) -> Tally:
        return Tally(**{name: now - getattr(earlier, name) for name, now in vars(self).items()})


class BatchGroup(NamedTuple):
    """A group to train on: the `trainable` indexes enter the loss, all scored `members` its baseline."""

    group_id: str
    prompt_id: str
    epoch: int
    members: tuple[Member, ...]
    trainable: tuple[int, ...]

    @property
    def excluded(self) -> tuple[Member, ...]:
        """Scored members that the staleness bound leaves out of the loss."""
        return tuple(
            m for m in self.members if m.token_versions and m.reward is not None and m.index not in self.trainable
        )


@dataclass(frozen=True)
class Batch:
    """Groups, oldest-dispatched first, that improve `version`.

    `tally` is of the time since the batch before was taken, `counts` are of the moment at which this one was.
    """

    version: int
    groups: tuple[BatchGroup, ...]
    wanted_groups: int
    tally: Tally
    counts: Counts

    @property
    def shrunk(self) -> bool:
        return len(self.groups) < self.wanted_groups

    def staleness(self) -> BatchStaleness:
        """Over the members that enter the loss."""
        parts = [(group.members, group.trainable) for group in self.groups]
        return batch_staleness(
            self.version,
            [members[index].token_versions for members, trainable in parts for index in trainable],
        )


@dataclass(frozen=True)
class Starvation:
    """The data can't fill a batch, and nothing that is in flight could change that.

    `action` is the configured one, except that a batch of no groups at all is not trained: `shrink` is then
    `stop`. `str` of it is the message for a person: counts and a suggestion.
    """

    action: OnStarved
    ready: int
    wanted: int
    exhausted: bool
    tally: Tally

    def __str__(self) -> str:
        t = self.tally
        why = "the prompts are exhausted" if self.exhausted else "sampling.max_dispatches_per_batch is spent"
        return (
            f"The data can't fill a batch: {self.ready} of {self.wanted} groups are ready and {why}. "
            f"Since the last batch {t.filtered} groups were filtered ({t.all_right} all right, {t.all_wrong} all wrong, "
            f"{t.out_of_band + t.not_kept} by other filters), {t.failed} failed, {t.stale} stale, {t.cancelled} cancelled. "
            f"{self.suggestion}"
        )

    @property
    def suggestion(self) -> str:
        t = self.tally
        causes = {
            "Most prompts are too easy by now: use harder data.": t.all_right,
            "Most prompts are too hard: use easier data, more answers per group or longer ones.": t.all_wrong,
            "Most groups are outside sampling.pass_rate_band or refused by sampling.keep: loosen these.": (
                t.out_of_band + t.not_kept
            ),
            "Most groups failed: see the log for what the workers reported.": t.failed,
            "Most groups were too old: raise staleness.max or shorten the answers.": t.stale,
        }
        text, count = max(causes.items(), key=lambda item: item[1])
        if count:
            return text
        return "Raise data.epochs or add data." if self.exhausted else "Raise sampling.max_dispatches_per_batch."
