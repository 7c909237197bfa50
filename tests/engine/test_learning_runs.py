"""Runs that learn with a KL term and several updates a batch, wherever the reference lives."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from learner.rank_group import LearnerError
from learner.reference_group import ACTOR, ReferenceGroup
from orchestrator.sinks import read_metrics

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

BATCHES = 8


def learned(run: Any) -> list[dict[str, Any]]:
    """The records of a run that ended well, and with clearly more reward than it began with."""
    assert run.finish(300) == 0, run.output
    run.assert_nothing_left()
    records = read_metrics(run.folder / "metrics.jsonl")
    assert [r["policy_version"] for r in records] == list(range(1, BATCHES + 1))
    rewards = [r["reward/mean"] for r in records]
    assert sum(rewards[-2:]) / 2 > sum(rewards[:2]) / 2 + 0.1
    return records


def test_a_kl_term_learns_alike_with_its_reference_in_the_ranks_and_with_one_that_is_killed(launch: Callable) -> None:
    """Four updates a batch; the reference says the same from actors of its own, also from the one that replaced another."""
    overrides = [f"run.batches={BATCHES}", "run.deterministic=true", "checkpoint.every_batches=0"]
    overrides += ["algorithm.kl_coefficient=0.01", "algorithm.updates_per_batch=4"]
    in_ranks = launch(*overrides, name="ranks")
    own = launch(*overrides, "learner.reference=own", name="own")
    own.wait_for(lambda: len(own.records()) >= 2, "version 2", 300)
    [actor] = own.processes("ray::ReferenceActor")
    os.kill(actor, signal.SIGKILL)
    own.wait_for(lambda: own.processes("ray::ReferenceActor").keys() - {actor}, "another reference actor")

    expected, records = learned(in_ranks), learned(own)
    divergences = [r["actor/kl_ref"] for r in expected]
    assert 0 < divergences[0] < 0.1  # of the first of its updates it is 0
    assert divergences[-1] > 5 * divergences[0]
    assert [r["optimizer_step"] for r in expected] == list(range(4, 4 * BATCHES + 1, 4))
    for name in ("actor/kl_ref", "actor/loss", "actor/grad_norm", "reward/mean"):
        assert [r[name] for r in records] == pytest.approx([r[name] for r in expected], rel=1e-3, abs=1e-5), name


def test_a_call_is_made_again_once_by_the_actor_that_replaces_a_lost_one(
    ray_session: None, runner: asyncio.Runner, tmp_path: Path
) -> None:
    class Dying:
        """Asked for a name and a number, it dies so many times of it."""

        def score(self, answers: tuple[str, int]) -> tuple[int, str]:
            call, deaths = answers
            with (tmp_path / call).open("a") as file:
                file.write(".")
            if (tmp_path / call).stat().st_size <= deaths:
                os._exit(1)
            return 1, call

    async def ask() -> None:
        import ray

        group = ReferenceGroup([ray.remote(Dying).options(**ACTOR).remote()], start_timeout_s=60, timeout_s=60)
        try:
            assert await (await group.score(("unharmed", 0))) == "unharmed"
            assert await (await group.score(("once", 1))) == "once"
            with pytest.raises(LearnerError, match="reference actor 0 is gone"):
                await group.score(("twice", 2))
        finally:
            await group.close()

    runner.run(ask())
