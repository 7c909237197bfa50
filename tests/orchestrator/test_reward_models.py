"""Reward models of a configuration: what a run makes of them, and what is refused with its key before anything starts."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
from reward_models import write_reward_model

from orchestrator.compose import load
from orchestrator.config import Config, ConfigError
from orchestrator.prepare import prepare
from orchestrator.profile import settings_of
from rollout_workers.trajectory import RewardResult


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_reward_model(tmp_path_factory.mktemp("reward_model"))


def config_for(tmp_path: Path, *overrides: str, prompt: Any = "say it", **columns: Any) -> Config:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"id": i, "prompt": prompt, **columns}) + "\n" for i in range(8)))
    return load(["experiment=tiny", "data=files", f'data.train.mine.path="{file}"', "reward=custom", *overrides])


def with_model(folder: Path, **options: Any) -> list[str]:
    given = {"path": f'"{folder}"', "dtype": "float32", **options}
    return [f"reward.models.rm.{key}={value}" for key, value in given.items()]


def short(completion: str) -> float:
    return -float(len(completion))


def bonus(completion: str, verdict: RewardResult) -> float:
    return 0.0


SHORT = f"reward.functions.short.path={__file__}:short"


class TestARun:
    def test_with_a_model_alone(self, folder: Path, tmp_path: Path) -> None:
        prepared = prepare(config_for(tmp_path, *with_model(folder, normalise="sigmoid", weight=2)))
        assert prepared.filter_on == "rm"
        [model] = prepared.rewards.models
        assert prepared.rewards.functions == ()
        assert (model.path, model.weight, model.gate) == (str(folder), 2.0, None)
        assert model.verdict(0.0).value == 0.5

    def test_with_functions_and_a_gate(self, folder: Path, tmp_path: Path) -> None:
        options = with_model(folder, gate="true", gate_threshold=0.25, normalise="standard", mean=1, std=2, clip=3)
        more = [SHORT, f"reward.functions.bonus.path={__file__}:bonus", "reward.functions.bonus.needs=rm"]
        prepared = prepare(config_for(tmp_path, *options, *more, "reward.primary=rm", "sampling.filter_on=short"))
        assert [component.name for component in prepared.rewards.components] == ["short", "bonus", "rm"]
        assert (prepared.rewards.primary, prepared.filter_on) == ("rm", "short")
        [model] = prepared.rewards.models
        assert model.gate == 0.25
        assert [model.verdict(score).value for score in (1.0, 3.0, 99.0)] == [0.0, 1.0, 3.0]

    def test_with_a_python_function(self, folder: Path, tmp_path: Path) -> None:
        prepared = prepare(config_for(tmp_path, *with_model(folder)), short)
        assert [component.name for component in prepared.rewards.components] == ["short", "rm"]
        assert prepared.rewards.primary == "short"
        prepared = prepare(config_for(tmp_path, *with_model(folder), "reward.primary=rm"), short)
        assert prepared.rewards.primary == "rm"

    def test_rows_and_sources_choose(self, folder: Path, tmp_path: Path) -> None:
        prepare(config_for(tmp_path, *with_model(folder), SHORT, "data.train.mine.reward=[rm]"))
        prepare(config_for(tmp_path, *with_model(folder), SHORT, reward=["short", "rm"]))
        with pytest.raises(ConfigError, match=r"row 'mine:0': there is no reward function other; there are short, rm"):
            prepare(config_for(tmp_path, *with_model(folder), SHORT, reward=["other"]))

    def test_is_evaluated_with_the_model_only_where_it_is_the_checker(self, folder: Path, tmp_path: Path) -> None:
        def started(*more: str, training: bool = False) -> list[str]:
            config = config_for(tmp_path, *with_model(folder), SHORT, "reward.primary=rm", *more)
            config.data.eval = dict(config.data.train)
            return [model.name for model in prepare(config, training=training).models(training=training)]

        own = f"eval.checker.path={__file__}:short"
        assert started() == ["rm"]
        assert started(own) == []
        assert started(own, training=True) == ["rm"]
        assert started(training=True) == ["rm"]  # once, for both
        config = config_for(tmp_path, *with_model(folder))
        assert [model.name for model in prepare(config).models(training=False)] == ["rm"]  # measures pass rates

    def test_a_profile_depends_on_the_model(self, folder: Path, tmp_path: Path) -> None:
        first, second = (
            settings_of(prepare(config_for(tmp_path, *with_model(folder, **options))))
            for options in ({}, {"normalise": "sigmoid"})
        )
        assert {key for key in first if first[key] != second[key]} == {"reward.models.rm"}


class TestWhatIsRefused:
    @pytest.mark.parametrize(
        ("options", "problem"),
        [
            ({"replicas": 0}, r"reward\.models\.rm\.replicas=0: expected at least 1"),
            ({"gpus": 0}, r"reward\.models\.rm\.gpus=0.*: expected more than 0"),
            ({"gpus": 2}, r"reward\.models\.rm\.gpus=2.* with engine=transformers: only vllm"),
            ({"gpus": 1.5, "engine": "vllm"}, r"reward\.models\.rm\.gpus=1\.5 .* whole number"),
            ({"timeout_s": 0}, r"reward\.models\.rm\.timeout_s=0"),
            ({"timeout_s": 900}, r"reward\.models\.rm\.timeout_s=900.* less than run\.watchdog_s"),
            (
                {"wieght": 1},
                r"reward\.models\.rm\.wieght: there is no such key; did you mean reward\.models\.rm\.weight",
            ),
        ],
    )
    def test_while_the_configuration_is_read(
        self, options: dict[str, Any], problem: str, folder: Path, tmp_path: Path
    ) -> None:
        with pytest.raises(ConfigError, match=problem):
            config_for(tmp_path, *with_model(folder, **options))

    @pytest.mark.parametrize(
        ("options", "problem"),
        [
            ({"path": "./missing"}, "there is no folder ./missing"),
            ({"engine": "sglang"}, "engine=sglang: expected transformers or vllm"),
            ({"normalise": "standard"}, "normalise=standard needs mean and std"),
            ({"normalise": "softmax"}, "normalise=softmax: expected null, sigmoid or standard"),
            ({"max_tokens": 4096}, "max_tokens=4096, and .* has a context of 512"),
            ({"weight": 0}, "have weight 0"),
        ],
    )
    def test_before_anything_starts(self, options: dict[str, Any], problem: str, folder: Path, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=rf"^reward\.(models\.rm|functions): .*{problem}"):
            prepare(config_for(tmp_path, *with_model(folder, **options)))

    def test_names_of_components(self, folder: Path, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"reward\.primary=other: no such reward function or model.* short, rm"):
            config_for(tmp_path, *with_model(folder), SHORT, "reward.primary=other")
        with pytest.raises(ConfigError, match=r"sampling\.filter_on=other: .* expected one of short, rm"):
            config_for(tmp_path, *with_model(folder), SHORT, "sampling.filter_on=other")
        with pytest.raises(ConfigError, match="need different names, got rm, rm"):
            prepare(config_for(tmp_path, *with_model(folder), f"reward.functions.rm.path={__file__}:short"))

    def test_prompts_that_the_models_template_refuses(self, folder: Path, tmp_path: Path) -> None:
        strict = tmp_path / "strict"
        shutil.copytree(folder, strict)
        template = (strict / "chat_template.jinja").read_text()
        refusal = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        (strict / "chat_template.jinja").write_text(refusal + template)
        prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
        with pytest.raises(
            ConfigError,
            match=r"data\.train\.mine: row 'mine:0': reward\.models\.rm can't read it: .*roles system, user, assistant",
        ):
            prepare(config_for(tmp_path, *with_model(strict), prompt=prompt))
        prepare(config_for(tmp_path, *with_model(strict), SHORT, prompt=prompt, reward=["short"]))
        prepare(config_for(tmp_path, *with_model(strict)))
        config = config_for(tmp_path, *with_model(strict), prompt=prompt)
        config.data.eval = dict(config.data.train)
        with pytest.raises(ConfigError, match=r"data\.eval\.mine: row 'mine:0': reward\.models\.rm can't read it"):
            prepare(config, training=False)

    def test_answers_that_may_be_too_long_are_a_warning(
        self, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.WARNING):
            prepare(config_for(tmp_path, *with_model(folder, max_tokens=100)))
        assert "reward.models.rm: it scores conversations of at most 100 of its tokens" in caplog.text
