"""A real rollout actor as a judge: what it is asked reaches the engine, and its text comes back."""

from __future__ import annotations

import asyncio

import pytest

from orchestrator.judge_actor import ActorJudge
from orchestrator.placement import actor_environment
from reward_workers.judge import Judge
from reward_workers.judge_client import JudgeCallError, Usage
from rollout_workers.engine import EngineSettings
from rollout_workers.worker import RolloutWorker

pytestmark = pytest.mark.engine


def test_answers_and_refuses_as_an_engine_does(tiny: str, ray_session: None) -> None:
    import ray

    settings = EngineSettings(tiny, "float32", "cpu", 256, 8, seed=0, kv_cache_mib=64)
    options = {"num_cpus": 0, "max_concurrency": 10, "runtime_env": {"env_vars": actor_environment(1, "cpu")}}
    actor = ray.remote(RolloutWorker).options(**options).remote(settings, {})
    try:
        ray.get(actor.start.remote(0), timeout=120)
        judge = Judge(ActorJudge(actor, "tiny", max_tokens=8), tries=1)
        short, long = ([{"role": "user", "content": text}] for text in ("Hello.", "Hello. " * 300))

        async def texts() -> list[str]:
            return [reply.text for reply in await asyncio.gather(*(judge.ask(short, Usage()) for _ in range(3)))]

        first, second, third = asyncio.run(texts())
        assert first == second == third  # temperature 0
        assert first
        with pytest.raises(JudgeCallError, match="leave no room to answer"):
            asyncio.run(judge.ask(long, Usage()))
    finally:
        ray.get(actor.close.remote(), timeout=30)
        ray.kill(actor)
