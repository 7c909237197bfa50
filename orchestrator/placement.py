"""Where actors go, and whether they fit: checked against the cluster before anything is started.

Every rollout actor gets one bundle of one node (its tensor-parallel devices are never split over nodes), every learner
rank one, every reference actor (`learner.reference=own`) one with a device of its own, or as many threads as a rank, and on GPUs
every replica of a reward model one, of devices that nobody else has. On CPUs reward models reserve nothing and have one thread
each. In `split` mode engines and learner have devices of their own; in `shared` mode they take turns, so
both claim half of each: on GPUs that is Ray's fractional GPU, on CPUs the threads overlap.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.config import Config, ConfigError, reference_place

KEPT_BYTES = str(2**40)  # more than any process has: freed memory is always kept


@dataclass(frozen=True)
class Placement:
    """Resources of each actor, and the threads of each CPU engine and rank."""

    device: str  # cpu | gpu
    shared: bool
    rollout_bundle: dict[str, float]
    learner_bundle: dict[str, float]
    rollouts: int
    learners: int
    references: int  # reference actors
    rollout_threads: int
    learner_threads: int
    reward_gpus: tuple[float, ...] = ()  # of each replica of a reward model; empty on CPUs

    @property
    def engines_sleep(self) -> bool:
        """Whether engines must give their memory back while the learner works. CPU threads just idle."""
        return self.shared and self.device == "gpu"

    @property
    def bundles(self) -> list[dict[str, float]]:
        """Rollout actors first, then learner ranks, reference actors, and reward models."""
        reference = {"GPU": 1.0, "CPU": 1.0} if self.device == "gpu" else {"CPU": float(self.learner_threads)}
        models = [{"GPU": gpus, "CPU": 1.0} for gpus in self.reward_gpus]
        actors = [self.rollout_bundle] * self.rollouts + [self.learner_bundle] * self.learners
        return actors + [reference] * self.references + models


def plan(config: Config, nodes: list[dict[str, float]], reward_gpus: Sequence[float] = ()) -> Placement:
    """Lay the run out over `nodes` (each node's resources as Ray reports them).

    `reward_gpus` are the GPUs of each replica of a reward model that is to be started.
    Raises ConfigError, with what was asked and what is there, when it does not fit.
    """
    gpus = sum(node.get("GPU", 0) for node in nodes)
    cpus = int(sum(node.get("CPU", 0) for node in nodes))
    device = config.placement.device
    if device == "auto":
        device = "gpu" if gpus else "cpu"
    shared = config.placement.mode == "shared"
    replicas, ranks = config.rollout.replicas, config.learner.ranks
    place = reference_place(config)
    references = config.learner.reference_ranks if place == "own" else 0
    if device == "gpu":
        return _on_gpus(config, nodes, references, tuple(reward_gpus), shared=shared)
    if place == "offload":
        raise ConfigError(
            "learner.reference=offload keeps weights out of GPU memory, and placement.device is cpu; leave it at ranks"
        )
    if config.rollout.weights.transport == "nccl":
        raise ConfigError("rollout.weights.transport=nccl needs GPUs, and placement.device is cpu; leave it at auto")
    share = 0.5 if shared else 1.0
    even = cpus // (replicas + ranks + references)
    wanted = (cpus // replicas, cpus // (ranks + references)) if shared else (even, even)
    # Even shares, and smaller ones where they don't fit the nodes.
    for less in range(max(1, *wanted)):
        rollout_threads, learner_threads = (max(1, threads - less) for threads in wanted)
        placement = Placement(
            device="cpu",
            shared=shared,
            rollout_bundle={"CPU": (config.rollout.threads or rollout_threads) * share},
            learner_bundle={"CPU": (config.learner.threads or learner_threads) * share},
            rollouts=replicas,
            learners=ranks,
            references=references,
            rollout_threads=config.rollout.threads or rollout_threads,
            learner_threads=config.learner.threads or learner_threads,
        )
        engines, learners = [placement.rollout_threads] * replicas, [placement.learner_threads] * ranks
        own = [placement.learner_threads] * references
        reserved = [bundle["CPU"] for bundle in placement.bundles]
        if all(_fits(cores, nodes) for cores in (engines + own, learners + own, reserved)):
            return placement
    asked = (max(sum(engines), sum(learners)) if shared else sum(engines + learners)) + sum(own)
    as_many = f", learner.reference_ranks={references} with as many" if references else ""
    raise ConfigError(
        f"the run asks for {asked} CPU cores (rollout.replicas={replicas} "
        f"with {placement.rollout_threads} threads, learner.ranks={ranks} with {placement.learner_threads} threads{as_many}, "
        f"placement.mode={config.placement.mode}), each actor's on one node; the cluster has {_per_node(nodes)}"
    )


def _fits(cores: Sequence[float], nodes: list[dict[str, float]], kind: str = "CPU") -> bool:
    """Whether actors with so many cores (or GPUs) each find room, every one on one node; the largest is placed first."""
    free = [node.get(kind, 0) for node in nodes]
    for wanted in sorted(cores, reverse=True):
        node = next((i for i, room in enumerate(free) if room >= wanted), None)
        if node is None:
            return False
        free[node] -= wanted
    return True


def _per_node(nodes: list[dict[str, float]]) -> str:
    """The nodes' cores, e.g. `6 (4 + 2)`."""
    counts = [node.get("CPU", 0) for node in nodes]
    return f"{sum(counts):g}" + (f" ({' + '.join(f'{count:g}' for count in counts)})" if len(counts) > 1 else "")


def _on_gpus(
    config: Config, nodes: list[dict[str, float]], references: int, reward_gpus: tuple[float, ...], *, shared: bool
) -> Placement:
    replicas, ranks, width = (
        config.rollout.replicas,
        config.learner.ranks,
        config.rollout.tensor_parallel_size,
    )
    there = [int(node.get("GPU", 0)) for node in nodes]
    if width > max(there, default=0):
        raise ConfigError(
            f"rollout.tensor_parallel_size={width} needs that many GPUs on one node, the largest has {max(there, default=0)}"
        )
    for_models = _whole_devices(reward_gpus)
    asked = (max(replicas * width, ranks) if shared else replicas * width + ranks) + references + sum(for_models)
    # An engine's devices lie on one node: what a node has beyond whole engines can only serve learner ranks.
    engines = sum(count // width for count in there)
    devices = [*[width] * replicas, *[1] * references, *for_models]
    if asked > sum(there) or replicas > engines or not _fits(devices, nodes, "GPU"):
        own = f", learner.reference_ranks={references}" if references else ""
        models = f", reward.models: {sum(for_models)} for {len(reward_gpus)} replicas" if reward_gpus else ""
        raise ConfigError(
            f"the run asks for {asked} GPUs (rollout.replicas={replicas} x rollout.tensor_parallel_size={width}, "
            f"learner.ranks={ranks}{own}{models}, placement.mode={config.placement.mode}); the cluster has {sum(there)}, "
            f"room for {engines} engines of that size"
        )
    share = 0.5 if shared else 1.0
    return Placement(
        device="gpu",
        shared=shared,
        rollout_bundle={"GPU": width * share, "CPU": 1.0},
        learner_bundle={"GPU": share, "CPU": 1.0},
        rollouts=replicas,
        learners=ranks,
        references=references,
        rollout_threads=1,
        learner_threads=1,
        reward_gpus=reward_gpus,
    )


def _whole_devices(shares: Sequence[float]) -> list[int]:
    """The GPUs that replicas with these shares take: one of several each, or one that several below 1 have together."""
    whole = [int(share) for share in shares if share >= 1]
    free: list[float] = []
    for share in sorted((share for share in shares if share < 1), reverse=True):
        device = next((i for i, room in enumerate(free) if room >= share - 1e-9), None)
        if device is None:
            free.append(1.0 - share)
        else:
            free[device] -= share
    return whole + [1] * len(free)


def actor_environment(threads: int, device: str) -> dict[str, str]:
    """Environment of an engine's or rank's process: threads, and no surprises from the outside."""
    environment = {
        "OMP_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
        "VLLM_NO_USAGE_STATS": "1",
    }
    if device == "cpu":
        environment |= {
            "DS_ACCELERATOR": "cpu",
            # The executor lives in the engine's process: seconds less to start, and OMP_NUM_THREADS holds. Without
            # `nobind`, two engines of one machine would both bind core 0.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            # Large tensors come from the heap, which keeps what is freed. By default glibc maps memory anew for each of them, and
            # touching fresh pages costs a learner as much time as its whole optimizer step. It is so on the main thread's heap,
            # where actors that are no coroutines work, and with a glibc that takes so large a threshold (2.36 does).
            "MALLOC_MMAP_THRESHOLD_": KEPT_BYTES,
            "MALLOC_TRIM_THRESHOLD_": KEPT_BYTES,
        }
    return environment


def actor_options(placement: Placement, group: Any, index: int) -> dict[str, Any]:
    """Ray options of the actor in bundle `index` of the placement group."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    bundle = placement.bundles[index]
    threads = 1  # of a reward model
    if index < placement.rollouts:
        threads = placement.rollout_threads
    elif index < placement.rollouts + placement.learners + placement.references:
        threads = placement.learner_threads
    return {
        "num_cpus": bundle.get("CPU", 0),
        "num_gpus": bundle.get("GPU", 0),
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
        "runtime_env": {"env_vars": actor_environment(threads, placement.device)},
    }
