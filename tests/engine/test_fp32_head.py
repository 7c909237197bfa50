"""Engine and learner in bfloat16, with a bfloat16 and with a float32 head: how far their logprobs are apart."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from replicas import Replica, changed

from learner.policy import Policy, PolicySettings
from learner.tensors import text_tensors
from orchestrator.placement import actor_environment
from rollout_workers.engine import EngineSettings
from rollout_workers.weights.bucket import pack
from rollout_workers.weights.spool import Spool

pytestmark = pytest.mark.engine

PROMPTS = [list(range(3 + i, 43 + i)) for i in range(4)]
LOGIT = 50.0  # about; bfloat16 tells such numbers apart by a quarter


@pytest.fixture(scope="module")
def large_logits(tiny: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tiny model with logits as large as those of a trained one: its embeddings have a direction in common."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path_factory.mktemp("large_logits")
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype="bfloat16")
    with torch.no_grad():
        weight = model.get_input_embeddings().weight
        weight += LOGIT / weight.shape[1]  # a hidden state has a root mean square of 1
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def engines(large_logits: str, runner: asyncio.Runner, ray_session: None) -> Iterator[dict[bool, Any]]:
    """By whether the head is in float32."""
    import ray

    options = {"num_cpus": 0, "max_concurrency": 100, "runtime_env": {"env_vars": actor_environment(1, "cpu")}}

    async def start() -> dict[bool, Any]:
        actors = {}
        for fp32_head in (False, True):
            settings = EngineSettings(
                large_logits, "bfloat16", "cpu", 256, 8, seed=1, kv_cache_mib=64, fp32_head=fp32_head
            )
            actors[fp32_head] = ray.remote(Replica).options(**options).remote(settings)
        await asyncio.wait_for(asyncio.gather(*[actor.start.remote(0) for actor in actors.values()]), 120)
        return actors

    actors = runner.run(start())
    yield actors
    for actor in actors.values():
        ray.kill(actor)


async def mean_gap(engine: Any, policy: Policy, version: int) -> float:
    """Mean |learner's - engine's logprob| of tokens that the engine samples."""
    arguments: dict[str, Any] = {"temperature": 1.0, "max_tokens": 32, "eos_ids": []}
    writing = [engine.write.remote("", prompt, seed=i, **arguments) for i, prompt in enumerate(PROMPTS)]
    gaps = []
    for prompt, answer in zip(PROMPTS, await asyncio.wait_for(asyncio.gather(*writing), 60), strict=True):
        assert {span.version for span in answer.version_spans} == {version}
        with torch.no_grad():
            logprobs, _ = policy(text_tensors([[*prompt, *answer.token_ids.tolist()]]), 1.0)
        gaps.append(np.abs(logprobs[0, len(prompt) - 1 :].numpy() - answer.logprobs))
    return float(np.concatenate(gaps).mean())


async def publish(engine: Any, policy: Policy, version: int) -> None:
    spool = Spool()
    spool.add(pack(list(policy.model.named_parameters())))
    try:
        await asyncio.wait_for(engine.load.remote(version, spool.update_infos()), 60)
    finally:
        spool.clear()


def test_a_float32_head_brings_engine_and_learner_together_and_an_update_leaves_it_so(
    engines: dict[bool, Any], large_logits: str, runner: asyncio.Runner
) -> None:
    policies = {head: Policy(PolicySettings(large_logits, "bfloat16", fp32_head=head)) for head in engines}

    async def gaps(version: int) -> dict[bool, float]:
        return {head: await mean_gap(engine, policies[head], version) for head, engine in engines.items()}

    before = runner.run(gaps(0))
    weights = changed(policies[False].model, seed=5).state_dict()
    for head, engine in engines.items():
        policies[head].model.load_state_dict(weights)
        runner.run(publish(engine, policies[head], 1))
    after = runner.run(gaps(1))
    for found in (before, after):
        assert found[True] < found[False] / 4
        assert found[True] < 0.01
