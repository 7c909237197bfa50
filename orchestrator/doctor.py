"""`headway doctor`: the chain rollout -> reward -> learner -> weights, tried out on a run's own model, cluster and configuration.

Contract:
- Everything is the run's own: actors, model, prompts, reward functions, objective and placement; what little differs is in
  `orchestrator.doctor_command.for_doctor`.
- The batches are a run like any other, in `run/` of the doctor's folder: with a journal, metrics and versions. Most checks
  read what it wrote down; the others ask the learner. What is concluded is in `orchestrator.doctor_checks`.
- A part that fails is a failed check, and the checks that need it are skipped: the rest is still told. Only what stops the
  actors from starting ends the doctor with an error.
- The learner's state is saved before anything is learned and loaded before every throw-away update, so none of them sees
  another's optimizer state.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from omegaconf import OmegaConf
from ray.exceptions import RayError

from orchestrator import doctor_checks as checks
from orchestrator.algorithm import per_token
from orchestrator.checkpoint import CheckpointStore
from orchestrator.config import Config
from orchestrator.console import Console
from orchestrator.derived import prefix_sharing, probe_texts, queue_settings
from orchestrator.doctor_answers import answer_of, fullest, longest_answers, own_behaviour, update_on
from orchestrator.doctor_checks import Check, Verdict
from orchestrator.doctor_command import BATCHES
from orchestrator.durable import bytes_free, whole_file
from orchestrator.fleet import BroadcastReport
from orchestrator.journal import JOURNAL, begin_lineage, read_outcomes
from orchestrator.memory import learner_memory
from orchestrator.model_shape import ModelShape
from orchestrator.prepare import Prepared
from orchestrator.probe import Probe
from orchestrator.prompts import Prompt
from orchestrator.replay import plan_of, replay_batch, score
from orchestrator.replay_journal import RecordedBatch, read_batch, recorded_versions
from orchestrator.run import Run
from orchestrator.sinks import JsonlSink, Recorder, WandbSink
from rollout_workers.trajectory import Trajectory

if TYPE_CHECKING:
    from orchestrator.cluster import Cluster

logger = logging.getLogger(__name__)

RUN = "run"  # folder within the doctor's
DIRECTION_UPDATES = 4  # one alone may move less than bfloat16's rounding does
TEMPERATURE_TOKENS = (
    512  # with their prompts, scored at every temperature: a few hundred sampled ones fit it to a percent
)
PART_FAILED = (RuntimeError, ValueError, OSError, RayError)


class Doctor:
    """Examines a cluster that was just started with `prepared`, which is of `for_doctor`.

    `asked` is the configuration that the user gave, `changed` the event of the cluster's `on_change`.
    """

    def __init__(
        self,
        prepared: Prepared,
        asked: Config,
        cluster: Cluster,
        folder: Path,
        *,
        console: Console,
        changed: asyncio.Event,
    ) -> None:
        assert cluster.learner is not None
        self._prepared, self._config, self._asked = prepared, prepared.config, asked
        self._cluster, self._learner, self._rollouts = cluster, cluster.learner, cluster.rollouts
        self._folder, self._console, self._changed = folder, console, changed
        self._run_folder = folder / RUN
        self._dtype = prepared.config.model.dtype
        self._texts = probe_texts(prepared)
        self._share_prefixes = prefix_sharing(prepared)
        self._checks: list[Check] = []
        self._state = Path()
        self._weights_bytes = 0

    async def examine(self) -> list[Check]:
        """All checks, in the order in which they were made."""
        # For the learner's state. All nodes must see it, as they must a run's checkpoints.
        with tempfile.TemporaryDirectory(prefix="state-", dir=self._folder) as state:
            self._state = Path(state)
            await self._examine()
        return self._checks

    async def _examine(self) -> None:
        before = await self._try("checkpoint", _LEARNER_ADVICE, self._save)
        await self._try("weights", _WEIGHTS_ADVICE, self._canary)
        self._add(self._resources())
        if before is not None:
            self._add(self._disk())
        batches = await self._try("batches", "The message says what failed; the run would fail there too.", self._run)
        if batches:
            self._of_answers(batches)
            await self._try("rewards", "The message says what failed.", lambda: self._rewards(batches))
        else:
            for name in ("masks", "logprobs", "shift", "versions", "rewards"):
                self._add(checks.skipped(name, "no batch was learned"))
        if self._cluster.placement.engines_sleep:
            await self._rollouts.sleep()  # from here on the learner has the devices for itself
        if not batches or before is None:
            for name in ("temperature", "replay", "direction"):
                self._add(checks.skipped(name, "there is no answer, or no state to go back to"))
        else:
            await self._try("replay", _LEARNER_ADVICE, lambda: self._replay(batches[0]))
            await self._try("temperature", _LEARNER_ADVICE, lambda: self._temperature(batches[0]))
            await self._try("direction", _LEARNER_ADVICE, lambda: self._direction(batches[0]))
        if before is not None:
            await self._try("checkpoint", _LEARNER_ADVICE, lambda: self._restored(before))
        await self._try("memory", checks.MEMORY_ADVICE, self._memory)

    def _add(self, check: Check) -> None:
        logger.info("%s: %s, %s", check.name, check.verdict.value, check.measured)
        self._checks.append(check)

    async def _try(self, name: str, advice: str, part: Callable[[], Awaitable[Any]]) -> Any:
        """What a part returns; None, and a failed check, where it can't do its work. A check that it returns is noted."""
        try:
            result = await part()
        except PART_FAILED as error:
            self._add(checks.failed(name, error, advice))
            return None
        if isinstance(result, Check):
            self._add(result)
        return result

    # The parts

    async def _save(self) -> list[np.ndarray]:
        """Save the learner's state; its logprobs of fixed texts."""
        before = await self._learner.logprobs(self._texts)
        await self._learner.save(self._state)
        return before

    async def _canary(self) -> Check:
        """All weights are perturbed, published, restored and published again."""
        probe = Probe(self._texts, self._learner, self._rollouts, dtype=self._dtype, max_gap=None)
        await probe.begin()
        reports: list[BroadcastReport] = []

        async def publish() -> None:
            reports.append(await self._rollouts.broadcast(self._learner, 0))

        moved = await probe.canary(publish, self._config.run.seed)
        self._weights_bytes = reports[-1].manifest.total_bytes
        return Check(
            "weights",
            Verdict.PASS,
            f"perturbed by {moved.learner_change:.2g} nats, every engine followed to {moved.gap:.2g}; "
            f"{self._weights_bytes / 2**20:.0f} MiB in {reports[-1].total_s:.1f} s, engines paused {reports[-1].pause_s:.2f} s",
            "engines follow, and come back",
            _WEIGHTS_ADVICE,
            {"learner_change": moved.learner_change, "gap": moved.gap, "pause_s": reports[-1].pause_s},
        )

    def _resources(self) -> Check:
        import ray

        placement = self._cluster.placement
        transport = self._config.rollout.weights.transport
        nccl = transport == "nccl" or (transport == "auto" and placement.device == "gpu" and not placement.shared)
        return checks.resources(
            placement, ray.cluster_resources(), weights_bytes=self._weights_bytes, through_object_store=not nccl
        )

    def _disk(self) -> Check:
        state_bytes = sum(file.stat().st_size for file in self._state.rglob("*") if file.is_file())
        keep = self._asked.checkpoint.keep if self._asked.checkpoint.every_batches else 0
        return checks.disk(state_bytes, self._weights_bytes, keep, bytes_free(Path(self._asked.run.dir)) + state_bytes)

    async def _run(self) -> list[RecordedBatch]:
        """Two batches through the whole loop, as that wrote them down."""
        folder = self._run_folder
        if folder.exists():  # of an earlier doctor
            shutil.rmtree(folder)
        lineage = begin_lineage(folder / JOURNAL, None)
        with whole_file(folder / "config.yaml") as file:  # so that the run can be replayed later
            file.write(OmegaConf.to_yaml(OmegaConf.structured(self._config)).encode())
        wandb = WandbSink(folder, project="", run_id="doctor", name="doctor", config={}, mode="disabled")
        with Recorder([JsonlSink(folder / "metrics.jsonl", lineage=lineage, resumed_from=None)]) as recorder:
            run = Run(
                self._prepared,
                self._cluster,
                folder=folder,
                lineage=lineage,
                checkpoint=None,
                store=CheckpointStore(folder / "checkpoints", 1),
                recorder=recorder,
                wandb=wandb,
                console=self._console,
                changed=self._changed,
            )
            await run.probe.begin()
            await run.train()
        answers = run.metrics.get("batch/answers", 0)
        self._add(
            Check(
                "batches",
                Verdict.PASS if run.version == BATCHES else Verdict.FAIL,
                f"{run.version} of {BATCHES} went through the loop, the last with {answers:.0f} answers",
                f"{BATCHES}",
                "The data could not fill a batch: the message in the log says of what kind its groups were.",
                {"batches": run.version},
            )
        )
        return [read_batch(folder, version) for version in recorded_versions(folder)]

    def _of_answers(self, batches: Sequence[RecordedBatch]) -> None:
        """The checks of the answers that the run wrote down."""
        r = self._config.rollout
        answers = [t for batch in batches for payload in batch.payloads.values() for t in payload]
        self._add(
            checks.masks(
                answers,
                self._prepared.chat,
                max_response_tokens=r.max_response_tokens,
                max_tokens=r.max_prompt_tokens + max(r.max_response_tokens, self._config.eval.max_response_tokens or 0),
            )
        )
        for number, batch in enumerate(batches):
            behaviour, learner = _logprobs(batch)
            name = "logprobs" if number == 0 else "logprobs after an update"
            self._add(
                checks.logprobs(
                    behaviour, learner, dtype=self._dtype, max_gap=self._asked.doctor.max_logprob_gap, name=name
                )
            )
        self._add(checks.shift(*_logprobs(batches[0])))
        if len(batches) < BATCHES:
            self._add(checks.skipped("versions", "there is no batch of the version that was published"))
            return
        second = [t for payload in batches[1].payloads.values() for t in payload]
        self._add(checks.versions(second, 1, batches[1].metrics.get("weights/probe_gap")))

    async def _rewards(self, batches: Sequence[RecordedBatch]) -> Check:
        """Of all groups that were judged, and of answers that the reward functions themselves call right."""
        answers = [t for batch in batches for payload in batch.payloads.values() for t in payload]
        return checks.rewards(
            read_outcomes(self._run_folder)["reward_values"].to_pylist(),
            [t.reward.status.value for t in answers if t.reward is not None],
            min_scored_fraction=self._config.sampling.min_scored_fraction,
            must_differ=queue_settings(self._config).filter,
            tolerance=self._config.sampling.filter_tolerance,
            golds=[pair for prompt in self._first_prompts() if (pair := await self._gold_against_none(prompt))],
        )

    def _first_prompts(self) -> list[Prompt]:
        source = self._prepared.train[0]
        return [source.prompt(i, 0) for i in range(min(self._asked.doctor.groups, len(source)))]

    async def _gold_against_none(self, prompt: Prompt) -> tuple[str, float | None, float | None] | None:
        """The rewards of a right and of an empty answer; None where no function says what a right answer is."""
        import ray

        rewards, chat = self._prepared.rewards, self._prepared.chat
        functions = sorted(rewards.select_functions(prompt.reward), key=lambda f: f.name != rewards.primary)
        gold = next((golds[0] for f in functions if (golds := f.golds(prompt.columns))), None)
        if not isinstance(gold, str):
            return None
        made = tuple(
            answer_of(prompt, index, text, chat.tokenizer.encode(text, add_special_tokens=False))
            for index, text in enumerate((gold, ""))
        )
        right, empty = await self._cluster.rewards.score(ray.put(made), prompt.columns, prompt.reward, prompt.text)
        return prompt.prompt_id, right.value, empty.value

    async def _replay(self, batch: RecordedBatch) -> Check:
        await self._learner.load(self._state)
        plan = plan_of(self._config, batch, self._share_prefixes)
        scored = await score(self._learner, plan, batch, self._config.learner.step_timeout_s)
        return checks.replayed(replay_batch(self._run_folder, self._config, batch, plan, scored))

    async def _temperature(self, batch: RecordedBatch) -> Check:
        """Ask the learner, in its first state, for the same tokens at several temperatures."""
        await self._learner.load(self._state)
        answers = _fitting(
            [t for payload in batch.payloads.values() for t in payload],
            min(TEMPERATURE_TOKENS, self._config.learner.max_tokens_per_microbatch),
        )
        configured = self._config.rollout.temperature
        learner = {}
        for factor in checks.TEMPERATURES:
            found = await self._learner.logprobs([t.token_ids.tolist() for t in answers], configured * factor)
            learner[configured * factor] = [of[t.response_mask[1:]] for of, t in zip(found, answers, strict=True)]
        return checks.temperature([_sampled(t) for t in answers], learner, configured=configured)

    async def _direction(self, batch: RecordedBatch) -> Check:
        """Throw-away updates, each on one answer alone: to first order each must move that answer's own logprob."""
        answers = {(t.group_id, t.index): t for payload in batch.payloads.values() for t in payload}
        # The least likely ones: what is nearly certain has hardly a gradient.
        order = sorted(batch.learner_logprobs, key=lambda answer: float(batch.learner_logprobs[answer].sum()))
        up, down = own_behaviour(answers[order[0]]), own_behaviour(answers[order[min(1, len(order) - 1)]])
        # Advantages per token are relative to those of the other answers of an update: one alone has none.
        joint = per_token(self._config.algorithm)
        updates = [[(up, 1.0), (down, -1.0)]] if joint else [[(up, 1.0)], [(down, -1.0)]]
        rise, fall = [pair for update in updates for pair in await self._moved(update)]
        tokens = max(up.response_length, down.response_length)
        return checks.direction(rise, fall, dtype=self._dtype, tokens=tokens, joint=joint)

    async def _moved(self, update: Sequence[tuple[Trajectory, float]]) -> list[tuple[float, float]]:
        """The logprobs of answers, given with their advantages, before and after updates from the saved state."""
        import ray

        await self._learner.load(self._state)
        plans = update_on(
            self._config,
            [[answer] for answer in update],
            ranks=len(self._learner),
            share_prefixes=self._share_prefixes,
            epochs=DIRECTION_UPDATES,
        )
        payloads = [ray.put((trajectory,)) for trajectory, _ in update]
        found: list[dict[tuple[str, int], float]] = []
        for learn in (True, False):
            call = self._learner.learn if learn else self._learner.score
            *_, references = await call(plans, payloads)  # `learn` tells the logprobs of before its first update
            of_ranks = [await asyncio.wait_for(r, self._config.learner.step_timeout_s) for r in references]
            found.append({answer: float(v.sum()) for of_rank in of_ranks for answer, v in of_rank.items()})
        return [(found[0][t.group_id, t.index], found[1][t.group_id, t.index]) for t, _ in update]

    async def _restored(self, before: Sequence[np.ndarray]) -> Check:
        await self._learner.load(self._state)
        return checks.restored(before, await self._learner.logprobs(self._texts), dtype=self._dtype)

    async def _memory(self) -> Check:
        """An update on the longest answers that are allowed, in a micro-batch as full as it may be."""
        import ray

        c = self._config
        groups = longest_answers(c, self._texts[0], ranks=len(self._learner))
        plans = update_on(
            c,
            [[(t, 1.0) for t in group] for group in groups],
            ranks=len(self._learner),
            share_prefixes=self._share_prefixes,
        )
        payloads = [ray.put(tuple(group)) for group in groups]
        reports, _, _ = await self._learner.learn([fullest(plan) for plan in plans], payloads)
        return checks.memory(
            max(report.peak_memory_bytes for report in reports),
            await self._learner.device_bytes(),
            learner_memory(ModelShape.of(self._prepared.model_path), c),
            tokens=c.learner.max_tokens_per_microbatch,
            longest=c.rollout.max_prompt_tokens + c.rollout.max_response_tokens,
        )


_LEARNER_ADVICE = "See the logs of the learner ranks, in logs/ of the doctor's folder."
_WEIGHTS_ADVICE = (
    "Engines do not compute with the weights that the learner sent: every later token would be of another policy. Try "
    "rollout.weights.transport=shared_memory; look at rollout.engine_options that repack weights (quantization)."
)


def _sampled(trajectory: Trajectory) -> np.ndarray:
    return trajectory.behaviour_logprobs[trajectory.response_mask]


def _logprobs(batch: RecordedBatch) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The engine's and the learner's of each answer in the loss, float32 [sampled tokens]."""
    answers = {(t.group_id, t.index): t for payload in batch.payloads.values() for t in payload}
    return [_sampled(answers[answer]) for answer in batch.learner_logprobs], list(batch.learner_logprobs.values())


def _fitting(trajectories: Sequence[Trajectory], max_tokens: int) -> list[Trajectory]:
    """The shortest ones that fit a forward pass of so many tokens together; at least one."""
    ordered = sorted(trajectories, key=lambda t: len(t.token_ids))
    count = sum((number + 1) * len(t.token_ids) <= max_tokens for number, t in enumerate(ordered))
    return ordered[: max(1, count)]
