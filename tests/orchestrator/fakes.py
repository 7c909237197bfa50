"""A run's parts on one event loop: actors without Ray, engines and a learner without a model.

`LocalActor` gives a plain object the shape of a Ray actor handle (`.method.options(...).remote(...)`), so the real fleets
drive the fakes. Weights are one number: a logprob is minus one plus that number, for engines and learner alike, which
lets probe, canary and manifest do their work. Rewards depend on prompt and member only, so a repeated run decides alike.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import json
import time
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ray.exceptions import RayActorError, RayError, RayTaskError

from learner.batch import RankPlan
from learner.tally import Tally
from learner.worker import LearnReport
from orchestrator.checkpoint import CheckpointStore
from orchestrator.clerks import Clerk, ClerkFleet
from orchestrator.compose import load
from orchestrator.config import Config, SourceConfig
from orchestrator.fleet import RolloutFleet
from orchestrator.journal import JOURNAL, begin_lineage
from orchestrator.placement import plan
from orchestrator.prepare import Prepared
from orchestrator.prompts import load_sources
from orchestrator.reward_fleet import RewardFleet
from orchestrator.sinks import Record, Recorder
from reward_workers.alarm import ErrorAlarm
from reward_workers.reward import RewardSet
from rollout_workers.engine import PARKED, UpdateReport
from rollout_workers.trajectory import RewardResult, Trajectory, VersionSpan
from rollout_workers.weights.manifest import Manifest, TensorRecord
from rollout_workers.worker import MemberReport, RolloutReport, RolloutRequest

PROMPT_TOKENS, ANSWER_TOKENS = 3, 4


# Ray's shape


@dataclass(frozen=True)
class Reference:
    """Like an object reference: can be awaited more than once, or passed on without being awaited."""

    actor: LocalActor
    task: asyncio.Future[Any]
    position: int | None = None

    def __await__(self) -> Generator[Any, None, Any]:
        try:
            value = yield from asyncio.shield(self.task).__await__()
        except asyncio.CancelledError:
            if self.actor.dead and self.task.cancelled():
                raise RayActorError from None
            raise
        return value if self.position is None else value[self.position]


class LocalActor:
    """A handle of `worker`. Once it is killed, calls under way and later ones raise RayActorError."""

    def __init__(self, worker: Any) -> None:
        self.worker = worker
        self.dead = False
        self.calls: set[asyncio.Task[Any]] = set()

    def __getattr__(self, name: str) -> LocalMethod:
        return LocalMethod(self, getattr(self.worker, name))

    def kill(self) -> None:
        self.dead = True
        for call in self.calls:
            call.cancel()


@dataclass(frozen=True)
class LocalMethod:
    actor: LocalActor
    function: Callable[..., Any]
    num_returns: int = 1

    def options(self, num_returns: int) -> LocalMethod:
        return LocalMethod(self.actor, self.function, num_returns)

    def remote(self, *arguments: Any, **named: Any) -> Any:
        task = asyncio.ensure_future(self._call(arguments, named))
        self.actor.calls.add(task)
        task.add_done_callback(self.actor.calls.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # some are waited for by nobody
        if self.num_returns == 1:
            return Reference(self.actor, task)
        return [Reference(self.actor, task, position) for position in range(self.num_returns)]

    async def _call(self, arguments: Sequence[Any], named: dict[str, Any]) -> Any:
        if self.actor.dead:
            raise RayActorError
        try:
            resolved = [await a if isinstance(a, Reference) else a for a in arguments]
        except RayError as error:  # an argument is gone
            raise RayTaskError(self.function.__name__, str(error), error).as_instanceof_cause() from error
        value = self.function(*resolved, **named)
        return await value if inspect.isawaitable(value) else value


def patch_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """`ray.kill` and `ray.cancel` for local actors."""
    monkeypatch.setattr("ray.kill", LocalActor.kill)
    monkeypatch.setattr("ray.cancel", lambda reference: reference.task.cancel())


# Workers


def manifest_of(version: int, weights: float) -> Manifest:
    return Manifest(version, (TensorRecord("model.w", "float32", (1,), checksum(weights)),))


def checksum(weights: float) -> int:
    return round(weights * 1e6) & 0xFFFF_FFFF


def logprobs_of(sequences: Sequence[Sequence[int]], weights: float) -> list[np.ndarray]:
    return [np.full(len(ids) - 1, -1.0 + weights) for ids in sequences]


@dataclass
class FakeEngine:
    """A rollout worker. `delay_s(request)` is how long it writes; an answer spans the versions it was written under.

    A member that is parked has `parked_tokens` more than before, but is never whole.
    """

    delay_s: Callable[[RolloutRequest], float] = lambda request: 0.0
    parked_tokens: int = 1
    slow: Callable[[RolloutRequest, int], bool] = lambda request, index: True  # members not whole yet when it is parked
    truncated: bool = False
    fails: Callable[[RolloutRequest, int], bool] = lambda request, index: False  # whether a member fails
    version: int = -1
    weights: float = 0.0
    spool: float = 0.0
    requests: list[RolloutRequest] = field(default_factory=list)
    log: list[tuple[str, int]] = field(default_factory=list)  # (what, version)
    writing: list[tuple[RolloutRequest, asyncio.Event]] = field(default_factory=list)  # the event: it is parked

    async def start(self, version: int) -> int:
        self.version = version
        return 0

    async def generate(
        self, request: RolloutRequest, *partials: Sequence[Trajectory]
    ) -> tuple[RolloutReport, tuple[Trajectory, ...]]:
        self.requests.append(request)
        self.log.append(("generate", self.version))
        began, first = time.time(), self.version
        parked = await self._write(request)
        begun = {answer.index: answer for payload in partials for answer in payload}
        members: list[MemberReport] = []
        answers: list[Trajectory] = []
        for index in request.indexes:
            if self.fails(request, index):
                members.append(MemberReport(index, error="TimeoutError: too slow"))
                continue
            answer = self._continued(request, index, begun.get(index), first, parked and self.slow(request, index))
            counts = tuple((span.version, span.end - span.start) for span in answer.version_spans)
            unfinished = answer.finish_reason == PARKED
            members.append(
                MemberReport(
                    index,
                    counts,
                    answer.response_length,
                    PROMPT_TOKENS,
                    truncated=self.truncated and not unfinished,
                    parked=unfinished,
                )
            )
            if members[-1].in_payload:
                answers.append(answer)
        return RolloutReport(tuple(members), began, time.time()), tuple(answers)

    async def _write(self, request: RolloutRequest) -> bool:
        """Take the time that it takes; whether it was parked."""
        entry = (request, asyncio.Event())
        self.writing.append(entry)
        try:
            await asyncio.wait_for(entry[1].wait(), self.delay_s(request))
        except TimeoutError:
            return False
        finally:
            self.writing.remove(entry)
        return True

    def _continued(
        self, request: RolloutRequest, index: int, partial: Trajectory | None, first: int, parked: bool
    ) -> Trajectory:
        if partial is not None and partial.finish_reason != PARKED:
            return partial
        counts = {s.version: s.end - s.start for s in partial.version_spans} if partial is not None else {}
        left = ANSWER_TOKENS - sum(counts.values())
        count = min(self.parked_tokens, left - 1) if parked else left
        late = 0 if parked or self.version == first else left // 2
        for version, written in ((first, count - late), (self.version, late)):
            if written:
                counts[version] = counts.get(version, 0) + written
        return answer_of(request, index, counts, PARKED if parked else "stop")

    async def park(self, group_ids: Sequence[str]) -> int:
        self.log.append(("park", self.version))
        met = [(request, parked) for request, parked in self.writing if request.group_id in group_ids]
        count = sum(len(request.indexes) for request, parked in met if not parked.is_set())
        for _, parked in met:
            parked.set()
        return count

    async def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[np.ndarray]:
        return logprobs_of(sequences, self.weights)

    async def add_bucket(self, bucket: float) -> None:
        self.spool = bucket

    async def update(self, version: int) -> UpdateReport:
        self.weights, self.version = self.spool, version
        self.log.append(("update", version))
        return UpdateReport(version, {"model.w": checksum(self.weights)}, pause_s=0.01)

    async def sleep(self) -> None:
        self.log.append(("sleep", self.version))

    async def wake(self) -> None:
        self.log.append(("wake", self.version))

    async def close(self) -> None:
        pass


def answer_of(request: RolloutRequest, index: int, counts: dict[int, int], finish_reason: str = "stop") -> Trajectory:
    """`counts` are sampled tokens by version, in order."""
    mask = np.array([False] * PROMPT_TOKENS + [True] * sum(counts.values()))
    spans, start = [], PROMPT_TOKENS
    for version, count in counts.items():
        spans.append(VersionSpan(start, start + count, version))
        start += count
    return Trajectory(
        group_id=request.group_id,
        index=index,
        prompt_id=request.prompt_id,
        messages=(*request.messages, {"role": "assistant", "content": f"answer {index}"}),
        token_ids=np.arange(len(mask), dtype=np.int32),
        response_mask=mask,
        behaviour_logprobs=np.where(mask, -1.0, 0.0).astype(np.float32),
        version_spans=tuple(spans),
        finish_reason=finish_reason,
    )


RewardRule = Callable[[Trajectory], float | RewardResult | None]


def hash_reward(trajectory: Trajectory) -> float:
    """0 or 1, by prompt and member: with groups of two, about half of the prompts have equal rewards."""
    return float(hashlib.sha256(f"{trajectory.prompt_id}/{trajectory.index}".encode()).digest()[0] % 2)


def index_reward(trajectory: Trajectory) -> float:
    """Differs in every group."""
    return float(trajectory.index % 2)


@dataclass
class FakeJudge:
    """A reward worker."""

    rule: RewardRule = index_reward

    async def start(self) -> None:
        pass

    async def score_group(
        self, trajectories: Sequence[Trajectory], columns: Any, names: Any, text: str | None, given: Any = None
    ) -> list[RewardResult]:
        verdicts = [self.rule(trajectory) for trajectory in trajectories]
        return [v if isinstance(v, RewardResult) else RewardResult(v, components={"reward": v}) for v in verdicts]

    async def close(self) -> None:
        pass


class FakeLearner:
    """A learner group of one rank. A batch moves its weights by 0.1; `dies_at` is a version it can't learn at."""

    reference: Any = None  # stands for reference actors

    def __init__(self, *, learn_s: float = 0.0, dies_at: int | None = None) -> None:
        self.weights = 0.0
        self.optimizer_step = 0
        self.loaded: list[Path] = []
        self.batches: list[list[str]] = []  # group ids
        self._learn_s = learn_s
        self._dies_at = dies_at
        self._before_perturbation = 0.0

    def __len__(self) -> int:
        return 1

    async def learn(
        self, plans: Sequence[RankPlan], payloads: Sequence[Any], references: Sequence[Any] | None = None
    ) -> tuple[list[LearnReport], Tally, Any]:
        if len(self.batches) == self._dies_at:
            raise Killed
        await asyncio.sleep(self._learn_s)
        groups = [await payload for payload in payloads]
        self.batches.append([group[0].group_id for group in groups])
        rows = [row for update in plans[0].updates for micro in update for packed in micro for row in packed]
        for row in rows:
            trajectory = groups[row.payload][row.position]
            assert (trajectory.group_id, trajectory.index) == (row.group_id, row.index)
        self.weights += 0.1
        updates = len(plans[0].updates) * plans[0].epochs
        self.optimizer_step += updates
        report = LearnReport({}, {}, (1.0,) * updates, (1e-6,) * updates, (), self.optimizer_step, 0, 0)
        return [report], Tally(), [{(r.group_id, r.index): np.full(r.response_length, -1.0) for r in rows}]

    async def export_weights(self, version: int) -> AsyncIterator[Any]:
        yield self.weights
        yield manifest_of(version, self.weights)

    async def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[np.ndarray]:
        return logprobs_of(sequences, self.weights)

    async def perturb(self, scale: float, seed: int) -> None:
        self._before_perturbation = self.weights
        self.weights += 5 * scale

    async def restore(self) -> None:
        self.weights = self._before_perturbation

    async def save(self, folder: Path) -> list[str]:
        (folder / "learner.json").write_text(json.dumps([self.weights, self.optimizer_step]))
        return ["learner.json"]

    async def load(self, folder: Path) -> None:
        self.loaded.append(folder)
        self.weights, self.optimizer_step = json.loads((folder / "learner.json").read_text())

    async def export_model(self, folder: Path) -> None:
        await asyncio.to_thread(folder.mkdir)
        (folder / "weights").write_text(str(self.weights))

    async def export_adapter(self, folder: Path) -> None:
        await self.export_model(folder)


class Killed(RuntimeError):
    """Ends a run as kill -9 would, as far as its files can tell."""


# Fleets and the run


def rollout_fleet(
    engines: Callable[[int], FakeEngine], count: int = 1, *, on_change: Callable[[], None] = lambda: None, **limits: Any
) -> RolloutFleet:
    """`engines(index)` makes the worker of each actor that is started."""
    settings = {"start_timeout_s": 5.0, "weights_timeout_s": 5.0, "max_restarts": 3}
    return RolloutFleet(
        lambda index: LocalActor(engines(index)),
        count,
        transport="shared_memory",
        workers_per_engine=1,
        on_change=on_change,
        **(settings | limits),
    )


def reward_fleet(rules: Sequence[RewardRule], *, deadline_s: float = 5.0, tries: int = 2) -> RewardFleet:
    """One actor for each rule."""
    actors = [LocalActor(FakeJudge(rule)) for rule in rules]
    return RewardFleet(actors, deadline_s=deadline_s, tries=tries, alarm=ErrorAlarm(1.0))


class FakeChat:
    def prompt_ids(self, messages: Sequence[Any]) -> list[int]:
        return list(range(PROMPT_TOKENS))


class FakeConsole:
    def __init__(self) -> None:
        self.states: list[Any] = []

    def update(self, state: Any) -> None:
        self.states.append(state)


class FakeWandb:
    def __init__(self) -> None:
        self.alerts: list[tuple[str, str]] = []

    def log_table(self, *arguments: Any) -> None:
        pass

    def alert(self, title: str, text: str) -> None:
        self.alerts.append((title, text))


class Records:
    """A sink that keeps everything."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def write(self, record: Record) -> None:
        self.records.append(record)

    def close(self, failed: bool) -> None:
        pass


def fake_config(*overrides: str) -> Config:
    """Two groups of two answers a batch, four batches, no evaluation, no checkpoints."""
    return load(
        [
            "experiment=tiny",
            "data.eval={}",
            "run.batches=4",
            "run.watchdog_s=5",
            "reward.timeout_s=0.1",
            "rollout.answer_timeout_s=0.1",  # the actors of these tests keep no deadline; the fleet adds its own slack
            "sampling.groups_per_batch=2",
            "sampling.answers_per_group=2",
            "checkpoint.every_batches=0",
            *overrides,
        ]
    )


@dataclass
class FakeRun:
    """One start of a run in `folder`. `prompts` is the number of rows; `evaluations` that of held-out ones."""

    folder: Path
    config: Config
    prompts: int = 64
    held_out: int = 0
    engine: Callable[[int], FakeEngine] = lambda index: FakeEngine()
    rule: RewardRule = index_reward
    watch_judge: FakeJudge | None = None  # the checker beside the rewards
    learner: FakeLearner = field(default_factory=FakeLearner)
    resume: bool = False
    records: Records = field(default_factory=Records)
    console: FakeConsole = field(default_factory=FakeConsole)
    wandb: FakeWandb = field(default_factory=FakeWandb)
    engines: list[FakeEngine] = field(default_factory=list)
    actors: list[LocalActor] = field(default_factory=list)
    most_untrained: int = 0

    def execute(self) -> FakeRun:
        """Run to the end; raises what the run raises."""
        asyncio.run(asyncio.wait_for(self._execute(), 30))
        return self

    async def _execute(self) -> None:
        from orchestrator.run import Run

        changed = asyncio.Event()
        r = self.config.rollout
        self.placement = plan(self.config, [{"CPU": 4.0, "GPU": 4.0 if self.config.placement.device == "gpu" else 0.0}])
        self.rollouts = RolloutFleet(
            self._actor,
            r.replicas,
            transport="shared_memory",
            workers_per_engine=1,
            start_timeout_s=5.0,
            weights_timeout_s=5.0,
            max_restarts=r.max_restarts,
            on_change=changed.set,
        )
        self.rewards = reward_fleet([self.rule])
        self.checker = reward_fleet([self.rule]) if self.held_out else None
        self.watch = None
        if self.watch_judge is not None:
            watching = LocalActor(self.watch_judge)
            self.watch = RewardFleet([watching], deadline_s=5.0, tries=2, alarm=ErrorAlarm(0.0)).lenient()
        self.clerks = ClerkFleet([LocalActor(Clerk())], 5.0)
        store = CheckpointStore(self.folder / "checkpoints", keep=2)
        checkpoint = store.latest() if self.resume else None
        lineage = begin_lineage(self.folder / JOURNAL, checkpoint.version if checkpoint else None)
        await self.rollouts.start(0)
        with Recorder([self.records], lineage=lineage) as recorder:
            self.run = Run(
                self._prepared(),
                self,  # type: ignore[arg-type]
                folder=self.folder,
                lineage=lineage,
                checkpoint=checkpoint,
                store=store,
                recorder=recorder,
                wandb=self.wandb,  # type: ignore[arg-type]
                console=self.console,  # type: ignore[arg-type]
                changed=changed,
            )
            await self.run.execute()

    def _actor(self, index: int) -> LocalActor:
        engine = self.engine(index)
        written = engine.delay_s

        def watched(request: RolloutRequest) -> float:
            self.most_untrained = max(self.most_untrained, self.run.queue.counts.untrained)
            self.run.queue.check()
            return written(request)

        engine.delay_s = watched
        self.engines.append(engine)
        self.actors.append(LocalActor(engine))
        return self.actors[-1]

    def _prepared(self) -> Prepared:
        def rows(**options: Any) -> SourceConfig:
            return SourceConfig(generator="orchestrator.tasks.synthetic", options=options)

        train = {"main": rows(size=self.prompts)}
        held_out = {"held_out": rows(size=self.held_out, split="eval")}

        def reward(completion: str) -> float:
            raise AssertionError("the fake judges decide")

        return Prepared(
            self.config,
            "none",
            FakeChat(),  # type: ignore[arg-type]
            load_sources(train, "train"),
            load_sources(held_out, "eval") if self.held_out else [],
            RewardSet.of(reward),
            RewardSet.of(reward) if self.held_out else None,
        )

    def values(self, name: str) -> list[float]:
        """A metric's values in the order of their records."""
        return [value for record in self.records.records if (value := record.get(name)) is not None]

    def versions_of(self, name: str) -> list[int]:
        """The versions at which a metric was recorded."""
        return [int(record["policy_version"] or 0) for record in self.records.records if name in record]
