"""The run: one loop of explicit phases (dispatch, collect, learn, publish) around the sampling queue.

`Run.loop` is the whole algorithm. Groups fly on their own (`orchestrator.dispatcher`: generate, score, tell the queue), so
while the learner works, generation goes on exactly as far as the queue's admission allows: `staleness.max=0` makes the loop
synchronous, more makes it asynchronous, and nothing else differs. Where engines and learner share devices
(`placement.mode=shared`) they take turns: what is being written is parked while the learner works.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

from orchestrator.batching import LearningPlan, plan_learning
from orchestrator.checkpoint import Cadence, Checkpoint, CheckpointStore, restore_rng, rng_state
from orchestrator.cluster import Cluster
from orchestrator.coefficients import CoefficientControl
from orchestrator.console import Console, ConsoleState, QueueView, Sample
from orchestrator.derived import prefix_sharing, probe_texts, queue_settings
from orchestrator.difficulty import DifficultySampler, PassRates
from orchestrator.dispatcher import Dispatcher
from orchestrator.evaluation import Evaluator, SetResult, metrics_of
from orchestrator.fleet import BroadcastReport
from orchestrator.journal import JOURNAL, write_outcomes
from orchestrator.prepare import Prepared
from orchestrator.probe import Probe
from orchestrator.prompts import PromptStream
from orchestrator.reporting import BatchReport, queue_gauges
from orchestrator.resume import model_state
from orchestrator.sampling_queue import SamplingQueue
from orchestrator.sampling_types import Batch, OnStarved, Starvation
from orchestrator.sinks import Recorder, WandbSink
from orchestrator.skipped import SkippedUpdates
from orchestrator.staleness import AdaptiveBound
from orchestrator.watcher import Watcher

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Starved(RuntimeError):
    """The data can't fill a batch and sampling.on_starved=error."""


class NoProgress(RuntimeError):
    """Nothing happened for run.watchdog_s; the message is a dump of the queue."""


class Run:
    """One process's part of a run: from a fresh start or a checkpoint to its end."""

    def __init__(
        self,
        prepared: Prepared,
        cluster: Cluster,
        *,
        folder: Path,
        lineage: int,
        checkpoint: Checkpoint | None,
        store: CheckpointStore,
        recorder: Recorder,
        wandb: WandbSink,
        console: Console,
        changed: asyncio.Event,
    ) -> None:
        assert cluster.learner is not None
        config = prepared.config
        self.config = config
        self.folder = folder
        self.lineage = lineage
        self.rollouts, self.rewards, self.learner = cluster.rollouts, cluster.rewards, cluster.learner
        self.clerks = cluster.clerks
        self.recorder, self.wandb, self.console, self.store = recorder, wandb, console, store
        self.checkpoint = checkpoint
        self.pass_rates = PassRates(config.sampling.difficulty.memory)
        sampler = DifficultySampler.from_config(config, self.pass_rates)
        self.prompts = PromptStream.from_config(prepared.train, config.data, sampler)
        settings = queue_settings(config)
        self.queue = SamplingQueue(settings)
        if checkpoint is not None:
            self.queue = SamplingQueue.restore(checkpoint.run_state["queue"], settings)
            self.prompts.restore(checkpoint.run_state["prompts"])
            self.pass_rates.restore(checkpoint.run_state["pass_rates"])
            restore_rng(checkpoint.run_state["rng"])
        state = checkpoint.run_state if checkpoint is not None else {}
        self.evaluated: int | None = state.get("evaluated")
        self.saved: int | None = checkpoint.version if checkpoint else None
        self.evaluations: list[SetResult] = []
        self.evaluator = None
        if cluster.checker is not None:
            self.evaluator = Evaluator(
                config, prepared.evaluation, self.rollouts, cluster.checker, cluster.clerks, folder / "eval"
            )
        e, c = config.eval, config.checkpoint
        self.eval_cadence = Cadence(e.every_batches, e.at_start, e.at_end)
        self.save_cadence = Cadence(c.every_batches, at_start=False, at_end=c.every_batches > 0)
        self.probe = Probe(
            probe_texts(prepared),
            self.learner,
            self.rollouts,
            dtype=config.model.dtype,
            max_gap=config.rollout.weights.probe_max_gap,
        )
        self.share_prefixes = prefix_sharing(prepared)
        self.placement = cluster.placement
        self.report = BatchReport(prepared.filter_on, self.queue.counts)
        self.watcher = Watcher(
            config,
            prepared.rewards.primary,
            cluster.watch,
            self.clerks,
            state=state.get("watch"),
            start_task=lambda work: self.tasks.create_task(work),
            alert=wandb.alert,
        )
        self.changed = changed  # something happened that the loop may be waiting for
        self.dispatcher = Dispatcher(
            config,
            self.queue,
            self.prompts,
            self.rollouts,
            self.rewards,
            self.clerks,
            self.report,
            self.pass_rates,
            self.watcher,
            self.learner.reference,
            filter_on=prepared.filter_on,
            lineage=lineage,
            start_task=lambda work: self.tasks.create_task(work),
            changed=changed.set,
        )
        self.flights = self.dispatcher.flights
        self.bound = self._adaptive_bound(state.get("bound"))
        self.coefficients = CoefficientControl(config.algorithm)
        if checkpoint is not None:
            self.coefficients.restore(state["coefficients"])
        self.skipped = SkippedUpdates(folder, config.learner.max_skipped_updates)
        self.metrics: dict[str, Any] = {}
        self.sample: Sample | None = None

    def _adaptive_bound(self, state: dict[str, Any] | None) -> AdaptiveBound | None:
        s = self.config.staleness
        if not s.adaptive:
            return None
        bound = AdaptiveBound(s.max, min_ess=s.min_ess, max_kl=s.max_mismatch_kl, patience=s.patience_batches)
        if state is not None:
            bound.restore(state)
        self.queue.run_ahead(bound.versions)
        return bound

    @property
    def version(self) -> int:
        return self.queue.version

    async def execute(self) -> None:
        """Bring engines and learner to one version, train, and leave `model/`, and with LoRA `adapter/`."""
        if self.checkpoint is not None:
            await self.learner.load(self.checkpoint.path)
            await self.rollouts.broadcast(self.learner, self.version)
            logger.info("resumed at version %d", self.version)
        await self.probe.begin()
        if self.config.rollout.weights.canary:
            self._show("canary")
            await self.probe.canary(lambda: self.rollouts.broadcast(self.learner, self.version), self.config.run.seed)
        await self.train()
        await self._export("model", self.learner.export_model)
        if self.config.model.lora.rank:
            await self._export("adapter", self.learner.export_adapter)

    async def train(self) -> None:
        """The loop, together with all that it starts. The probe has begun, and engines and learner are at one version."""
        try:
            async with asyncio.TaskGroup() as self.tasks:
                try:
                    await self.loop()
                finally:
                    self.dispatcher.stop()
                    self.watcher.stop()
        except BaseExceptionGroup as group:
            # One cause is enough for a person; a group's failure cancels everything else.
            raise _first(group) from group

    async def loop(self) -> None:
        await self._evaluate_if_due()
        while self.version < self.config.run.batches:
            with self.report.phase("collect"):
                batch = await self._collect()
            if batch is None:
                break
            async with self._learners_turn():
                with self.report.phase("learn"):
                    plan, learned = await self._learn(batch)
                with self.report.phase("publish"):
                    broadcast = await self._publish(batch)
            await self._record(batch, plan, learned, broadcast)
            ended = self.version >= self.config.run.batches  # evaluated before it is saved: a resume repeats nothing
            await self._evaluate_if_due(ended=ended)
            await self._save_if_due(ended=ended)
        await self._evaluate_if_due(ended=True)
        await self._save_if_due(ended=True)
        self._write_outcomes()

    # Dispatch and collect

    async def _collect(self) -> Batch | None:
        """The next batch; None when the data can't fill one and the run is to stop."""
        self._show("collect")
        while True:
            self.dispatcher.dispatch()
            await self._attend()
            shrink = self.config.sampling.on_starved == "shrink"
            if (batch := self.queue.take_batch(shrink=shrink)) is not None:
                return batch
            if (starvation := self.queue.starvation()) is not None:
                self._give_up(starvation)
                return None
            self._show("collect")
            with self.report.phase("late") if self.queue.waits_for_late() else nullcontext():
                try:
                    await asyncio.wait_for(self.changed.wait(), self.config.run.watchdog_s)
                except TimeoutError as error:
                    raise NoProgress(self._dump()) from error
            self.changed.clear()

    async def _attend(self) -> None:
        """Let engines that came back serve again. The learner must be idle: its weights are then this version's."""
        self.rollouts.check()
        if self.rollouts.awaiting_weights:
            await self.rollouts.broadcast(self.learner, self.version)

    async def _attended(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of work that needs the engines while the loop does nothing else."""
        task = self.tasks.create_task(work)
        task.add_done_callback(lambda _: self.changed.set())
        while not task.done():
            await self._attend()
            await self.changed.wait()
            self.changed.clear()
        return task.result()

    def _give_up(self, starvation: Starvation) -> None:
        if starvation.action is OnStarved.ERROR:
            self._write_outcomes()
            raise Starved(str(starvation))
        logger.warning("the run ends early. %s", starvation)

    def _dump(self) -> str:
        oldest = "\n".join(f"  {group}: prompt {prompt}, {stage}" for group, prompt, stage in self.queue.oldest())
        return (
            f"no progress for run.watchdog_s={self.config.run.watchdog_s:.0f} s at version {self.version}.\n"
            f"{self.queue.counts}\noldest unfinished groups:\n{oldest}"
        )

    # Learn and publish

    @asynccontextmanager
    async def _learners_turn(self) -> AsyncIterator[None]:
        """Where the learner shares its devices with the engines, these write nothing meanwhile."""
        if not self.placement.shared:
            yield
            return
        with self.report.phase("park"):
            await self._attended(self.dispatcher.ground())
        try:
            yield
        finally:
            self.dispatcher.clear()

    async def _learn(self, batch: Batch) -> tuple[LearningPlan, Any]:
        """All optimizer updates of a batch; its journal is written meanwhile."""
        self._show("learn")
        plan = plan_learning(
            self.config,
            batch,
            self.flights,
            ranks=len(self.learner),
            share_prefixes=self.share_prefixes,
            coefficients=self.coefficients.of_batch,
        )
        payloads = [self.flights[group.group_id].payload for group in batch.groups]
        references = [self.flights[group.group_id].reference for group in batch.groups]
        step_before = self.learner.optimizer_step
        if self.placement.engines_sleep:
            await self.rollouts.sleep()
        reports, tally, logprobs = await self.learner.learn(plan.ranks, payloads, references)
        if self.placement.engines_sleep:
            await self.rollouts.wake()
        self.skipped.note(self.version, reports)
        rows = self._journal_rows(batch, plan, step_before, reports[0].optimizer_step)
        self.journaled = self.tasks.create_task(
            self.clerks.write_journal(
                str(self.folder / JOURNAL), self.lineage, batch.version, rows, logprobs, payloads
            ),
            name="journal",
        )
        return plan, (reports, tally)

    def _journal_rows(self, batch: Batch, plan: LearningPlan, step_start: int, step_end: int) -> list[dict[str, Any]]:
        in_loss = {(row.group_id, row.index) for row in plan.rows}
        r = self.config.rollout
        extra = {
            "optimizer_step_start": step_start,
            "optimizer_step_end": step_end,
            "temperature": r.temperature,
            "sampling": {"max_response_tokens": r.max_response_tokens},
            "trained_at": time.time(),
            "kl_coefficient": self.coefficients.of_batch.kl,
            "entropy_coefficient": self.coefficients.of_batch.entropy,
        }
        return [
            self.flights[group.group_id].journal_row(
                index,
                payload=number,
                trained=(group.group_id, index) in in_loss,
                advantage=plan.advantages.get((group.group_id, index)),
                extra=extra,
            )
            for number, group in enumerate(batch.groups)
            for index in self.flights[group.group_id].answered
        ]

    async def _publish(self, batch: Batch) -> BroadcastReport:
        """Give the new weights to every engine; acknowledged, they are the next version."""
        self._show("publish")
        self.sample = await self._sample(batch)
        broadcast = await self.rollouts.broadcast(self.learner, self.version + 1)
        await self.journaled
        self.dispatcher.acknowledged(self.version + 1)
        # The outcomes decided so far belong to the batch that led here; see the journal's third invariant.
        write_outcomes(self.folder / JOURNAL, self.lineage, batch.version, self.dispatcher.take_outcomes())
        self.probed = await self.probe.compare(self.version)
        return broadcast

    async def _sample(self, batch: Batch) -> Sample:
        """One answer of the batch, to look at."""
        flight = self.flights[batch.groups[0].group_id]
        texts = await self.clerks.completions(flight.payload)
        question = flight.prompt.messages[-1].get("content")
        return Sample(str(question), texts[0], flight.results[flight.answered[0]].value)

    # Evaluation, checkpoints, records

    async def _evaluate_if_due(self, *, ended: bool = False) -> None:
        if self.evaluator is None or not self.eval_cadence.due(self.version, self.evaluated, ended=ended):
            return
        self._show("eval")
        with self.report.phase("eval"):
            self.evaluations = await self._attended(self.evaluator.run(self.version))
        self.evaluated = self.version
        self._forget("eval/")  # without verdicts there is no pass rate, and an older one must not stand for it
        self._log(metrics_of(self.evaluations))
        for result in self.evaluations:
            logger.info("version %d, %s: %s", self.version, result.name, result.figure)
            self.wandb.log_table(
                self.version,
                f"eval/{result.name}/samples",
                ["prompt", "completion", "passed"],
                [
                    [str(a.prompt.messages[-1].get("content")), text, str(passed)]
                    for a in result.answered[: self.config.eval.samples]
                    for text, passed in zip(a.texts, a.passed, strict=True)
                ],
            )

    async def _save_if_due(self, *, ended: bool = False) -> None:
        if not self.save_cadence.due(self.version, self.saved, ended=ended):
            return
        self._show("checkpoint")
        with self.report.phase("checkpoint"), self.store.saving(self.version) as staging:
            # One snapshot, with no await inside: what the frontier counts as done is in the journal.
            if outcomes := self.dispatcher.take_outcomes():
                write_outcomes(self.folder / JOURNAL, self.lineage, self.version - 1, outcomes, shard=1)
            state = {
                "model": model_state(self.config),
                "queue": self.queue.state(),
                "prompts": self.prompts.state(),
                "pass_rates": self.pass_rates.state(),
                "rng": rng_state(),
                "bound": None if self.bound is None else self.bound.state(),
                "coefficients": self.coefficients.state(),
                "evaluated": self.evaluated,
                "watch": self.watcher.state(),
            }
            names = await self.learner.save(staging)
            await asyncio.to_thread(self.store.commit, self.version, state, names)
        self.saved = self.version
        logger.info("checkpoint at version %d", self.version)

    def _write_outcomes(self) -> None:
        """Those of no batch, and of no checkpoint: a run that goes on from the last one fences them, and decides them anew."""
        if outcomes := self.dispatcher.take_outcomes():
            write_outcomes(self.folder / JOURNAL, self.lineage, self.version, outcomes)

    async def _record(self, batch: Batch, plan: LearningPlan, learned: Any, broadcast: BroadcastReport) -> None:
        reports, tally = learned
        lengths = [row.response_length for row in plan.rows]
        values = self.report.values(self.queue, batch, lengths, reports, tally, broadcast, self.probed)
        values["staleness/bound"] = self.config.staleness.max
        if self.bound is not None:
            values["staleness/bound"] = self.bound.versions
            if "mismatch/ess" in values:
                self.queue.run_ahead(self.bound.observe(values["mismatch/ess"], values["mismatch/kl"]))
        values |= self.coefficients.metrics()
        self.coefficients.observe(values, len(plan.rows))
        self._forget("staleness/share/")  # of this batch's histogram alone; a staleness that no answer has is absent
        values |= self.rollouts.metrics() | self.prompts.metrics() | self.pass_rates.metrics()
        self._log(values | self.watcher.close_batch())
        self._show("collect")
        self.watcher.sound()

    def _forget(self, prefix: str) -> None:
        self.metrics = {name: value for name, value in self.metrics.items() if not name.startswith(prefix)}

    def _log(self, values: dict[str, float]) -> None:
        record = self.recorder.log(self.version, values)
        self.metrics |= {name: value for name, value in record.items() if value is not None}

    def _show(self, phase: str) -> None:
        counts = {name.removeprefix("queue/"): int(n) for name, n in queue_gauges(self.queue.counts).items()}
        queue = QueueView(counts, self.queue.settings.policy.capacity)
        for group_id, prompt_id, stage in self.queue.oldest(1):
            age_s = time.time() - self.flights[group_id].dispatched_at
            queue = dataclasses.replace(queue, oldest=f"{group_id} (prompt {prompt_id}) {stage}", oldest_s=age_s)
        self.console.update(
            ConsoleState(version=self.version, phase=phase, queue=queue, metrics=dict(self.metrics), sample=self.sample)
        )

    async def _export(self, name: str, export: Callable[[Path], Awaitable[None]]) -> None:
        """A folder of results: whole, or not there."""
        target, part = self.folder / name, self.folder / f"{name}.part"
        self._show(name)
        if part.exists():  # of a process that was killed
            shutil.rmtree(part)
        await export(part)
        if target.exists():
            shutil.rmtree(target)
        part.rename(target)


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first failure: a task group holds no cancellations, and what came later came of it."""
    while isinstance(group.exceptions[0], BaseExceptionGroup):
        group = group.exceptions[0]
    return group.exceptions[0]
