"""Measuring pass rates: what counts, what failed, what is written down and taken up again."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeEngine, LocalActor, fake_config, patch_ray, rollout_fleet

from orchestrator.clerks import Clerk, ClerkFleet
from orchestrator.config import Config, ConfigError, SourceConfig
from orchestrator.fleet import FleetError
from orchestrator.prepare import prepare
from orchestrator.profile import (
    RATES,
    SETTINGS,
    Measured,
    Profiler,
    RateLog,
    content_of,
    count,
    for_profile,
    in_order,
    judges,
    profile_folder,
    settings_of,
)
from orchestrator.prompts import Prompt, PromptSource, load_source
from orchestrator.reward_fleet import RewardFleet
from reward_workers.alarm import ErrorAlarm
from rollout_workers.trajectory import RewardResult, Status, Trajectory
from rollout_workers.worker import RolloutRequest

pytestmark = pytest.mark.thorough


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    patch_ray(monkeypatch)


def profile_config(*overrides: str) -> Config:
    return for_profile(fake_config("profile.answers_per_prompt=4", *overrides))


def source(size: int = 6, name: str = "main") -> PromptSource:
    rows = SourceConfig(generator="orchestrator.tasks.synthetic", options={"size": size})
    return load_source(name, rows, "train")


@dataclass
class Judge:
    """A reward worker that notes which functions were asked for."""

    rule: Callable[[Trajectory], RewardResult]
    names: list[Sequence[str] | None] = field(default_factory=list)

    async def score_group(
        self,
        trajectories: Sequence[Trajectory],
        columns: Any,
        names: Sequence[str] | None,
        text: str | None,
        given: Any = None,
    ) -> list[RewardResult]:
        self.names.append(names)
        return [self.rule(trajectory) for trajectory in trajectories]


def right_when(condition: Callable[[Trajectory], bool]) -> Callable[[Trajectory], RewardResult]:
    return lambda trajectory: RewardResult(2.0 * (value := float(condition(trajectory))), components={"right": value})


@dataclass
class Measurement:
    """Prompts measured with fakes; `finished` in the order in which they finished."""

    config: Config
    judge: Judge
    engine: Callable[[int], FakeEngine] = lambda index: FakeEngine()
    engines: list[FakeEngine] = field(default_factory=list)
    finished: list[Measured] = field(default_factory=list)
    alarm: ErrorAlarm = field(default_factory=lambda: ErrorAlarm(1.0))

    def of(self, prompts: Sequence[Prompt], restarts: int = 3) -> dict[str, Measured]:
        async def scenario() -> None:
            rollouts = rollout_fleet(self._engine, self.config.rollout.replicas, max_restarts=restarts)
            await rollouts.start(0)
            self.actors = [replica.handle for replica in rollouts._replicas]
            rewards = RewardFleet([LocalActor(self.judge)], deadline_s=5.0, tries=2, alarm=self.alarm)
            clerks = ClerkFleet([LocalActor(Clerk())], 5.0)
            profiler = Profiler(self.config, rollouts, rewards, clerks, filter_on="right")
            await profiler.run(iter(prompts), self.finished.append)

        asyncio.run(asyncio.wait_for(scenario(), 30))
        return {measured.prompt_id: measured for measured in self.finished}

    def _engine(self, index: int) -> FakeEngine:
        self.engines.append(self.engine(index))
        return self.engines[-1]


class TestMeasuring:
    def test_a_rate_is_the_mean_of_what_the_filter_looks_at(self) -> None:
        measurement = Measurement(profile_config(), Judge(right_when(lambda t: t.index == 3)))
        prompts = list(source(3))
        found = measurement.of(prompts)
        assert list(found) == [prompt.prompt_id for prompt in prompts]
        assert {m.rate for m in found.values()} == {0.25}
        assert {m.values for m in found.values()} == {(0.0, 0.0, 0.0, 1.0)}
        assert measurement.judge.names == [("right",)] * 3

    def test_a_failed_verdict_is_no_zero(self) -> None:
        def rule(trajectory: Trajectory) -> RewardResult:
            if trajectory.index == 1:
                return RewardResult(
                    None, Status.ERRORED, components={"right": None}, detail={"right": {"error": "KeyError: 'x'"}}
                )
            return RewardResult(1.0, components={"right": 1.0})

        (measured,) = Measurement(profile_config(), Judge(rule)).of(list(source(1))).values()
        assert measured.rate is None
        assert measured.values == (1.0, None, 1.0, 1.0)
        assert measured.reason == "3 of 4 answers were scored, 4 are needed; errored: KeyError: 'x'"
        lenient = profile_config("sampling.min_scored_fraction=0.7")
        (measured,) = Measurement(lenient, Judge(rule)).of(list(source(1))).values()
        assert measured.rate == 1.0

    def test_a_failed_generation_is_no_zero(self) -> None:
        engine = FakeEngine(fails=lambda request, index: index == 0)
        measurement = Measurement(
            profile_config("rollout.retries=1"), Judge(right_when(lambda t: True)), lambda i: engine
        )
        (measured,) = measurement.of(list(source(1))).values()
        assert measured.rate is None
        assert measured.values == (None, 1.0, 1.0, 1.0)
        assert "TimeoutError: too slow" in measured.reason
        assert [r.indexes for r in engine.requests] == [(0, 1, 2, 3), (0,)]

    def test_members_asked_again_are_judged_under_their_own_index(self) -> None:
        engine = FakeEngine(fails=lambda request, index: index in (0, 2) and request.attempt == 0)
        measurement = Measurement(profile_config(), Judge(right_when(lambda t: t.index == 2)), lambda i: engine)
        (measured,) = measurement.of(list(source(1))).values()
        assert measured.values == (0.0, 0.0, 1.0, 0.0)

    def test_a_reward_actor_that_can_not_judge_leaves_a_reason(self) -> None:
        class Dead(Judge):
            async def score_group(self, *arguments: Any) -> list[RewardResult]:
                raise TimeoutError

        measurement = Measurement(profile_config(), Dead(right_when(lambda t: True)))
        found = measurement.of(list(source(2)))
        assert [m.rate for m in found.values()] == [None, None]
        assert all("reward-0 did not answer" in m.reason for m in found.values())

    def test_a_row_without_that_function_is_judged_by_its_own(self) -> None:
        prompt = next(iter(source(1)))
        assert judges(prompt, "right") == ("right",)
        assert judges(replace(prompt, reward=("style", "right")), "right") == ("right",)
        assert judges(replace(prompt, reward=("style", "brief")), "right") == ("style", "brief")
        measurement = Measurement(profile_config(), Judge(lambda t: RewardResult(0.5, components={"style": 0.5})))
        (measured,) = measurement.of([replace(prompt, reward=("style",))]).values()
        assert measured.rate == 0.5

    def test_rates_outside_the_unit_interval_are_held_to_it(self) -> None:
        rule = lambda t: RewardResult(1.0, components={"right": 7.0})  # noqa: E731
        (measured,) = Measurement(profile_config(), Judge(rule)).of(list(source(1))).values()
        assert measured.rate == 1.0

    def test_no_more_groups_are_in_flight_than_the_engines_hold(self) -> None:
        now, most = [0], [0]

        def delay(request: RolloutRequest) -> float:
            now[0] += 1
            most[0] = max(most[0], now[0])
            return 0.001

        def rule(trajectory: Trajectory) -> RewardResult:
            now[0] -= trajectory.index == 0
            return RewardResult(1.0, components={"right": 1.0})

        config = profile_config("rollout.max_concurrent_answers=12", "rollout.replicas=2")
        found = Measurement(config, Judge(rule), lambda index: FakeEngine(delay_s=delay)).of(list(source(40)))
        assert len(found) == 40
        assert most[0] == 12 * 2 // 4

    def test_the_loss_of_an_engine_costs_nothing_but_time(self) -> None:
        measurement = Measurement(profile_config("rollout.replicas=2"), Judge(right_when(lambda t: t.index < 2)))

        def delay(request: RolloutRequest) -> float:
            if request.prompt_id.endswith("7") and request.attempt == 0:
                measurement.actors[0].kill()
            return 0.0

        measurement.engine = lambda index: FakeEngine(delay_s=delay)
        prompts = [replace(prompt, prompt_id=f"main:{n}") for n, prompt in enumerate(source(30))]
        found = measurement.of(prompts)
        assert len(found) == 30
        assert {m.rate for m in found.values()} == {0.5}
        assert len(measurement.engines) == 3

    def test_with_no_engine_left_it_ends_and_what_was_measured_stays(self) -> None:
        measurement = Measurement(profile_config("rollout.max_concurrent_answers=4"), Judge(right_when(lambda t: True)))

        def delay(request: RolloutRequest) -> float:
            if len(measurement.finished) == 3:
                measurement.actors[0].kill()
            return 0.0

        measurement.engine = lambda index: FakeEngine(delay_s=delay)
        with pytest.raises(FleetError, match="no rollout actor is left"):
            measurement.of(list(source(8)), restarts=0)
        assert len(measurement.finished) == 3

    def test_too_many_failures_of_the_reward_end_it(self) -> None:
        failed = RewardResult(None, Status.ERRORED, detail={"right": {"error": "no network"}})
        measurement = Measurement(profile_config(), Judge(lambda t: failed), alarm=ErrorAlarm(0.05))
        with pytest.raises(FleetError, match=r"reward\.max_error_ratio: .*no network"):
            measurement.of(list(source(30)))

    def test_answers_are_sampled_as_in_a_run(self) -> None:
        measurement = Measurement(profile_config("rollout.temperature=0.7"), Judge(right_when(lambda t: True)))
        measurement.of(list(source(1)))
        sampling = measurement.engines[0].requests[0].sampling
        assert (sampling.temperature, sampling.max_response_tokens, sampling.seed_base) == (0.7, 16, None)
        repeated = Measurement(
            profile_config("run.deterministic=true", "run.seed=5"), Judge(right_when(lambda t: True))
        )
        repeated.of(list(source(1)))
        assert repeated.engines[0].requests[0].sampling.seed_base == 5


class TestWhatToMeasure:
    def test_everything_once_in_a_runs_order(self) -> None:
        sources = [source(5, "a"), source(9, "b")]
        prompts = list(in_order(sources, profile_config()))
        assert sorted(p.prompt_id for p in prompts) == sorted(p.prompt_id for s in sources for p in s)
        assert [p.prompt_id for p in prompts] != [p.prompt_id for s in sources for p in s]
        assert count(sources, profile_config()) == 14

    def test_a_limit_takes_the_first_of_that_order(self) -> None:
        sources = [source(50, "a"), source(50, "b")]
        some = [p.prompt_id for p in in_order(sources, profile_config("profile.limit=10"))]
        every = [p.prompt_id for p in in_order(sources, profile_config())]
        assert some == every[:10]
        assert {prompt_id[0] for prompt_id in some} == {"a", "b"}
        assert count(sources, profile_config("profile.limit=10")) == 10
        assert count(sources, profile_config("profile.limit=1000")) == 100

    def test_the_parts_see_groups_of_a_profiles_size_and_no_batch(self) -> None:
        config = for_profile(
            fake_config("profile.answers_per_prompt=16", "sampling.groups_per_batch=64", "eval.max_response_tokens=500")
        )
        assert config.sampling.answers_per_group == 16
        assert config.data.eval == {}
        prepared = prepare(replace(config, data=replace(config.data, train={"main": source(3).config})))
        assert len(prepared.train[0]) == 3  # fewer than a batch of the run
        assert prepared.checker is None

    def test_where_the_results_go(self, tmp_path: Path) -> None:
        assert profile_folder(fake_config(f"profile.out={tmp_path}/x")) == tmp_path / "x"
        assert profile_folder(fake_config(f"run.dir={tmp_path}", "run.name=mine")) == tmp_path / "mine" / "difficulty"
        assert profile_folder(fake_config(f"run.dir={tmp_path}")) == tmp_path / "difficulty"


def measured(prompt: Prompt, rate: float | None) -> Measured:
    return Measured(prompt.prompt_id, content_of(prompt), rate, (rate,) * 4, "" if rate is not None else "why")


class TestLog:
    settings: dict[str, Any] = {"model.path": "m", "rollout.temperature": 1.0}  # noqa: RUF012

    def test_what_was_measured_is_taken_up_again(self, tmp_path: Path) -> None:
        a, b, c = source(3)
        with RateLog(tmp_path, self.settings) as log:
            log.add(measured(a, 0.5))
            log.add(measured(b, None))
            assert log.has_rate(a)
        with RateLog(tmp_path, self.settings) as log:
            assert log.get(a) == measured(a, 0.5)
            assert log.get(b) == measured(b, None)
            assert [log.has_rate(prompt) for prompt in (a, b, c)] == [True, False, False]
            log.add(measured(b, 1.0))
        with RateLog(tmp_path, self.settings) as log:
            assert log.get(b) == measured(b, 1.0)
            assert len(log) == 2

    def test_a_line_that_a_kill_cut_short_is_cut_off(self, tmp_path: Path) -> None:
        a, b, _ = source(3)
        with RateLog(tmp_path, self.settings) as log:
            log.add(measured(a, 0.5))
            log.add(measured(b, 0.5))
        content = (tmp_path / RATES).read_bytes()
        (tmp_path / RATES).write_bytes(content[:-20])
        with RateLog(tmp_path, self.settings) as log:
            assert [log.has_rate(prompt) for prompt in (a, b)] == [True, False]
            log.add(measured(b, 0.5))
        assert (tmp_path / RATES).read_bytes() == content

    def test_text_of_any_kind_survives(self, tmp_path: Path) -> None:
        a = next(iter(source(1)))
        odd = replace(measured(a, None), reason="two\u2028lines\nand “quotes”")
        with RateLog(tmp_path, self.settings) as log:
            log.add(odd)
        with RateLog(tmp_path, self.settings) as log:
            assert log.get(a) == odd

    def test_other_settings_are_refused_by_key(self, tmp_path: Path) -> None:
        with RateLog(tmp_path, self.settings) as log:
            log.add(measured(next(iter(source(1))), 0.5))
        with pytest.raises(ConfigError) as caught:
            RateLog(tmp_path, {"model.path": "m", "rollout.temperature": 0.5, "model.dtype": "float32"})
        message = str(caught.value)
        assert message.startswith(f"profile.out={tmp_path}: holds pass rates that were measured otherwise: ")
        assert "model.dtype was None, is float32; rollout.temperature was 1.0, is 0.5" in message
        assert "model.path" not in message
        assert json.loads((tmp_path / SETTINGS).read_text()) == self.settings

    def test_settings_of_an_empty_log_may_change(self, tmp_path: Path) -> None:
        RateLog(tmp_path, self.settings).__exit__(None, None, None)
        RateLog(tmp_path, {"model.path": "other"}).__exit__(None, None, None)
        assert json.loads((tmp_path / SETTINGS).read_text()) == {"model.path": "other"}

    def test_a_prompt_that_was_edited_is_measured_again(self, tmp_path: Path) -> None:
        rows = tmp_path / "rows.jsonl"

        def prompt(answer: str, **config: Any) -> Prompt:
            rows.write_text(json.dumps({"id": 1, "prompt": "Say 7.", "answer": answer}))
            return next(iter(load_source("main", SourceConfig(path=str(rows), **config), "train")))

        with RateLog(tmp_path / "out", self.settings) as log:
            log.add(measured(prompt("7"), 0.5))
            assert log.has_rate(prompt("7"))
            assert not log.has_rate(prompt("8"))
            assert not log.has_rate(prompt("7", system_prompt="Be brief."))
            assert not log.has_rate(prompt("7", reward=["style"]))

    def test_a_line_of_something_else_is_named(self, tmp_path: Path) -> None:
        (tmp_path / RATES).write_text('{"prompt_id": "a"}\n')
        with pytest.raises(ConfigError, match=r"pass_rates\.jsonl:1: is not a line of a difficulty profile"):
            RateLog(tmp_path, self.settings)

    def test_what_a_rate_depends_on(self, tmp_path: Path) -> None:
        rows = tmp_path / "rows.jsonl"
        rows.write_text('{"prompt": "a", "answer": "b"}\n' * 4)
        base = ["data=files", f"data.train.main.path={rows}"]

        def settings(*overrides: str) -> dict[str, Any]:
            return settings_of(prepare(profile_config(*base, *overrides)))

        before = settings()
        assert before["sampling.filter_on"] == "letters"
        for changed in (
            "rollout.temperature=0.5",
            "rollout.max_response_tokens=8",
            "model.dtype=bfloat16",
            "model.chat_template_kwargs={a: 1}",
            "profile.answers_per_prompt=6",
            "sampling.min_scored_fraction=0.5",
            "reward.functions.letters.path=reward_workers.builtin.hash_reward",
        ):
            key = changed.partition("=")[0]
            now = settings(changed)
            assert [name for name in before if before[name] != now[name]] == [key]
        for same in ("profile.band=[0,1]", "profile.limit=2", "run.seed=1", "rollout.replicas=2", "data.seed=4"):
            assert settings(same) == before
