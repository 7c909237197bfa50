"""Whole runs on the tiny model, each started as a user starts it, and disturbed as the world does."""

from __future__ import annotations

import collections
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.journal import read_outcomes, read_trajectories
from orchestrator.sinks import read_metrics

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

PINNED = """
reward/mean reward/letters/mean reward/letters/std reward/unscored_ratio reward/errored_ratio reward/timed_out_ratio
group/zero_variance_ratio group/all_right group/all_wrong group/filtered group/failed group/stale
staleness/stale_ratio staleness/stale_token_ratio staleness/mean staleness/max staleness/in_flight_mean
staleness/in_queue_mean actor/entropy actor/ppo_kl actor/clip_ratio actor/grad_norm actor/lr actor/loss
mismatch/kl mismatch/ess mismatch/ratio_mean mismatch/ratio_max response_length/mean response_length/max
response_length/truncated_ratio bias/trained_to_dispatched_length bias/trained_to_dispatched_pass_rate
weights/pause_s weights/total_s weights/probe_gap time_s/batch perf/generated_tokens_per_s optimizer_step
"""


def test_eight_lines_of_python_and_a_file_train_a_model(launch: Callable, tmp_path: Path, small: list[str]) -> None:
    """With GSPO, and synchronously: with staleness.max=0 nothing that is trained on is stale."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"Line {i}, please.", "letter": "e"}) + "\n" for i in range(64)))
    overrides = [o for o in small if not o.startswith("data")]
    overrides += [f"run.dir={tmp_path / 'runs'}", "run.name=run", "run.batches=10", "learner.learning_rate=6e-3"]
    overrides += ["algorithm=gspo", "algorithm.updates_per_batch=2"]
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent(f"""
            from orchestrator import train

            def reward(completion, letter):
                return completion.count(letter) / (len(completion) + 1)

            result = train(model="builtin:tiny", data={str(rows)!r}, reward=reward, overrides={overrides})
            print("the model is in", result.model_dir)
        """)
    )
    run = launch(program=program)
    assert run.finish() == 0, run.output
    run.assert_nothing_left()
    assert f"the model is in {run.folder / 'model'}" in run.output
    for noise in ("SIGTERM", "uthentication", "worker processes"):
        assert noise not in run.output
    records = read_metrics(run.folder / "metrics.jsonl")
    assert [r["policy_version"] for r in records] == list(range(1, 11))
    assert all(r["staleness/stale_ratio"] == r["staleness/max"] == 0 for r in records)
    rewards = [r["reward/reward/mean"] for r in records]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.05


def test_two_engines_and_two_zero3_ranks_learn_off_policy(launch: Callable) -> None:
    run = launch(
        "run.batches=14",
        "rollout.replicas=2",
        "learner.ranks=2",
        "learner.zero_stage=3",
        "staleness.max=2",
        "rollout.max_response_tokens=32",
        "checkpoint.every_batches=0",
    )
    assert run.finish(240) == 0, run.output
    run.assert_nothing_left()
    records = read_metrics(run.folder / "metrics.jsonl")
    assert [r["policy_version"] for r in records] == list(range(1, 15))
    for record in records:
        assert record["weights/probe_gap"] < 1e-3  # the largest of both engines
        assert record["staleness/max"] <= 2
    # Figures of scored groups are absent where none was scored since the record before.
    assert set(PINNED.split()) <= set().union(*records)
    assert any(record["staleness/stale_ratio"] > 0 for record in records)
    assert all(sum(r[f"rollout/rollout-{i}/answers"] for r in records) > 0 for i in range(2))
    rewards = [r["reward/mean"] for r in records if "reward/mean" in r]
    assert len(rewards) >= 4  # taking turns, several batches may be learned from before the engines write again
    assert sum(rewards[-2:]) / 2 > sum(rewards[:2]) / 2 + 0.1
    assert_generates_in_transformers(run.folder / "model")
    assert_generates_in_vllm(run.folder / "model")


SLOW_REWARD = """
import time

def slow(completion):
    time.sleep(0.002 * len(completion))
    return float(completion.count("e") > len(completion) / 12)
"""


def test_slow_answers_are_trained_on_like_fast_ones(launch: Callable, tmp_path: Path) -> None:
    """Engine and learner at the same time, long answers slow to write and to judge, groups of equal rewards set aside."""
    (tmp_path / "slow.py").write_text(SLOW_REWARD)
    run = launch(
        "placement=split",
        "reward=custom",
        f"reward.functions.slow.path={tmp_path / 'slow.py'}:slow",
        "run.batches=7",
        "staleness.max=2",
        "rollout.max_response_tokens=128",
        "sampling.groups_per_batch=8",
        "sampling.answers_per_group=4",
        "checkpoint.every_batches=0",
    )
    assert run.finish(400) == 0, run.output
    records = read_metrics(run.folder / "metrics.jsonl")
    outcomes = read_outcomes(run.folder).to_pylist()
    fates = collections.Counter(o["outcome"] for o in outcomes)
    assert fates["trained"] == 7 * 8
    assert fates["filtered"] > 0
    assert set(fates) == {"trained", "filtered"}  # nothing was too old, nothing was given up
    lengths = [length for o in outcomes for length in o["response_lengths"]]
    assert max(lengths) > 2 * min(lengths)
    # Drained, consumed is what was asked for: exactly.
    ratios = [r["bias/trained_to_dispatched_length"] for r in records]
    assert ratios[-1] == 1
    assert all(0.95 < ratio < 1.05 for ratio in ratios)
    assert max(r["staleness/max"] for r in records) == 2
    assert all(r["staleness/left_out"] == r["group/stale"] == 0 for r in records)
    capacity = 3 * 8
    live = ("generating", "scoring", "parked", "ready", "training")
    assert max(sum(r[f"queue/{stage}"] for stage in live) for r in records) <= capacity
    spans = read_trajectories(run.folder, columns=["version_spans"])["version_spans"].to_pylist()
    assert any(len({span["version"] for span in of_one}) > 1 for of_one in spans)  # weights changed under answers


def assert_generates_in_transformers(folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "Write a line."}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    written = model.generate(**inputs, max_new_tokens=8, min_new_tokens=8)
    assert written.shape[1] == inputs["input_ids"].shape[1] + 8


def assert_generates_in_vllm(folder: Path) -> None:
    program = f"""
        from vllm import LLM, SamplingParams

        llm = LLM({str(folder)!r}, dtype="float32", enforce_eager=True, max_model_len=256, kv_cache_memory_bytes=2**26)
        [output] = llm.generate(["Write a line."], SamplingParams(max_tokens=8, ignore_eos=True))
        assert len(output.outputs[0].token_ids) == 8
    """
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


PROMPTS = 40  # one epoch: ten batches of four groups
HASHED = [
    f"data.train.main.options.size={PROMPTS}",
    "data.epochs=1",
    "reward=custom",
    "reward.functions.hash.path=reward_workers.builtin.hash_reward",
    "checkpoint.every_batches=2",
    "staleness.max=1",
    "run.deterministic=true",
    "model.fp32_head=true",
    "algorithm.kl_coefficient=0.1",
    "algorithm.kl_target=1e-6",
    "algorithm.kl_horizon_answers=100",
]


def test_a_killed_driver_leaves_nothing_and_its_run_resumes_exactly(launch: Callable, lingering: list[Any]) -> None:
    killed = launch(*HASHED)
    killed.wait_for_version(5)
    killed.process.kill()
    killed.process.wait()
    # Ray's two agents may try for a minute to tell the head, which is gone, that their node is gone. They hold nothing.
    killed.assert_nothing_left(but=["ray::DashboardAgent", "ray::RuntimeEnvAgent"])
    lingering.append(killed)
    assert max(r["policy_version"] for r in killed.records()) < 10

    resumed = launch(*HASHED, "checkpoint.resume=auto")
    assert resumed.finish() == 0, resumed.output
    resumed.assert_nothing_left()

    outcomes = read_outcomes(resumed.folder).to_pylist()
    settled = collections.Counter(o["prompt_id"] for o in outcomes)
    assert len(settled) == PROMPTS
    assert set(settled.values()) == {1}  # trained, filtered and failed prompts partition the epoch
    assert {o["outcome"] for o in outcomes} == {"trained"}
    records = read_metrics(resumed.folder / "metrics.jsonl")
    assert [r["policy_version"] for r in records] == list(range(1, 11))
    assert [r["optimizer_step"] for r in records] == list(range(1, 11))
    assert [r["lineage"] for r in records] == sorted(r["lineage"] for r in records)
    assert {r["lineage"] for r in records} == {0, 1}
    coefficient = 0.1
    for r in records:  # the controller's, over the resume
        assert r["actor/kl_coefficient"] == pytest.approx(coefficient)
        error = min(max(r["actor/kl_ref"] / 1e-6 - 1, -0.2), 0.2)
        coefficient *= 1 + error * r["batch/answers"] / 100
    assert coefficient != 0.1
    trained = read_trajectories(resumed.folder, columns=["policy_version", "optimizer_step_start", "group_id"])
    steps = {(t["policy_version"], t["optimizer_step_start"]) for t in trained.to_pylist()}
    assert steps == {(i, i) for i in range(10)}
    assert len(set(trained["group_id"].to_pylist())) == PROMPTS
    assert (resumed.folder / "model" / "model.safetensors").exists()


def test_an_interrupted_run_ends_soon_and_leaves_nothing(launch: Callable) -> None:
    """One while it starts, by Ctrl-C, which reaches the whole foreground process group; one in mid-training, by a service
    manager's SIGTERM, which the driver alone gets."""
    starting, training = (launch("run.batches=1000", "checkpoint.every_batches=0", name=name) for name in ("a", "b"))
    starting.wait_for(lambda: starting.processes("EngineCore"), "an engine")
    os.killpg(starting.process.pid, signal.SIGINT)
    assert_interrupted(starting)
    training.wait_for_version(2)
    os.kill(training.process.pid, signal.SIGTERM)
    assert_interrupted(training)


def assert_interrupted(run: Any) -> None:
    assert run.finish(45) == 130, run.output
    assert "headway: interrupted" in run.output
    assert "Traceback" not in run.output
    run.assert_nothing_left()


def test_a_run_survives_the_death_of_an_engine_and_of_a_reward_process(launch: Callable) -> None:
    """The engine serves an adapter: a new one begins with none, and must not answer before it has the current one."""
    run = launch(
        "run.batches=8",
        "reward.workers=1",
        "rollout.max_response_tokens=64",
        "checkpoint.every_batches=0",
        "model.lora.rank=4",
        "rollout.weights.transport=lora",
    )
    run.wait_for_version(2)
    [engine] = run.processes("EngineCore")
    os.kill(engine, signal.SIGKILL)
    run.wait_for_version(4)
    assert engine not in run.processes("EngineCore")
    for reward in run.processes("reward_workers.process"):
        os.kill(reward, signal.SIGKILL)
    run.wait_for_version(6)
    for reward in run.processes("ray::RewardWorker"):
        os.kill(reward, signal.SIGKILL)
    assert run.finish() == 0, run.output
    run.assert_nothing_left()

    records = read_metrics(run.folder / "metrics.jsonl")
    assert [r["policy_version"] for r in records] == list(range(1, 9))
    assert sum(r["rollout/rollout-0/restarts"] for r in records[-1:]) == 1
    assert sum(r["rollout/retries"] for r in records) >= 1
    assert all(r["weights/probe_gap"] < 1e-3 for r in records)  # the new engine has the current weights
    rows = read_trajectories(run.folder).to_pylist()
    assert len(rows) == 8 * 4 * 8
    for row in rows:  # nothing is invented: every answer was written by an engine, token by token
        sampled = sum(row["response_mask"])
        assert sampled == sum(span["end"] - span["start"] for span in row["version_spans"]) > 0
        assert row["reward_status"] == "scored"
        gaps = [
            abs(behaviour - learner)
            for behaviour, learner, mask in zip(
                row["behaviour_logprobs"], row["learner_logprobs"], row["response_mask"], strict=True
            )
            if mask
        ]
        assert max(gaps) < 1e-3
    assert_adapter_is_the_models(run.folder)


def assert_adapter_is_the_models(folder: Path) -> None:
    """`adapter/` on the base that it names gives what `model/` gives."""
    import torch
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM

    adapted = AutoPeftModelForCausalLM.from_pretrained(folder / "adapter", dtype=torch.float32)
    merged = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    ids = torch.arange(3, 80)[None]
    with torch.no_grad():
        found, expected = adapted(ids).logits, merged(ids).logits
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
        with adapted.disable_adapter():
            assert (adapted(ids).logits - expected).abs().max() > 1e-2


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system that has room for one checkpoint (4.2 MB), not for two."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("only root can mount a small file system")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_ends_the_run_and_spares_the_old_checkpoint(launch: Callable, small_disk: Path) -> None:
    run = launch("run.batches=20", "checkpoint.every_batches=2", directory=small_disk)
    assert run.finish() == 1, run.output
    run.assert_nothing_left()
    assert "CheckpointError: the checkpoint of version 4 could not be written" in run.output
    assert "bytes are free" in run.output
    assert "Traceback (most recent call last)" not in run.output
    from orchestrator.checkpoint import CheckpointStore

    checkpoint = CheckpointStore(run.folder / "checkpoints", 2).latest()
    assert checkpoint is not None
    assert checkpoint.version == 2
    assert [path.name for path in (run.folder / "checkpoints").iterdir()] == ["v000002"]
