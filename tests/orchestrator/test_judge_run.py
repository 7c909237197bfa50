"""A judge in a run: refused before anything starts; and a rollout actor as a judge."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import judge_server
import numpy as np
import pytest
from judge_server import error, read_sheet, serving, stated

from orchestrator.compose import load
from orchestrator.config import ConfigError
from orchestrator.judge_actor import ActorJudge
from orchestrator.prepare import prepare
from reward_workers.judge import Judge, TrajectoryScore, ruler
from reward_workers.judge_client import JudgeCallError
from rollout_workers.trajectory import Trajectory
from rollout_workers.worker import MemberReport, RolloutReport, RolloutRequest

pytestmark = pytest.mark.thorough


def overrides(folder: Path, **options: Any) -> list[str]:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"say {i}"}) + "\n" for i in range(8)))
    given = [f'reward.functions.judge.options.{key}="{value}"' for key, value in options.items()]
    return [
        "experiment=tiny",
        "data=files",
        f'data.train.mine.path="{file}"',
        "reward=judge",
        f"run.dir={folder}",
        *given,
    ]


class TestARun:
    @pytest.mark.parametrize(
        ("options", "problem"),
        [
            ({}, "set OPENAI_API_KEY"),
            ({"judge": "nonsense"}, "knows no such model"),
            ({"rubric": "missing.md"}, "no such file"),
        ],
    )
    def test_with_a_judge_that_can_not_be_used_is_refused(
        self, options: dict[str, str], problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("OPENAI_API_KEY", raising=False)
        with pytest.raises(ConfigError, match=rf"reward\.functions\.judge: .*{problem}"):
            prepare(load(overrides(tmp_path, **options)))

    def test_with_a_model_that_the_server_does_not_have_is_refused(self, tmp_path: Path) -> None:
        with serving(lambda _: error(404, "the model `mine` does not exist")) as server:
            config = load(overrides(tmp_path, judge="hosted_vllm/mine", api_base=server.base))
            with pytest.raises(ConfigError, match=r"reward\.functions\.judge: .*`mine` does not exist"):
                prepare(config)

    def test_with_a_judge_that_answers_is_prepared(self, tmp_path: Path) -> None:
        with serving(lambda _: "ready") as server:
            prepared = prepare(load(overrides(tmp_path, judge="hosted_vllm/mine", api_base=server.base)))
        assert prepared.rewards.primary == "judge"
        assert len(server.requests) == 1


class Actor:
    """What a rollout actor answers, without an engine: the honest judge's reply, or what the test wants."""

    def __init__(self, how: str) -> None:
        self._how = how

    async def generate(self, request: RolloutRequest) -> tuple[RolloutReport, tuple[Trajectory, ...]]:
        if self._how == "die":
            os._exit(1)
        if self._how == "fail":
            return RolloutReport((MemberReport(0, error="the prompt is too long"),), 0.0, 1.0), ()
        (index,) = request.indexes
        reply = stated(read_sheet({"messages": [dict(message) for message in request.messages]}))
        trajectory = Trajectory(
            request.group_id,
            index,
            request.prompt_id,
            (*request.messages, {"role": "assistant", "content": reply}),
            np.zeros(1, np.int32),
            np.ones(1, bool),
            np.zeros(1, np.float32),
            (),
            "stop",
        )
        return RolloutReport((MemberReport(index, response_length=1),), 0.0, 1.0), (trajectory,)


NUMBERS = [
    [{"role": "user", "content": "?"}, {"role": "assistant", "content": text}] for text in ("0.25", "0.5", "1.0", "0")
]


@pytest.mark.engine
class TestARolloutActor:
    @pytest.fixture(autouse=True)
    def by_value(self, ray_session: None) -> Iterator[None]:
        """Ray's processes can't import the tests."""
        from ray import cloudpickle

        modules = [sys.modules[__name__], judge_server]
        for module in modules:
            cloudpickle.register_pickle_by_value(module)
        yield
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)

    def scores(self, how: str, **options: Any) -> list[TrajectoryScore]:
        import ray

        actor = ray.remote(Actor).options(num_cpus=0).remote(how)
        try:
            judge = Judge(ActorJudge(actor, "mine", **options), tries=1)
            assert judge.name == "mine"
            return asyncio.run(ruler(NUMBERS, judge))
        finally:
            ray.kill(actor)

    def test_judges(self) -> None:
        assert [score.score for score in self.scores("judge")] == [0.25, 0.5, 1.0, 0.0]

    @pytest.mark.parametrize(
        ("how", "problem"), [("die", "its actor was lost"), ("fail", "gave no answer: the prompt is too long")]
    )
    def test_that_fails_leaves_its_reason(self, how: str, problem: str) -> None:
        scores = self.scores(how)
        assert {score.score for score in scores} == {None}
        assert problem in scores[0].explanation
        assert JudgeCallError.__name__ in scores[0].explanation
