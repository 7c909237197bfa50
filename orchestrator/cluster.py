"""The actors of a run on a Ray cluster: started in one place, ended in one place.

`Cluster` is an async context manager. Entering it joins or starts Ray, checks that the run fits, reserves a placement
group and starts every actor; leaving it, for whatever reason, ends them, releases the reservation, and stops Ray if it
was started here. Nothing that was started outlives it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import signal
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import TracebackType
from typing import Any

import ray

from learner.policy import PolicySettings
from learner.rank_group import LearnerGroup
from learner.reference import ReferenceActor
from learner.reference_group import ACTOR, ReferenceGroup
from learner.settings import LearnerSettings
from orchestrator.adapted_layers import adapted_layers
from orchestrator.algorithm import objective
from orchestrator.clerks import Clerk, ClerkFleet
from orchestrator.derived import learning_rate, prefix_sharing
from orchestrator.fleet import FleetError, RolloutFleet
from orchestrator.memory import check_memory, learner_memory, reference_memory
from orchestrator.model_shape import ModelShape
from orchestrator.placement import Placement, actor_environment, actor_options, plan
from orchestrator.prepare import Prepared
from orchestrator.reward_fleet import RewardFleet
from orchestrator.reward_model_fleet import RewardModelFleet
from reward_workers.alarm import ErrorAlarm
from reward_workers.reward import RewardSet
from reward_workers.reward_model_worker import RewardModelWorker
from reward_workers.worker import RewardWorker
from rollout_workers.engine import AdapterSettings, EngineSettings
from rollout_workers.worker import RolloutWorker

logger = logging.getLogger(__name__)

REWARD_CONCURRENCY = 8  # groups that one reward actor judges at once
# A call whose actor dies is made again by Ray once the actor is back, and who asks meanwhile waits: refused at once, every try
# would be used up before that, the more so since the dead actor is the least loaded one.
REWARD_ACTOR = {"num_cpus": 0, "max_concurrency": REWARD_CONCURRENCY, "max_restarts": -1, "max_task_retries": 2}


class Cluster:
    """`learner` is None for a run that only evaluates (`training` False); without `engines` there is nothing but the learner."""

    def __init__(
        self, prepared: Prepared, *, on_change: Callable[[], None], training: bool = True, engines: bool = True
    ) -> None:
        self._prepared = prepared
        self._on_change = on_change
        self._training = training
        self._engines = engines
        self._models = prepared.models(training=training) if engines else ()
        self._started_ray = False
        self._group: Any = None
        self.learner: LearnerGroup | None = None

    async def __aenter__(self) -> Cluster:
        try:
            await self._enter()
        except BaseException:
            await self._leave()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._leave()

    async def _enter(self) -> None:
        config = self._prepared.config
        joining = asyncio.ensure_future(asyncio.to_thread(self._join_ray))
        try:
            await asyncio.shield(joining)
        except asyncio.CancelledError:
            await joining  # a Ray that is half started can't be ended
            raise
        if threading.current_thread() is threading.main_thread():
            # Ray's core took the signal for itself, to die of it with a crash report.
            signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        items = [config.reward.models[model.name] for model in self._models]
        self.placement = plan(config, nodes, [item.gpus for item in items for _ in range(item.replicas)])
        if not self._training:
            self.placement = dataclasses.replace(self.placement, learners=0, references=0)
        if not self._engines:
            self.placement = dataclasses.replace(self.placement, rollouts=0)
        self._group = ray.util.placement_group(self.placement.bundles, strategy="PACK")
        try:
            await asyncio.wait_for(self._group.ready(), config.rollout.start_timeout_s)
        except TimeoutError as error:
            raise FleetError(
                f"the cluster did not free {self.placement.bundles} within rollout.start_timeout_s="
                f"{config.rollout.start_timeout_s:.0f}; available: {ray.available_resources()}"
            ) from error
        starting = self._writers_and_judges(len(nodes)) if self._engines else []
        if self._training:
            self.learner = self._learner_group()
            starting.append(self._start_learner(self.learner))
        tasks = [asyncio.ensure_future(start) for start in starting]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    def _writers_and_judges(self, nodes: int) -> list[Coroutine[Any, Any, None]]:
        """Make rollout and reward actors and the clerks; what is left to do to start them."""
        config = self._prepared.config
        transport = config.rollout.weights.transport
        if transport == "auto":
            transport = "nccl" if self.placement.device == "gpu" and not self.placement.shared else "shared_memory"
        if transport == "lora":
            # Without training there is no adapter yet, and an engine is faster without.
            self.rollouts = self._rollout_fleet("shared_memory", self._adapter() if self._training else None)
        else:
            self.rollouts = self._rollout_fleet(transport)
        self.models = self._model_fleets()
        self.rewards = self._reward_fleet(self._prepared.rewards)
        self.checker = self._reward_fleet(self._prepared.checker) if self._prepared.checker else None
        watch = self._prepared.watch if self._training else None
        self.watch_actors = None  # of its own, where it is not the checker of evaluation
        if watch is not None and watch is not self._prepared.checker:
            self.watch_actors = self._reward_fleet(watch)
        watching = self.watch_actors or self.checker
        self.watch = watching.lenient() if watch is not None and watching is not None else None
        clerk = ray.remote(Clerk).options(num_cpus=0, max_restarts=-1, max_task_retries=2, scheduling_strategy="SPREAD")
        self.clerks = ClerkFleet([clerk.remote() for _ in range(nodes)], config.rollout.weights.timeout_s)
        timeout_s = config.rollout.start_timeout_s
        starting = [self.rollouts.start(0), self.rewards.start(timeout_s)]
        starting += [fleet.start() for fleet in self.models.values()]
        for fleet in (self.checker, self.watch_actors):
            if fleet is not None:
                starting.append(fleet.start(timeout_s))
        return starting

    async def _start_learner(self, learner: LearnerGroup) -> None:
        """Raises ConfigError, before the learner loads anything, where a device is too small."""
        shape, there_bytes = await asyncio.gather(
            asyncio.to_thread(ModelShape.of, self._prepared.model_path), learner.device_bytes()
        )
        device = "GPU" if self.placement.device == "gpu" else "machine"
        estimate = learner_memory(shape, self._prepared.config)
        check_memory(estimate, there_bytes, device)
        if learner.reference is not None:
            its_estimate = reference_memory(shape, self._prepared.config)
            check_memory(its_estimate, await learner.reference.device_bytes(), device)
        parameters = await learner.start()
        logger.info(
            "learner: %d rank(s), %.1f M trainable parameters, at least %s", len(learner), parameters / 1e6, estimate
        )

    def _join_ray(self) -> None:
        if ray.is_initialized():
            return
        for handler in logging.getLogger("ray").handlers:
            if not isinstance(handler, logging.FileHandler):
                handler.setLevel(logging.ERROR)  # warnings are for the log file that `orchestrator.api` opened
        ray.init(
            address=self._prepared.config.placement.ray_address or "local",  # never one that happens to run here
            include_dashboard=False,
            log_to_driver=False,  # actors' output is in Ray's session logs, linked from the run's folder
            logging_level=logging.WARNING,
            logging_format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        )
        self._started_ray = True

    def link_logs(self, folder: Path) -> None:
        """Make the actors' logs findable from the run's folder (where Ray runs on this machine)."""
        session = Path(ray._private.worker._global_node.get_session_dir_path()) / "logs"
        link = folder / "ray"
        if session.is_dir():
            link.unlink(missing_ok=True)
            link.symlink_to(session)

    def _adapter(self) -> AdapterSettings:
        lora = self._prepared.config.model.lora
        return AdapterSettings(lora.rank, lora.alpha, adapted_layers(self._prepared.model_path, lora.targets))

    def _rollout_fleet(self, transport: str, adapter: AdapterSettings | None = None) -> RolloutFleet:
        config, placement = self._prepared.config, self.placement
        r = config.rollout
        actor = ray.remote(RolloutWorker)

        def make_actor(index: int) -> Any:
            settings = EngineSettings(
                model_path=self._prepared.model_path,
                dtype=config.model.dtype,
                device=placement.device,
                max_model_tokens=r.max_prompt_tokens + max(r.max_response_tokens, config.eval.max_response_tokens or 0),
                max_concurrent_answers=r.max_concurrent_answers,
                seed=engine_seed(config.run.seed, index),
                transport=transport,
                tensor_parallel_size=r.tensor_parallel_size,
                kv_cache_mib=r.kv_cache_mib,
                gpu_memory_utilization=r.gpu_memory_utilization,
                enforce_eager=r.enforce_eager,
                takes_turns=placement.engines_sleep,
                recompute_kv=r.weights.recompute_kv,
                adapter=adapter,
                fp32_head=config.model.fp32_head,
                engine_options=r.engine_options,
            )
            options = actor_options(placement, self._group, index)
            # Enough room for every answer of a batch at once, besides probes and weights.
            return actor.options(max_concurrency=10_000, **options).remote(settings, config.model.chat_template_kwargs)

        return RolloutFleet(
            make_actor,
            placement.rollouts,
            transport=transport,
            workers_per_engine=r.tensor_parallel_size,
            start_timeout_s=r.start_timeout_s,
            weights_timeout_s=r.weights.timeout_s,
            max_restarts=r.max_restarts,
            on_change=self._on_change,
        )

    def _reward_fleet(self, rewards: RewardSet) -> RewardFleet:
        config = self._prepared.config
        worker = RewardWorker(rewards, timeout_s=config.reward.timeout_s, retries=config.reward.retries)
        deadline_s = worker.deadline_s(max(config.sampling.answers_per_group, config.eval.answers_per_prompt))
        worker.close()
        actor = ray.remote(RewardWorker).options(**REWARD_ACTOR)
        actors = [
            actor.remote(
                rewards,
                timeout_s=config.reward.timeout_s,
                retries=config.reward.retries,
                processes=REWARD_CONCURRENCY,  # a process costs more to start than most verdicts
            )
            for _ in range(config.reward.workers)
        ]
        alarm = ErrorAlarm(config.reward.max_error_ratio)
        models = [self.models[model.name] for model in rewards.models if model.name in self.models]
        tries = 1 + config.reward.retries
        return RewardFleet(actors, deadline_s=deadline_s, tries=tries, alarm=alarm, models=models)

    def _model_fleets(self) -> dict[str, RewardModelFleet]:
        """A fleet for each reward model, by name; the reward fleets share them."""
        config, placement = self._prepared.config, self.placement
        actor = ray.remote(RewardModelWorker)
        # Room for every group that can be asked for at once; the actor makes batches of them.
        common = {"max_concurrency": 1000, "max_restarts": -1, "max_task_retries": 0}
        bundle = placement.rollouts + placement.learners + placement.references
        fleets = {}
        for model in self._models:
            item = config.reward.models[model.name]
            actors = []
            for _ in range(item.replicas):
                if placement.device == "gpu":
                    options = actor_options(placement, self._group, bundle)
                    bundle += 1
                else:
                    options = {"num_cpus": 0, "runtime_env": {"env_vars": actor_environment(1, "cpu")}}
                actors.append(actor.options(**common, **options).remote(model, device=placement.device, gpus=item.gpus))
            fleets[model.name] = RewardModelFleet(
                model.name,
                actors,
                deadline_s=item.timeout_s,
                tries=1 + config.reward.retries,
                start_timeout_s=config.rollout.start_timeout_s,
            )
        return fleets

    def _learner_group(self) -> LearnerGroup:
        config, placement = self._prepared.config, self.placement
        first = placement.rollouts
        options = [actor_options(placement, self._group, first + rank) for rank in range(placement.learners)]
        return LearnerGroup(
            learner_settings(self._prepared, placement),
            options,
            start_timeout_s=config.learner.start_timeout_s,
            timeout_s=config.learner.step_timeout_s,
            reference=self._reference_group() if placement.references else None,
        )

    def _reference_group(self) -> ReferenceGroup:
        config, placement = self._prepared.config, self.placement
        # The packing of one group; which of its answers enter the loss is not known yet.
        cut = {
            "max_tokens": config.learner.max_tokens_per_microbatch,
            "share_prefixes": prefix_sharing(self._prepared),
        }
        settings = learner_settings(self._prepared, placement)
        actor = ray.remote(ReferenceActor)
        first = placement.rollouts + placement.learners
        return ReferenceGroup(
            [
                actor.options(**ACTOR, **actor_options(placement, self._group, first + number)).remote(settings, cut)
                for number in range(placement.references)
            ],
            start_timeout_s=config.learner.start_timeout_s,
            # Before the watchdog, which could not name the actor.
            timeout_s=min(config.learner.step_timeout_s, config.run.watchdog_s / 2),
        )

    async def _leave(self) -> None:
        if not ray.is_initialized():
            return
        names = ("rollouts", "rewards", "checker", "watch_actors", "clerks", "learner")
        parts = [part for name in names if (part := getattr(self, name, None)) is not None]
        for part in [*parts, *getattr(self, "models", {}).values()]:
            with contextlib.suppress(ray.exceptions.RayError):
                await part.close()
        if self._group is not None:
            ray.util.remove_placement_group(self._group)
        if self._started_ray:
            await asyncio.to_thread(ray.shutdown)


def learner_settings(prepared: Prepared, placement: Placement) -> LearnerSettings:
    """What the ranks are started with."""
    config = prepared.config
    a, learner, m = config.algorithm, config.learner, config.model
    return LearnerSettings(
        policy=PolicySettings(
            model_path=prepared.model_path,
            dtype=m.dtype,
            lora_rank=m.lora.rank,
            lora_alpha=m.lora.alpha,
            lora_targets=m.lora.targets,
            gradient_checkpointing=learner.gradient_checkpointing,
            chunk_tokens=learner.logprob_chunk_tokens,
            entropy_gradient=a.entropy_coefficient != 0 or a.entropy_target is not None,
            fp32_head=m.fp32_head,
            seed=config.run.seed,
        ),
        objective=objective(a),
        device=placement.device,
        temperature=config.rollout.temperature,
        zero_stage=learner.zero_stage,
        learning_rate=learning_rate(config),
        total_optimizer_steps=config.run.batches * a.updates_per_batch * a.epochs_per_batch,
        warmup_steps=learner.warmup_steps,
        schedule=learner.schedule,
        weight_decay=learner.weight_decay,
        adam_betas=(learner.adam_beta1, learner.adam_beta2),
        max_grad_norm=learner.max_grad_norm,
        offload=learner.offload,
        deterministic=config.run.deterministic,
        threads=placement.learner_threads if placement.device == "cpu" else None,
        bucket_bytes=config.rollout.weights.bucket_mib * 2**20,
        reference=learner.reference,
        send_adapter=config.rollout.weights.transport == "lora",
    )


def engine_seed(base: int, replica: int) -> int:
    """Distinct for every engine of a run, equal for the tensor-parallel workers of one."""
    return (base * 1_000_003 + replica * 7_919 + 1) % 2**31
