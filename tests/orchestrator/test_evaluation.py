"""Evaluation: the figures of a set, and what is written beside them. Its place in the loop is tested in test_run.py."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
from fakes import FakeEngine, LocalActor, fake_config, patch_ray, reward_fleet, rollout_fleet

from orchestrator.clerks import Clerk, ClerkFleet
from orchestrator.config import SourceConfig
from orchestrator.estimates import wilson_interval
from orchestrator.evaluation import Answered, EvaluationError, Evaluator, metrics_of, summarise, table
from orchestrator.metrics import find
from orchestrator.prompts import Prompt, load_source
from rollout_workers.trajectory import RewardResult, Status, Trajectory
from rollout_workers.worker import RolloutRequest

PROMPT = Prompt("p", "s", ({"role": "user", "content": "?"},), {}, None, 0, "?")


def answered(passed: Sequence[bool | None], votes: Sequence[str | None] | None = None, length: int = 10) -> Answered:
    n = len(passed)
    return Answered(PROMPT, ["text"] * n, passed, votes or [str(p) for p in passed], [length] * n, [False] * n)


class TestSummary:
    def test_pass_at_1_is_the_mean_over_prompts(self) -> None:
        result = summarise("s", 3, [answered([True] * 4), answered([True, False, False, False]), answered([False] * 4)])
        assert result.pass_at_1 == pytest.approx(1.25 / 3)
        assert result.interval == wilson_interval(1.25, 3)
        assert result.metrics["eval/s/pass_at_k"] == pytest.approx(2 / 3)
        assert (result.name, result.version) == ("s", 3)

    def test_maj_at_k_counts_votes(self) -> None:
        """Two of three say 5 and are wrong; the one that is right is outvoted. In the other, the right ones agree."""
        result = summarise(
            "s",
            0,
            [answered([False, False, True], ["5", "5", "7"]), answered([True, True, False], ["7", "7", "1"])],
        )
        assert result.metrics["eval/s/maj_at_k"] == pytest.approx(0.5)

    def test_one_answer_a_prompt_has_no_k(self) -> None:
        metrics = summarise("s", 0, [answered([True]), answered([False])]).metrics
        assert "eval/s/pass_at_k" not in metrics
        assert metrics["eval/s/pass_at_1"] == 0.5

    def test_answers_without_a_verdict_are_left_out_and_counted(self) -> None:
        result = summarise("s", 0, [answered([True, None]), answered([None, None])])
        assert result.pass_at_1 == 1.0
        assert result.metrics["eval/s/unscored_ratio"] == pytest.approx(3 / 4)
        assert result.interval == wilson_interval(1.0, 1)

    def test_f24_no_verdict_at_all_is_no_pass_rate_of_zero(self) -> None:
        result = summarise("s", 0, [answered([None, None])])
        assert result.metrics["eval/s/unscored_ratio"] == 1.0
        assert math.isnan(result.pass_at_1)
        assert result.interval == (0.0, 1.0)
        assert not [name for name in metrics_of([result]) if "pass_at" in name or "maj_at" in name]
        assert table([result])[0] == ("s", "pass@1 -, version 0")

    def test_f24_an_answer_without_a_verdict_has_no_vote(self) -> None:
        """It says 7, as the one that is right does, and must not make that one wrong, nor outvote it with something else."""
        for votes in (["7", "7", "1"], ["7", "1", "1"]):
            result = summarise("s", 0, [answered([True, None, None], votes)])
            assert result.metrics["eval/s/maj_at_k"] == 1.0

    def test_every_metric_is_in_the_catalogue(self) -> None:
        for name in metrics_of([summarise("s", 0, [answered([True, False])])]):
            find(name)

    def test_the_first_set_stands_for_all(self) -> None:
        results = [summarise("a", 0, [answered([True])]), summarise("b", 0, [answered([False])])]
        values = metrics_of(results)
        assert values["eval/pass_at_1"] == values["eval/a/pass_at_1"] == 1.0
        assert values["eval/b/pass_at_1"] == 0.0
        assert metrics_of([]) == {}
        assert [row[0] for row in table(results)] == ["a", "", "", "b", "", ""]


class TestEvaluator:
    def evaluate(self, tmp_path: Path, engine: FakeEngine, rule, *overrides: str):  # type: ignore[no-untyped-def]
        async def scenario():  # type: ignore[no-untyped-def]
            config = fake_config("eval.answers_per_prompt=3", "eval.samples=2", *overrides)
            rows = SourceConfig(generator="orchestrator.tasks.synthetic", options={"size": 4, "split": "eval"})
            rollouts = rollout_fleet(lambda index: engine, max_restarts=0)
            await rollouts.start(0)
            clerks = ClerkFleet([LocalActor(Clerk())], 5.0)
            sets = [load_source("held_out", rows, "eval")]
            evaluator = Evaluator(config, sets, rollouts, reward_fleet([rule]), clerks, tmp_path / "eval")
            return await evaluator.run(0)

        return asyncio.run(scenario())

    def test_a_set_is_answered_judged_and_written(self, tmp_path: Path) -> None:
        engine = FakeEngine()
        (result,) = self.evaluate(tmp_path, engine, lambda t: float(t.index == 0))
        assert result.pass_at_1 == pytest.approx(1 / 3)
        assert len(engine.requests) == 4
        assert {r.sampling.seed_base for r in engine.requests} == {0}  # the same draws at every version
        lines = [json.loads(line) for line in (tmp_path / "eval" / "v000000-held_out.jsonl").read_text().splitlines()]
        assert [line["passed"] for line in lines] == [True, False, False] * 2
        assert lines[1]["completion"] == "answer 1"

    def test_a_threshold_decides_what_counts_as_right(self, tmp_path: Path) -> None:
        (result,) = self.evaluate(tmp_path, FakeEngine(), lambda t: 0.7, "eval.pass_threshold=0.7")
        assert result.pass_at_1 == 1.0

    def test_votes_come_from_the_checkers_detail(self, tmp_path: Path) -> None:
        def rule(trajectory: Trajectory) -> RewardResult:
            said = ["7", "7", "1"][trajectory.index]
            return RewardResult(float(said == "7"), detail={"checker": {"answer": said}})

        (result,) = self.evaluate(tmp_path, FakeEngine(), rule)
        assert result.metrics["eval/held_out/maj_at_k"] == 1.0

    def test_an_unscored_answer_is_not_wrong(self, tmp_path: Path) -> None:
        (result,) = self.evaluate(
            tmp_path, FakeEngine(), lambda t: 1.0 if t.index else RewardResult(None, Status.TIMED_OUT)
        )
        assert result.pass_at_1 == 1.0
        assert result.metrics["eval/held_out/unscored_ratio"] == pytest.approx(1 / 3)

    def test_a_missing_answer_is_an_error(self, tmp_path: Path) -> None:
        def fails(request: RolloutRequest, index: int) -> bool:
            return index == 2

        with pytest.raises(EvaluationError, match=r"prompt held_out:\d+ failed: TimeoutError: too slow"):
            self.evaluate(tmp_path, FakeEngine(fails=fails), lambda t: 1.0)

    @pytest.fixture(autouse=True)
    def no_ray(self, monkeypatch: pytest.MonkeyPatch) -> None:
        patch_ray(monkeypatch)
