"""Model, prompts, rewards and checker fit each other, or the message says what does not."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

import pytest

from orchestrator.compose import load
from orchestrator.config import Config, ConfigError, RewardFunctionConfig
from orchestrator.prepare import CHECKER, prepare, source_of
from orchestrator.profile import for_profile
from orchestrator.sources import DataError
from reward_workers.function import RewardFunctionError, rows_checked_by
from reward_workers.structured import grade_json
from rollout_workers.trajectory import RewardResult


def config_for(folder: Path, rows: int = 8, **columns: str) -> Config:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"say {i}", **columns}) + "\n" for i in range(rows)))
    return load(["experiment=tiny", "data=files", f'data.train.mine.path="{file}"'])


def right(completion: str, answer: str) -> float:
    return float(completion == answer)


def brief(completion: str) -> float:
    return -float(len(completion))


def test_what_a_run_needs(tmp_path: Path) -> None:
    prepared = prepare(config_for(tmp_path, answer="a"), [right, brief])
    assert [len(source) for source in prepared.train] == [8]
    assert [function.name for function in prepared.rewards.functions] == ["right", "brief"]
    assert prepared.filter_on == "right"
    assert (prepared.evaluation, prepared.checker) == ([], None)
    assert Path(prepared.model_path, "config.json").exists()


def test_a_column_that_no_row_has(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.train\.mine: .*'right'.*answer"):
        prepare(config_for(tmp_path, goal="a"), right)
    prepare(config_for(tmp_path, goal="a"), brief)


def test_a_source_is_judged_by_its_own_functions(tmp_path: Path) -> None:
    config = config_for(tmp_path, goal="a")
    config.data.train["mine"].reward = ["brief"]
    prepare(config, [right, brief])
    config.data.train["mine"].reward = ["clever"]
    with pytest.raises(ConfigError, match=r"data\.train\.mine: .*there is no reward function clever"):
        prepare(config, [right, brief])


def test_every_row_must_be_judgeable(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    config = load(["experiment=tiny", "data=files", f'data.train.mine.path="{file}"'])

    def refused(row: dict, words: str) -> None:
        rows = [{"id": i, "prompt": f"say {i}", "answer": "a"} for i in range(7)]
        file.write_text("".join(json.dumps(each) + "\n" for each in [*rows, {"id": "odd", "prompt": "?", **row}]))
        with pytest.raises(ConfigError, match=words) as error:
            prepare(config, [right, brief])
        assert "data.train.mine: row 'mine:odd'" in str(error.value)

    refused({}, "'right' takes answer, which nothing supplies")
    refused({"answer": "a", "reward": ["clever"]}, "there is no reward function clever")


def test_c24_a_schema_that_cannot_be_used_is_refused_with_its_row(tmp_path: Path) -> None:
    config = config_for(tmp_path, schema="{not json")
    with pytest.raises(ConfigError, match=r"row 'mine:\w+': reward function 'grade_json' can't judge it: the schema"):
        prepare(config, grade_json)
    prepare(config_for(tmp_path, schema="{}"), grade_json)


def length(completion: str, verdict: RewardResult) -> float:
    return 0.0


def test_gates_and_needs_come_from_the_configuration(tmp_path: Path) -> None:
    config = config_for(tmp_path, answer="a")
    config.reward.functions = {
        "length": RewardFunctionConfig(f"{__file__}:length", needs="right"),
        "right": RewardFunctionConfig(f"{__file__}:right", gate=True, gate_threshold=0.5),
        "brief": RewardFunctionConfig(f"{__file__}:brief"),
    }
    config.reward.primary = "right"
    functions = {function.name: function for function in prepare(config).rewards.functions}
    assert [functions[name].gate for name in ("length", "right", "brief")] == [None, 0.5, None]
    assert functions["length"].needs == "right"
    config.reward.functions["length"].needs = "write"
    with pytest.raises(ConfigError, match=r"reward\.functions: reward function 'length' needs 'write'"):
        prepare(config)


def test_f08_fewer_prompts_than_a_batch(tmp_path: Path) -> None:
    config = config_for(tmp_path, rows=8, answer="a")
    config.sampling.groups_per_batch = 1024
    with pytest.raises(DataError, match=r"sampling\.groups_per_batch=1024: data\.train has only 8 prompts"):
        prepare(config, right)


def test_no_data_and_no_reward(tmp_path: Path) -> None:
    config = config_for(tmp_path, answer="a")
    config.data.train = {}
    with pytest.raises(ConfigError, match=r"data\.train: no source of prompts"):
        prepare(config, right)
    config = config_for(tmp_path, answer="a")
    config.reward.functions = {}
    with pytest.raises(ConfigError, match=r"reward\.functions: no reward function"):
        prepare(config)


def test_the_checker_is_not_the_training_reward(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = config_for(tmp_path, answer="a")
    config.data.eval = dict(config.data.train)
    with caplog.at_level(logging.WARNING):
        prepared = prepare(config, [right, brief])
    assert "can't notice that it is being gamed" in caplog.text
    assert prepared.checker is not None
    assert [function.name for function in prepared.checker.functions] == ["right"]

    caplog.clear()
    config.eval.checker = RewardFunctionConfig(f"{__name__}.right")
    prepared = prepare(config, brief)
    assert caplog.text == ""
    assert prepared.checker is not None
    assert [function.name for function in prepared.checker.functions] == [CHECKER]

    config.eval.checker = RewardFunctionConfig("no_such_module.check")
    with pytest.raises(ConfigError, match=r"eval\.checker: reward function 'no_such_module\.check'"):
        prepare(config, brief)


def test_a_checkers_columns_are_those_of_its_set(tmp_path: Path) -> None:
    config = config_for(tmp_path, goal="a")
    config.data.eval = dict(config.data.train)
    config.eval.checker = RewardFunctionConfig(f"{__name__}.right")
    with pytest.raises(ConfigError, match=r"data\.eval\.mine: .*answer"):
        prepare(config, brief)


class TestWatch:
    """What judges training answers beside the rewards: eval.checker where it can, reward.watch.checker or an error."""

    def config(self, folder: Path, **checkers: str) -> Config:
        """With the paths of `own` (reward.watch.checker) and `held_out` (eval.checker); rows with an answer."""
        config = config_for(folder, answer="a")
        if "own" in checkers:
            config.reward.watch.checker = RewardFunctionConfig(f"{__name__}.{checkers['own']}")
        if "held_out" in checkers:
            config.eval.checker = RewardFunctionConfig(f"{__name__}.{checkers['held_out']}")
        return config

    def test_the_checker_of_evaluation(self, tmp_path: Path) -> None:
        config = self.config(tmp_path, held_out="strict")
        config.data.eval = dict(config.data.train)
        prepared = prepare(config, brief)
        assert prepared.watch is prepared.checker is not None
        config.data.eval = {}  # nothing is evaluated, and the checker is there all the same
        prepared = prepare(config, brief)
        assert prepared.checker is None
        assert prepared.watch is not None
        assert [(f.name, f.function) for f in prepared.watch.functions] == [(CHECKER, f"{__name__}.strict")]

    def test_one_of_its_own(self, tmp_path: Path) -> None:
        config = self.config(tmp_path, own="strict", held_out="right")
        config.data.eval = dict(config.data.train)
        prepared = prepare(config, brief)
        assert prepared.watch is not prepared.checker
        assert prepared.watch is not None
        assert prepared.watch.functions[0].function == f"{__name__}.strict"

    def test_none(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        assert prepare(self.config(tmp_path), brief).watch is None
        config = self.config(tmp_path, own="nobody", held_out="nobody")
        config.reward.watch.share = 0
        assert prepare(config, brief).watch is None
        assert "watch" not in caplog.text

    @pytest.mark.parametrize(
        ("path", "problem"),
        [
            ("nobody", "the module has no 'nobody'"),
            ("with_dataset", r"row 'mine:\w+' of data\.train: .* takes dataset, which nothing supplies"),
            ("choosy", r"row 'mine:\w+' of data\.train: .* can't judge it: answers are b"),
            ("right", "the same as the training reward 'right', and so not independent of it"),
            ("unready", "not today"),
        ],
    )
    def test_one_that_can_not(self, tmp_path: Path, caplog: pytest.LogCaptureFixture, path: str, problem: str) -> None:
        with pytest.raises(ConfigError, match=rf"reward\.watch\.checker: .*{problem}"):
            prepare(self.config(tmp_path, own=path), [brief, right])
        with caplog.at_level(logging.WARNING):
            prepared = prepare(self.config(tmp_path, held_out=path), [brief, right])
        assert prepared.watch is None
        [record] = [record for record in caplog.records if "reward.watch is off" in record.getMessage()]
        assert re.search(problem, record.getMessage())
        assert "reward.watch.share=0" in record.getMessage()

    def test_a_function_that_is_only_shown_is_independent(self, tmp_path: Path) -> None:
        config = self.config(tmp_path, own="right")
        config.reward.functions = {
            "brief": RewardFunctionConfig(f"{__name__}.brief"),
            "right": RewardFunctionConfig(f"{__name__}.right", weight=0.0),
        }
        config.reward.primary = "brief"
        assert prepare(config).watch is not None
        config.reward.primary = "right"
        with pytest.raises(ConfigError, match="not independent"):
            prepare(config)

    def test_rows_that_the_primary_reward_does_not_judge_need_no_checker(self, tmp_path: Path) -> None:
        config = self.config(tmp_path, own="strict")
        other = tmp_path / "other.jsonl"
        other.write_text('{"prompt": "say more", "reward": ["brief"]}\n')
        config.data.train |= source_of({"other": other})
        assert prepare(config, [right, brief]).watch is not None
        with pytest.raises(ConfigError, match=r"reward\.watch\.checker: row 'other:"):
            prepare(config, [brief, right])

    def test_nothing_is_watched_where_nothing_is_trained(self, tmp_path: Path) -> None:
        config = self.config(tmp_path, held_out="strict")
        config.data.eval = dict(config.data.train)
        assert prepare(config, brief, training=False).watch is None
        assert prepare(for_profile(config), brief).watch is None


def strict(completion: str, answer: str) -> float:
    return float(completion.strip() == answer)


def with_dataset(completion: str, dataset: str) -> float:
    return float(completion == dataset)


def only_b(answer: str) -> None:
    if answer != "b":
        raise ValueError("answers are b")


@rows_checked_by(only_b)
def choosy(completion: str, answer: str) -> float:
    return float(completion == answer)


def unready(completion: str) -> float:
    return 0.0


def not_today() -> None:
    raise RewardFunctionError("not today")


unready.check_options = not_today  # type: ignore[attr-defined]


def test_evaluation_alone_reads_no_training_data(tmp_path: Path) -> None:
    config = config_for(tmp_path, answer="a")
    config.data.eval = dict(config.data.train)
    config.data.train = source_of("missing.jsonl")
    prepared = prepare(config, right, training=False)
    assert prepared.train == []
    assert len(prepared.evaluation[0]) == 8


def test_a_chat_template_argument_that_can_not_be_is_a_matter_of_configuration(tmp_path: Path) -> None:
    config = config_for(tmp_path)
    config.model.chat_template_kwargs = {"truncation": True}
    with pytest.raises(
        ConfigError, match=r"model\.path=builtin:tiny: model\.chat_template_kwargs: truncation can't be set"
    ):
        prepare(config, brief)


def test_sources_of_python_callers() -> None:
    assert {name: source.path for name, source in source_of("rows.jsonl").items()} == {"main": "rows.jsonl"}
    assert {n: s.path for n, s in source_of({"a": Path("x"), "b": "y"}).items()} == {"a": "x", "b": "y"}
