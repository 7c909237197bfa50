"""From the learner to the engines over a whole small cluster: weights arrive exactly, or the run stops and says what did not."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orchestrator.api import configured
from orchestrator.checkpoint import CheckpointStore
from orchestrator.cluster import Cluster
from orchestrator.console import Console
from orchestrator.prepare import prepare
from orchestrator.probe import WeightsDiverged
from orchestrator.run import Run
from orchestrator.sinks import JsonlSink, Recorder, WandbSink, read_metrics
from rollout_workers.weights.bucket import Bucket
from rollout_workers.weights.manifest import Manifest, WeightsNotDelivered

pytestmark = pytest.mark.engine

TEXTS = [list(range(3, 63)), list(range(100, 160))]
TENSOR = "model.layers.1.mlp.up_proj.weight"
HEAD = "model.embed_tokens.weight"  # tied: it is the output head too


class RunHere:
    """Runs on actors that are started once: each begins at version 0 with the learner's weights of the moment."""

    def __init__(self, runner: asyncio.Runner, overrides: Sequence[str]) -> None:
        self._runner = runner
        self._prepared = prepare(configured(None, None, overrides))
        self._changed = asyncio.Event()
        self.cluster = Cluster(self._prepared, on_change=self._changed.set)
        runner.run(self.cluster.__aenter__())

    def close(self) -> None:
        self._runner.run(self.cluster.__aexit__(None, None, None))

    def __call__(self, folder: Path, *, batches: int, canary: bool = False) -> list[dict[str, Any]]:
        """Train; the records of metrics.jsonl."""
        return self._runner.run(asyncio.wait_for(self._train(folder, batches, canary), 120))

    async def _train(self, folder: Path, batches: int, canary: bool) -> list[dict[str, Any]]:
        config = self._prepared.config
        weights = dataclasses.replace(config.rollout.weights, canary=canary)
        config = dataclasses.replace(
            config,
            run=dataclasses.replace(config.run, batches=batches),
            rollout=dataclasses.replace(config.rollout, weights=weights),
        )
        assert self.cluster.learner is not None
        await self.cluster.rollouts.broadcast(self.cluster.learner, 0)
        file = folder / "metrics.jsonl"
        wandb = WandbSink(folder, project="tests", run_id="tests", name="tests", config={}, mode="disabled")
        with (
            Recorder([JsonlSink(file, lineage=0, resumed_from=None)]) as recorder,
            Console(batches, "plain") as console,
        ):
            run = Run(
                dataclasses.replace(self._prepared, config=config),
                self.cluster,
                folder=folder,
                lineage=0,
                checkpoint=None,
                store=CheckpointStore(folder / "checkpoints", 1),
                recorder=recorder,
                wandb=wandb,
                console=console,
                changed=self._changed,
            )
            await run.execute()
        return read_metrics(file)

    def logprobs(self) -> tuple[np.ndarray, np.ndarray]:
        """Of `TEXTS`: the learner's, and the engine's."""

        async def ask() -> tuple[np.ndarray, np.ndarray]:
            assert self.cluster.learner is not None
            learner = await self.cluster.learner.logprobs(TEXTS)
            [engine] = (await self.cluster.rollouts.logprobs(TEXTS)).values()
            return np.concatenate(learner), np.concatenate(engine)

        return self._runner.run(ask())


@pytest.fixture(scope="module")
def start(runner: asyncio.Runner, ray_session: None, small: list[str]) -> Iterator[Callable[..., RunHere]]:
    with contextlib.ExitStack() as started:

        def start(*overrides: str) -> RunHere:
            run = RunHere(runner, [*small, "checkpoint.every_batches=0", *overrides])
            started.callback(run.close)
            return run

        yield start


@pytest.fixture(scope="module")
def train(start: Callable[..., RunHere]) -> RunHere:
    """One engine and two ZeRO-3 ranks."""
    return start("learner.ranks=2", "learner.zero_stage=3", "rollout.weights.bucket_mib=1")


def tamper(
    monkeypatch: pytest.MonkeyPatch, train: RunHere, change: Callable[[Bucket], Bucket], version: int = 1
) -> None:
    """Change the buckets of one version on their way, behind the back of the manifest."""
    import ray

    learner = train.cluster.learner
    assert learner is not None
    export = learner.export_weights

    async def export_weights(exported: int) -> AsyncIterator[Any]:
        async for item in export(exported):
            if exported == version and not isinstance(item, Manifest):
                yield ray.put(change(await item))
            else:
                yield item

    monkeypatch.setattr(learner, "export_weights", export_weights)


def without(bucket: Bucket, name: str) -> Bucket:
    return Bucket(tuple(slot for slot in bucket.slots if slot.name != name), bucket.data)


def damaged(bucket: Bucket, name: str) -> Bucket:
    """One bit of one number flipped."""
    data = bucket.data.copy()
    for slot in bucket.slots:
        if slot.name == name:
            data[slot.offset_bytes + slot.size_bytes // 2] ^= 1
    return Bucket(bucket.slots, data)


def test_after_optimizer_steps_the_engine_computes_what_the_learner_computes(train: RunHere, tmp_path: Path) -> None:
    """The head is tied: an engine that kept its packed copy would be off by far."""
    before, engine_before = train.logprobs()
    assert np.abs(engine_before - before).max() < 1e-4
    records = train(tmp_path, batches=3, canary=True)
    after, engine_after = train.logprobs()
    assert np.abs(after - before).mean() > 0.02
    assert np.abs(engine_after - after).max() < 1e-4
    assert [r["policy_version"] for r in records] == [1, 2, 3]
    for record in records:
        assert record["weights/probe_gap"] < 1e-4 < 1e-2 < record["weights/probe_learner_change"]
        assert 0 < record["weights/pause_s"] < record["weights/total_s"]
        assert record["weights/sent_mib"] > 1
        # The learner's view of what the engine sampled, through plans, packing and ranks.
        assert record["mismatch/kl"] < 1e-5
        assert abs(record["mismatch/ratio_max"] - 1) < 1e-3


@pytest.mark.parametrize("tensor", [TENSOR, HEAD])
def test_a_tensor_that_is_not_delivered_stops_the_run_with_its_name(
    train: RunHere, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tensor: str
) -> None:
    tamper(monkeypatch, train, lambda bucket: without(bucket, tensor))
    with pytest.raises(WeightsNotDelivered, match=f"version 1: rollout-0 did not receive tensor '{tensor}'"):
        train(tmp_path, batches=2)


@pytest.mark.parametrize("tensor", [TENSOR, HEAD])
def test_a_damaged_tensor_stops_the_run_with_its_name(
    train: RunHere, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tensor: str
) -> None:
    tamper(monkeypatch, train, lambda bucket: damaged(bucket, tensor))
    with pytest.raises(WeightsNotDelivered, match=f"version 1: rollout-0 received tensor '{tensor}' damaged"):
        train(tmp_path, batches=2)


def test_the_next_whole_broadcast_mends_what_an_incomplete_one_left(train: RunHere, runner: asyncio.Runner) -> None:
    assert train.cluster.learner is not None
    runner.run(train.cluster.rollouts.broadcast(train.cluster.learner, 5))
    learner, engine = train.logprobs()
    assert np.abs(engine - learner).max() < 1e-4


@pytest.fixture(scope="module")
def train_adapter(start: Callable[..., RunHere]) -> RunHere:
    """One engine and one rank, where the adapter alone travels, and the engine serves the base model with it."""
    return start("model.lora.rank=4", "rollout.weights.transport=lora")


def test_an_adapter_alone_arrives_and_is_computed_with(train_adapter: RunHere, tmp_path: Path) -> None:
    before, engine_before = train_adapter.logprobs()
    assert np.abs(engine_before - before).max() < 1e-4
    records = train_adapter(tmp_path, batches=3, canary=True)
    after, engine_after = train_adapter.logprobs()
    assert np.abs(after - before).mean() > 0.02
    assert np.abs(engine_after - after).max() < 1e-4
    for record in records:
        assert record["weights/probe_gap"] < 1e-4 < record["weights/probe_learner_change"]
        assert record["weights/sent_mib"] < 0.2  # the model has 2.2
        assert abs(record["mismatch/ratio_max"] - 1) < 1e-3


@pytest.mark.parametrize("half", ["lora_A", "lora_B"])
def test_an_adapters_tensor_that_is_missing_or_damaged_stops_the_run_with_its_name(
    train_adapter: RunHere, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, half: str
) -> None:
    name = f"base_model.model.model.layers.1.mlp.up_proj.{half}.weight"
    for change, message in (
        (without, f"version 1: rollout-0 did not receive tensor '{name}'"),
        (damaged, f"version 1: rollout-0 received tensor '{name}' damaged"),
    ):
        with monkeypatch.context() as patch:
            tamper(patch, train_adapter, lambda bucket, change=change: change(bucket, name))  # type: ignore[misc]
            with pytest.raises(WeightsNotDelivered, match=message):
                train_adapter(tmp_path / change.__name__, batches=2)


def test_the_next_whole_adapter_mends_what_an_incomplete_one_left(
    train_adapter: RunHere, runner: asyncio.Runner
) -> None:
    assert train_adapter.cluster.learner is not None
    runner.run(train_adapter.cluster.rollouts.broadcast(train_adapter.cluster.learner, 5))
    learner, engine = train_adapter.logprobs()
    assert np.abs(engine - learner).max() < 1e-4


def test_canary_and_probe_catch_an_engine_that_keeps_its_old_head(
    start: Callable[..., RunHere], tmp_path: Path
) -> None:
    """All checksums are right there; only the logprobs tell."""
    train = start("rollout.engine_options.worker_extension_cls=stale_head.StaleHead")
    with pytest.raises(WeightsDiverged, match="canary"):
        train(tmp_path / "canary", batches=1, canary=True)
    with pytest.raises(WeightsDiverged, match="since the start the learner's logprobs"):
        train(tmp_path / "probe", batches=10)
