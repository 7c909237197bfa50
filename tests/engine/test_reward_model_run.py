"""Reward models for real: a run that is trained on one, its actor killed on the way, and vLLM's scores beside transformers'."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from reward_models import plain_scores, write_reward_model

from orchestrator.journal import read_outcomes, read_trajectories
from orchestrator.placement import actor_environment
from orchestrator.sinks import read_metrics
from reward_workers.builtin import synthetic_reward
from reward_workers.reward import RewardModel, Status
from reward_workers.reward_model_vllm import ScorerDied
from reward_workers.reward_model_worker import RewardModelWorker
from rollout_workers.trajectory import Trajectory

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

# Of this model's scores of random texts, so that some pass the gate, some don't, and some are cut.
MEAN, STD = -10.5, 1.3
CLIP, GATE = 1.5, -0.25


def test_a_run_is_trained_on_what_the_model_says(launch: Callable, tmp_path: Path) -> None:
    """Beside a function and as a gate; every reward of the journal is what transformers gives for the text alone."""
    folder = write_reward_model(tmp_path / "reward_model", seed=3)
    of_model = {
        "path": folder,
        "dtype": "float32",
        "weight": 0.5,
        "gate": "true",
        "gate_threshold": GATE,
        "normalise": "standard",
        "mean": MEAN,
        "std": STD,
        "clip": CLIP,
    }
    run = launch(
        "run.batches=6",
        "reward.workers=1",
        "checkpoint.every_batches=0",
        "reward.watch.share=0",
        *(f"reward.models.rm.{key}={value}" for key, value in of_model.items()),
    )
    run.wait_for(lambda: any(r["policy_version"] >= 2 for r in run.records()), "version 2", timeout_s=300)
    [actor] = run.processes("ray::RewardModelWorker")
    os.kill(actor, signal.SIGKILL)
    assert run.finish(300) == 0, run.output
    run.assert_nothing_left()

    assert {outcome["outcome"] for outcome in read_outcomes(run.folder).to_pylist()} <= {"trained", "filtered"}
    rows = read_trajectories(run.folder).to_pylist()
    assert len(rows) == 6 * 4 * 8
    conversations = [json.loads(row["messages"]) for row in rows]
    passed = 0
    for row, messages, raw in zip(rows, conversations, plain_scores(folder, conversations), strict=True):
        value = max(-CLIP, min(CLIP, (raw - MEAN) / STD))
        letters = synthetic_reward(messages[-1]["content"])
        components, metrics = dict(row["reward_components"]), dict(row["reward_metrics"])
        assert row["reward_status"] == Status.SCORED
        assert metrics["rm/raw"] == pytest.approx(raw, abs=1e-4)
        assert components == pytest.approx({"letters": letters, "rm": value}, abs=1e-4)
        through = metrics["rm/passed"] == 1.0
        assert through == (components["rm"] >= GATE)
        assert row["reward_value"] == pytest.approx(0.5 * value + (letters if through else 0.0), abs=1e-4)
        passed += through
    assert 0 < passed < len(rows)
    records = read_metrics(run.folder / "metrics.jsonl")
    assert [record["policy_version"] for record in records] == list(range(1, 7))
    assert {"reward/rm/mean", "reward/rm/std", "reward_metric/rm/raw", "reward_metric/rm/weighted"} <= set().union(
        *records
    )
    assert all(
        record.get("reward/errored_ratio", 0) == record.get("reward/timed_out_ratio", 0) == 0 for record in records
    )


def test_vllm_scores_as_transformers_does_and_is_started_again(tmp_path: Path, ray_session: None) -> None:
    import psutil
    import ray

    folder = write_reward_model(tmp_path / "reward_model", "qwen2")
    model = RewardModel("rm", str(folder), engine="vllm", dtype="float32", max_tokens=300, batch_tokens=1024)
    conversations = [
        [{"role": "user", "content": "Write a line."}, {"role": "assistant", "content": "The sea is wide. " * length}]
        for length in (1, 3, 0, 9, 4, 12, 2, 90)
    ]
    group = [Trajectory.from_messages(messages, group_id="g", index=i) for i, messages in enumerate(conversations)]
    expected = plain_scores(folder, conversations[:-1])
    options = {"num_cpus": 0, "max_concurrency": 100, "runtime_env": {"env_vars": actor_environment(1, "cpu")}}
    actor = ray.remote(RewardModelWorker).options(**options).remote(model, device="cpu")
    try:
        ray.get(actor.start.remote(), timeout=300)
        for results in ray.get([actor.score_group.remote(group) for _ in range(2)], timeout=60):
            assert [result.value for result in results[:-1]] == pytest.approx(expected, abs=1e-4)
            assert (results[-1].value, results[-1].status) == (None, Status.ERRORED)
            assert "takes 300" in results[-1].detail["error"]
        pid = ray.get(actor.__ray_call__.remote(lambda worker: os.getpid()), timeout=10)
        [engine] = [child for child in psutil.Process(pid).children(True) if "EngineCore" in " ".join(child.cmdline())]
        engine.kill()
        with pytest.raises(ScorerDied):
            ray.get(actor.score_group.remote(group), timeout=60)
        again = ray.get(actor.score_group.remote(group), timeout=200)
        assert [result.value for result in again[:-1]] == pytest.approx(expected, abs=1e-4)
        ray.get(actor.close.remote(), timeout=30)
    finally:
        ray.kill(actor)
