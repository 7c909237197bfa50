"""The sampling queue: which prompts may be dispatched, which finished groups are trained on, in which order.

A pure state machine: events are methods, each returns the commands that the driver must carry out. No Ray, no
clock, no I/O; the live run and a simulator drive it alike. A group (one dispatch of one prompt) passes

    dispatched -> generating -> scoring -> ready -> training -> trained
                   ^  |  (Resample)  |       |         |
                   |  v              +-------+---------+------> filtered | failed | stale | cancelled
                  parked ------------+

Invariants, asserted after every event (`check` proves them at length):

- Conservation: dispatched = generating + scoring + parked + ready + training
  + trained + filtered + failed + stale + cancelled.
- Admission: generating + scoring + parked + ready + training <= (max_staleness + 1) * groups_per_batch, where
  a batch in training counts as a full one even if it was shrunk (it still makes every other group one version
  older). A group that is set aside gives its place back, which makes room for exactly one more prompt.
  `run_ahead` may tighten admission for a while (then less is dispatched, nothing is thrown away) and loosen it
  again up to max_staleness.
- The hard bound: every ready group has at least `min_trainable` members within the bound at this version.
- Order: ready groups are consumed oldest-dispatched first, and only those at most window_batches *
  groups_per_batch dispatches younger than the oldest unfinished group (0: strict, infinite: greedy). This
  can't deadlock: an unfinished group waits for its workers, never for the queue, and when none is unfinished
  every ready group may be consumed.
- No waste: with on_late=wait, a group overtakes unfinished ones only while all of these can still be trained within
  the bound, in this batch or the next ones (earliest deadline first). Since admission leaves a place in time for every
  dispatch, nothing ever becomes stale, however long it takes; without it, slow and long answers would be lost, twice.
- Effort: groups that are untrained when a batch is taken, and dispatches until the next one is, are together
  at most (max_dispatches_per_batch + max_staleness) * groups_per_batch; the second summand is the run-ahead
  for later batches, which must not count against the one being filled. Once that is spent, or the prompts
  are, and nothing is in flight, the queue says so (`starvation`) instead of waiting for ever.

Finished groups are forgotten: memory is bounded by what is in flight, and an event costs O(log in flight).
What goes in and out is in `sampling_types`.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from orchestrator.sampling_types import (
    LIVE,
    UNFINISHED,
    Batch,
    BatchGroup,
    Command,
    Commands,
    Counts,
    Done,
    Member,
    OfferAgain,
    OnLate,
    OnStarved,
    QueueSettings,
    Resample,
    Stage,
    Starvation,
    Tally,
)
from orchestrator.staleness import StalenessPolicy


class QueueError(RuntimeError):
    """The driver broke the protocol (an event that can't follow), or an invariant does not hold."""


# The counters of a tally that are not stages of groups.
_JUDGEMENTS = (
    "judged",
    "zero_variance",
    "all_right",
    "all_wrong",
    "out_of_band",
    "not_kept",
    "stopped_early",
    "resampled_members",
    "excluded_members",
    "excluded_tokens",
)


@dataclass(slots=True, eq=False)
class _Group:
    group_id: str
    prompt_id: str
    epoch: int
    sequence: int  # of its dispatch
    version: int  # at its dispatch: no token of it is older
    stage: Stage = Stage.GENERATING
    resamples: int = 0
    members: tuple[Member, ...] = ()
    oldest: dict[int, int] = field(default_factory=dict)  # version of the oldest token of each candidate member
    expires: int = 0  # learner version at which a ready group becomes stale
    eligible: bool = False  # ready and inside the window


class SamplingQueue:
    """The state machine; see the module's docstring for its invariants.

    Every event raises QueueError when the group is unknown or in a stage the event can't follow.
    """

    def __init__(self, settings: QueueSettings, version: int = 0) -> None:
        self.settings = settings
        self.policy = settings.policy
        self._admission = self.policy
        self.version = version  # the learner's: of the last acknowledged publish
        self._indexes = list(range(settings.answers_per_group))
        self._window = settings.window_batches * settings.groups_per_batch
        self._effort = (settings.max_dispatches_per_batch + settings.max_staleness) * settings.groups_per_batch
        self._dispatched = 0
        self._stages = dict.fromkeys(Stage, 0)
        self._judgements = dict.fromkeys(_JUDGEMENTS, 0)
        self._before = Tally()  # the tally when the last batch was taken
        self._budget = self._effort  # dispatches left until a batch must have been taken
        self._exhausted = False
        self._groups: dict[str, _Group] = {}  # live ones
        # In order of dispatch. An OrderedDict: finding a dict's first key is linear in the deleted ones.
        self._unfinished: OrderedDict[str, _Group] = OrderedDict()
        self._training: dict[str, _Group] = {}
        # Ready groups by sequence, beyond and inside the window; entries no longer ready are skipped.
        self._beyond: list[tuple[int, _Group]] = []
        self._eligible: list[tuple[int, _Group]] = []
        self._eligible_count = 0
        # Waiting groups by the version of their dispatch: unfinished, ready, and ready inside the window.
        self._unfinished_by_version: Counter[int] = Counter()
        self._ready_by_version: Counter[int] = Counter()
        self._eligible_by_version: Counter[int] = Counter()
        self._expiring: dict[int, dict[str, _Group]] = {}  # ready groups by the version that makes them stale
        self._second_chances: set[tuple[str, int]] = set()  # prompts offered again after a stale group

    # Events

    def dispatched(self, group_id: str, prompt_id: str, epoch: int) -> Commands:
        """A prompt was sent to the rollout workers. There must have been `room`."""
        if group_id in self._groups:
            raise QueueError(f"group {group_id} (prompt {prompt_id}) was dispatched twice")
        if self._places() < 1:
            raise QueueError(f"group {group_id} (prompt {prompt_id}) was dispatched beyond the room: {self.counts}")
        group = _Group(group_id, prompt_id, epoch, self._dispatched, self.version)
        self._groups[group_id] = self._unfinished[group_id] = group
        self._unfinished_by_version[self.version] += 1
        self._dispatched += 1
        self._budget -= 1
        self._stages[Stage.GENERATING] += 1
        self._exhausted = False
        self._assert_bounds()
        return ()

    def generated(self, group_id: str, missing: Sequence[int] = ()) -> Commands:
        """The answers of the group are written, but for the members `missing`, whose generation failed.

        While there are retries left these are resampled; otherwise what there is is being scored.
        """
        group = self._find(group_id, Stage.GENERATING)
        if missing and group.resamples < self.settings.member_retries:
            group.resamples += 1
            self._judgements["resampled_members"] += len(missing)
            return (Resample(group_id, tuple(missing)),)
        self._move(group, Stage.SCORING)
        return ()

    def parked(self, group_id: str) -> Commands:
        """The group's generation was interrupted, to be resumed later; it keeps its place."""
        self._move(self._find(group_id, Stage.GENERATING), Stage.PARKED)
        return ()

    def resumed(self, group_id: str) -> Commands:
        """A parked group is being generated again."""
        self._move(self._find(group_id, Stage.PARKED), Stage.GENERATING)
        return ()

    def stopped(self, group_id: str) -> Commands:
        """The driver gives a parked group up because it is `hardly_useful`; its prompt is used up."""
        group = self._find(group_id, Stage.PARKED)
        self._judgements["stopped_early"] += 1
        return (self._done(group, Stage.FILTERED, "stopped early: the answers in time do not differ"),)

    def scored(self, group_id: str, members: Sequence[Member]) -> Commands:
        """Every member of the group has an outcome.

        The group is, in this order of precedence: failed, filtered, stale, or ready.
        """
        group = self._find(group_id, Stage.SCORING)
        settings = self.settings
        indexes = [member.index for member in members]
        if indexes != self._indexes:
            members = sorted(members, key=lambda member: member.index)
            if sorted(indexes) != self._indexes:
                last = settings.answers_per_group - 1
                raise QueueError(f"group {group_id} needs members 0 to {last}, got {sorted(indexes)}")
        scored = [member for member in members if member.reward is not None]
        oldest = {member.index: min(member.token_versions)[0] for member in scored if member.token_versions}
        if len(scored) < settings.min_scored or len(oldest) < settings.min_trainable:
            return (self._done(group, Stage.FAILED, _failure(members, settings.min_scored)),)
        if (reason := self._filtered(scored)) is not None:
            return (self._done(group, Stage.FILTERED, reason),)
        # Once the newest but one is over the bound, fewer than two members are trainable.
        newest = sorted(oldest.values(), reverse=True)
        group.expires = self.policy.expires(newest[settings.min_trainable - 1])
        if group.expires <= self.version:
            return (self._stale(group),)
        group.members, group.oldest = tuple(members), oldest
        self._move(group, Stage.READY)
        return ()

    def failed(self, group_id: str, reason: str) -> Commands:
        """The group is lost (its payload is gone, a deadline passed); allowed at every stage."""
        return (self._done(self._find(group_id, *LIVE), Stage.FAILED, reason),)

    def cancelled(self, group_id: str) -> Commands:
        """The driver gave the group up before its training; its prompt is not used up."""
        group = self._find(group_id, *UNFINISHED, Stage.READY)
        self._move(group, Stage.CANCELLED)
        return (self._offer_again(group),)

    def prompts_exhausted(self) -> Commands:
        """The prompt stream has nothing to hand out now (an OfferAgain changes that)."""
        self._exhausted = True
        return ()

    def run_ahead(self, versions: int) -> Commands:
        """Let generation run ahead by so many versions from now on, at most by max_staleness."""
        if not 0 <= versions <= self.policy.max_staleness:
            raise QueueError(f"generation may run 0 to {self.policy.max_staleness} versions ahead, not {versions}")
        self._admission = StalenessPolicy(versions, self.settings.groups_per_batch)
        return ()

    def take_batch(self, *, shrink: bool = False) -> Batch | None:
        """The next batch, None while it can't be filled, is held back, or another one is in training.

        With `shrink`, what is ready makes a smaller batch, but only when the queue is starved.
        """
        wanted = self.settings.groups_per_batch
        size = min(wanted, self._eligible_count)
        if self._training or size == 0 or (size < wanted and not (shrink and self.starvation())):
            return None
        if self._held_back(size):
            return None
        taken: list[BatchGroup] = []
        while len(taken) < size:
            _, group = heapq.heappop(self._eligible)
            if group.stage is Stage.READY:
                taken.append(self._take(group))
        tally = self.tally
        batch = Batch(self.version, tuple(taken), wanted, tally - self._before, self.counts)
        self._before = tally
        self._budget = self._effort - (len(self._groups) - len(self._training))
        return batch

    def acknowledged(self, version: int) -> Commands:
        """Every engine has `version`: the batch in training is trained, and ready groups grow older."""
        if version <= self.version:
            raise QueueError(f"version {version} was acknowledged, but the learner is at {self.version} already")
        commands: list[Command] = [self._done(group, Stage.TRAINED) for group in tuple(self._training.values())]
        previous, self.version = self.version, version
        for expired in range(previous + 1, version + 1):
            commands.extend(self._stale(group) for group in tuple(self._expiring.get(expired, {}).values()))
        return tuple(commands)

    # Queries

    def room(self) -> int:
        """How many prompts may be dispatched now; 0 once the prompts are exhausted."""
        return 0 if self._exhausted else self._places()

    def hardly_useful(self, members: Sequence[Member]) -> bool:
        """Whether these judged members, the group's others being overdue, leave little hope that it could be kept.

        So it is where equal groups are filtered and all of them, at least half of the group, are equal.
        """
        scored = [member for member in members if member.reward is not None]
        needed = max(self.settings.min_trainable, math.ceil(self.settings.answers_per_group / 2))
        return self.settings.filter and len(scored) >= needed and self._equal(_filter_values(scored), _rewards(scored))

    def waits_for_late(self) -> bool:
        """Whether a batch is there but held back for unfinished groups that would be too old after it."""
        wanted = self.settings.groups_per_batch
        return not self._training and self._eligible_count >= wanted and self._held_back(wanted)

    def starvation(self) -> Starvation | None:
        """Why no batch can be filled any more, or None while it still can."""
        ready, wanted = self._stages[Stage.READY], self.settings.groups_per_batch
        if self._unfinished or self._training or ready >= wanted or self.room():
            return None
        action = self.settings.on_starved
        if action is OnStarved.SHRINK and not ready:
            action = OnStarved.STOP
        return Starvation(action, ready, wanted, self._exhausted, self.tally - self._before)

    @property
    def counts(self) -> Counts:
        return Counts(self._dispatched, **{stage.value: count for stage, count in self._stages.items()})

    @property
    def tally(self) -> Tally:
        """Since the start of the run's lineage."""
        stages = self._stages
        return Tally(
            filtered=stages[Stage.FILTERED],
            failed=stages[Stage.FAILED],
            stale=stages[Stage.STALE],
            cancelled=stages[Stage.CANCELLED],
            **self._judgements,
        )

    def oldest(self, limit: int = 10) -> tuple[tuple[str, str, Stage], ...]:
        """Group id, prompt id and stage of the oldest unfinished groups: what is being waited for."""
        groups = itertools.islice(self._unfinished.values(), limit)
        return tuple((group.group_id, group.prompt_id, group.stage) for group in groups)

    def state(self) -> dict[str, Any]:
        """JSON-able: version and lifetime totals. Live groups are not kept; they count as cancelled in it.

        Their prompts are handed out again by the prompt stream: save its frontier at the same moment.
        """
        stages = {stage.value: 0 if stage in LIVE else count for stage, count in self._stages.items()}
        stages[Stage.CANCELLED.value] += len(self._groups)
        return {
            "version": self.version,
            "dispatched": self._dispatched,
            "stages": stages,
            "judgements": dict(self._judgements),
            "second_chances": sorted([prompt_id, epoch] for prompt_id, epoch in self._second_chances),
        }

    @classmethod
    def restore(cls, state: Mapping[str, Any], settings: QueueSettings) -> SamplingQueue:
        """An empty queue that goes on from `state`, with full room; the settings may differ from before."""
        queue = cls(settings, state["version"])
        queue._dispatched = state["dispatched"]
        queue._stages.update({Stage(name): count for name, count in state["stages"].items()})
        queue._judgements.update(state["judgements"])
        queue._before = queue.tally
        queue._second_chances = {(prompt_id, epoch) for prompt_id, epoch in state["second_chances"]}
        queue._assert_bounds()
        return queue

    def check(self) -> None:
        """Recount everything, in time linear in what is live; raises QueueError. For tests and dumps."""
        self._assert_bounds()
        by_stage = Counter(group.stage for group in self._groups.values())
        ready = {group.group_id: group for group in self._groups.values() if group.stage is Stage.READY}
        limit = self._window_limit()
        problems = {
            "a stage is miscounted": any(self._stages[stage] != by_stage[stage] for stage in LIVE),
            "unfinished groups are out of order": [group.sequence for group in self._unfinished.values()]
            != sorted(g.sequence for g in self._groups.values() if g.stage in UNFINISHED),
            "training groups are miscounted": len(self._training) != by_stage[Stage.TRAINING],
            "a ready group is stale": any(group.expires <= self.version for group in ready.values()),
            "a ready group would not expire": ready != {k: v for g in self._expiring.values() for k, v in g.items()},
            "the window is wrong": any(group.eligible != (group.sequence <= limit) for group in ready.values()),
            "eligible groups are miscounted": self._eligible_count != sum(g.eligible for g in ready.values()),
            "groups are miscounted by version": any(
                counted != Counter(group.version for group in self._groups.values() if belongs(group))
                for counted, belongs in (
                    (self._unfinished_by_version, lambda group: group.stage in UNFINISHED),
                    (self._ready_by_version, lambda group: group.stage is Stage.READY),
                    (self._eligible_by_version, lambda group: group.stage is Stage.READY and group.eligible),
                )
            ),
            "more places are claimed than there are": self._claimed() > self.policy.capacity,
            "the dispatch budget is overdrawn": self._budget < 0,
        }
        found = [problem for problem, holds in problems.items() if holds]
        if found:
            raise QueueError(f"{'; '.join(found)}: {self.counts}")

    # Inside

    def _find(self, group_id: str, *stages: Stage) -> _Group:
        group = self._groups.get(group_id)
        if group is None:
            raise QueueError(f"group {group_id} is unknown or finished")
        if group.stage not in stages:
            raise QueueError(f"group {group_id} is {group.stage}, the event needs it {' or '.join(stages)}")
        return group

    def _places(self) -> int:
        """Dispatches that admission and the effort bound allow, whatever prompts there are."""
        return min(self._admission.room(self._claimed()), self._budget)

    def _held_back(self, size: int) -> bool:
        """Whether the oldest `size` groups inside the window would leave some unfinished one without its place in time.

        A group of version v may be trained at versions up to v + max_staleness. So for each v, what is left of versions
        up to v must fit the batches from the next version to that one.
        """
        if self.settings.on_late is OnLate.DROP or not self._unfinished:
            return False
        left = unfinished = 0
        for version in sorted(self._unfinished_by_version.keys() | self._ready_by_version.keys()):
            taken = min(size, self._eligible_by_version[version])
            size -= taken
            batches = version + self.policy.max_staleness - self.version
            if batches < 0:  # too late already (versions may jump)
                continue
            unfinished += self._unfinished_by_version[version]
            left += self._unfinished_by_version[version] + self._ready_by_version[version] - taken
            if unfinished and left > batches * self.settings.groups_per_batch:
                return True
        return False

    def _claimed(self) -> int:
        """Places in use: untrained groups, with a batch in training counted as a full one."""
        if not self._training:
            return len(self._groups)
        return len(self._groups) - len(self._training) + self.settings.groups_per_batch

    def _filtered(self, scored: Sequence[Member]) -> str | None:
        """Why the group of these members is set aside, None if it is kept."""
        settings, judgements = self.settings, self._judgements
        values = _filter_values(scored)
        judgements["judged"] += 1
        if max(values) - min(values) <= settings.filter_tolerance:
            judgements["all_right" if sum(values) / len(values) > 0.5 else "all_wrong"] += 1
        if self._equal(values, _rewards(scored)):
            judgements["zero_variance"] += 1
            if settings.filter:
                return "rewards do not differ"
        if (band := settings.pass_rate_band) is not None:
            rate = sum(values) / len(values)
            if not band[0] <= rate <= band[1]:
                judgements["out_of_band"] += 1
                return f"pass rate {rate:.3g} outside [{band[0]:g}, {band[1]:g}]"
        if settings.keep is not None and not settings.keep(scored):
            judgements["not_kept"] += 1
            return "not kept by sampling.keep"
        return None

    def _equal(self, values: Sequence[float], rewards: Sequence[float]) -> bool:
        """Whether a group teaches a group-relative estimator nothing: filter values or total rewards do not differ."""
        tolerance = self.settings.filter_tolerance
        return max(values) - min(values) <= tolerance or max(rewards) - min(rewards) <= tolerance

    def _take(self, group: _Group) -> BatchGroup:
        """Ready to training."""
        bound = self.policy.oldest_trainable(self.version)
        trainable = tuple([index for index, oldest in group.oldest.items() if oldest >= bound])
        if len(trainable) < len(group.oldest):
            excluded = group.oldest.keys() - set(trainable)
            self._judgements["excluded_members"] += len(excluded)
            self._judgements["excluded_tokens"] += sum(group.members[i].response_length for i in excluded)
        self._move(group, Stage.TRAINING)
        return BatchGroup(group.group_id, group.prompt_id, group.epoch, group.members, trainable)

    def _done(self, group: _Group, outcome: Stage, reason: str = "") -> Done:
        self._move(group, outcome)
        self._second_chances.discard((group.prompt_id, group.epoch))
        return Done(group.group_id, group.prompt_id, group.epoch, outcome, reason)

    def _stale(self, group: _Group) -> Command:
        """Set a stale group aside; its prompt gets a second chance, not a third."""
        prompt = (group.prompt_id, group.epoch)
        if prompt in self._second_chances:
            return self._done(group, Stage.STALE, f"over staleness.max={self.policy.max_staleness} twice")
        self._second_chances.add(prompt)
        self._move(group, Stage.STALE)
        return self._offer_again(group)

    def _offer_again(self, group: _Group) -> OfferAgain:
        self._exhausted = False
        return OfferAgain(group.group_id, group.prompt_id, group.epoch)

    def _move(self, group: _Group, stage: Stage) -> None:
        """The only place where a group changes stage."""
        before, group.stage = group.stage, stage
        self._stages[before] -= 1
        self._stages[stage] += 1
        if before in UNFINISHED:
            if stage in UNFINISHED:
                return
            del self._unfinished[group.group_id]
            _decrement(self._unfinished_by_version, group.version)
        elif before is Stage.READY:
            _decrement(self._ready_by_version, group.version)
            if group.eligible:
                self._eligible_count -= 1
                _decrement(self._eligible_by_version, group.version)
            del self._expiring[group.expires][group.group_id]
            if not self._expiring[group.expires]:
                del self._expiring[group.expires]
        else:
            del self._training[group.group_id]
        if stage is Stage.READY:
            self._ready_by_version[group.version] += 1
            heapq.heappush(self._beyond, (group.sequence, group))
            self._expiring.setdefault(group.expires, {})[group.group_id] = group
        elif stage is Stage.TRAINING:
            self._training[group.group_id] = group
        else:
            del self._groups[group.group_id]
        if before in UNFINISHED:  # only then the window moves, or a group comes before it
            self._advance_window()
        self._assert_bounds()

    def _window_limit(self) -> float:
        """The youngest dispatch that may be consumed now."""
        oldest = next(iter(self._unfinished.values()), None)
        return math.inf if oldest is None else oldest.sequence + self._window

    def _advance_window(self) -> None:
        limit = self._window_limit()
        while self._beyond and self._beyond[0][0] <= limit:
            _, group = entry = heapq.heappop(self._beyond)
            if group.stage is Stage.READY:
                group.eligible = True
                self._eligible_count += 1
                self._eligible_by_version[group.version] += 1
                heapq.heappush(self._eligible, entry)

    def _assert_bounds(self) -> None:
        total = sum(self._stages.values())
        if total != self._dispatched or len(self._groups) > self.policy.capacity:
            raise QueueError(f"conservation or admission is broken (capacity {self.policy.capacity}): {self.counts}")


def _decrement(counts: Counter[int], key: int) -> None:
    """Keys at zero are removed."""
    counts[key] -= 1
    if not counts[key]:
        del counts[key]


def _filter_values(scored: Sequence[Member]) -> list[float]:
    """Members without a filter value don't count; where none has one, the total rewards stand in."""
    values = [member.filter_value for member in scored if member.filter_value is not None]
    return values or _rewards(scored)


def _rewards(scored: Sequence[Member]) -> list[float]:
    return [member.reward for member in scored if member.reward is not None]


def _failure(members: Sequence[Member], needed: int) -> str:
    """Why a group of these members can't train."""
    statuses = Counter(member.status.value for member in members)
    empty = sum(member.reward is not None and not member.token_versions for member in members)
    found = ", ".join(f"{count} {status}" for status, count in sorted(statuses.items()))
    return f"{needed} scored members with tokens are needed, got {found}, of them {empty} scored without tokens"
