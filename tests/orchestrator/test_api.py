"""The Python entry: arguments become the same configuration that a command line would give."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.api import configured, evaluate, train
from orchestrator.compose import literal
from orchestrator.config import ConfigError, SourceConfig
from orchestrator.sources import DataError


class TestConfigured:
    def test_a_mapping_is_the_same_as_texts(self) -> None:
        overrides = {
            "experiment": "tiny",
            "run.name": "123",
            "run.dir": Path("out=1/runs"),
            "learner.learning_rate": 1e-6,
            "sampling.filter": False,
            "sampling.filter_on": None,
            "algorithm.loss_options": {"clip_low": 0.1, "clip_high": 0.3},
            "data.train.mine": {"path": "a b.jsonl", "reward": ["letters"], "options": {"sizes": [1, 2]}},
        }
        config = configured(None, None, overrides)
        assert config.model.path == "builtin:tiny"
        assert config.run.name == "123"
        assert config.run.dir == "out=1/runs"
        assert config.learner.learning_rate == 1e-6
        assert config.sampling.filter is False
        assert config.sampling.filter_on is None
        assert config.algorithm.loss_options == {"clip_low": 0.1, "clip_high": 0.3}
        mine = config.data.train["mine"]
        assert (mine.path, mine.reward, mine.options) == ("a b.jsonl", ["letters"], {"sizes": [1, 2]})

    def test_what_is_no_overrides_is_refused(self) -> None:
        for overrides in ("run.batches=3", None, 3):
            with pytest.raises(ConfigError, match=r"^overrides=.*: expected a list of texts, key=value, or a mapping"):
                configured(None, None, overrides)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="an override is a text, key=value"):
            configured(None, None, [("run.batches", 3)])  # type: ignore[list-item]

    def test_texts_come_in_any_collection(self) -> None:
        for overrides in ((text for text in ["run.batches=3"]), {"run.batches=3"}, {"run.batches=3": 1}.keys()):
            assert configured(None, "rows.jsonl", overrides).run.batches == 3

    def test_own_data_replaces_the_default_task_and_its_held_out_set(self) -> None:
        config = configured("some/model", "rows.jsonl", ())
        assert config.model.path == "some/model"
        assert {name: source.path for name, source in config.data.train.items()} == {"main": "rows.jsonl"}
        assert config.data.eval == {}
        assert config.eval.checker is None  # that of the default task knows nothing of these rows
        config = configured(None, {"a": Path("a.jsonl"), "b": "b.jsonl"}, ["data.eval.held_out.path=held_out.jsonl"])
        assert [source.path for source in config.data.train.values()] == ["a.jsonl", "b.jsonl"]
        assert "held_out" in config.data.eval
        for held_out in (
            "+data.eval.held_out.path=held_out.jsonl",
            "++data={eval: {held_out: {path: held_out.jsonl}}}",
        ):
            assert "held_out" in configured(None, "rows.jsonl", [held_out]).data.eval
        for checker in ("+eval.checker.path=module.check", "eval={checker: {path: module.check}}"):
            found = configured(None, "rows.jsonl", [checker]).eval.checker
            assert found is not None
            assert found.path == "module.check"

    @pytest.mark.parametrize(
        "overrides", [{"data": {"seed": 3}}, ["data={seed: 3}"], ["+eval={at_start: true}"], ["data={}", "eval={}"]]
    )
    def test_other_keys_given_as_a_whole_node_keep_no_held_out_set(self, overrides: Any) -> None:
        config = configured(None, "rows.jsonl", overrides)
        assert (config.data.eval, config.eval.checker) == ({}, None)

    def test_a_preset_that_is_chosen_keeps_its_held_out_set(self) -> None:
        assert configured(None, "rows.jsonl", ["data=arithmetic"]).data.eval

    @pytest.mark.parametrize("data", [["a.jsonl", "b.jsonl"], [{"prompt": "a"}], {"prompt": ["a"]}, 5])
    def test_rows_in_memory_are_no_path(self, data: Any) -> None:
        with pytest.raises(ConfigError, match=r"^data: expected the path of a file or folder.*; found (list|int) for"):
            configured(None, data, ())

    def test_sources_as_a_profile_returns_them_are_data(self) -> None:
        source = SourceConfig(path="kept.jsonl", weight=2.0)
        assert configured(None, {"kept": source}, ()).data.train == {"kept": source}

    @given(
        st.recursive(
            st.none()
            | st.booleans()
            | st.integers()
            | st.floats(allow_nan=False)
            | st.text(max_size=12).filter(lambda text: "$" not in text),  # $ begins an interpolation
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(
                    st.from_regex(r"[A-Za-z_][A-Za-z0-9_ \t:,=/\\()\[\]{}.$%*@?|+-]{0,5}", fullmatch=True).filter(
                        lambda key: key.lower() not in ("true", "false", "null", "nan", "inf")
                    ),
                    inner,
                    max_size=3,
                )
            ),
            max_leaves=5,
        )
    )
    @settings(max_examples=150, deadline=None)
    def test_any_value_survives_hydras_grammar(self, value: Any) -> None:
        parsed = OverridesParser.create().parse_override(f"a.b={literal(value)}").value()
        assert parsed == value
        assert type(parsed) is type(value)

    @given(st.text(max_size=4) | st.from_regex(r"true|NULL|-?[0-9]{1,2}|it's|a\"b|1e3|\.5", fullmatch=True))
    @settings(max_examples=150, deadline=None)
    def test_a_key_survives_or_is_refused_by_name(self, key: str) -> None:
        try:
            text = literal({key: 1})
        except ConfigError as error:
            assert str(error).startswith(f"{key!r}: can't be a key")  # noqa: PT017
            return
        assert OverridesParser.create().parse_override(f"a.b={text}").value() == {key: 1}

    @pytest.mark.parametrize("key", ["it's", 'a"b', "true", "Null", "12", "1e3", "größe", "", "a\n"])
    def test_what_the_grammar_can_not_hold(self, key: str) -> None:
        with pytest.raises(ConfigError, match=re.escape(f"{key!r}: can't be a key in an override")):
            configured(None, None, {"data.train.mine.options": {key: 1}})


class TestEarlyErrors:
    def test_what_can_be_known_before_anything_starts(self, tmp_path: Path) -> None:
        def reward(completion: str, answer: str) -> float:
            return 0.0

        rows = tmp_path / "rows.jsonl"
        rows.write_text('{"prompt": "a"}\n' * 8)
        runs = {"run.dir": tmp_path / "runs", "experiment": "tiny"}
        with pytest.raises(ConfigError, match=r"(?s)data\.train\.main.*reward.*answer"):
            train("builtin:tiny", rows, reward, runs)
        with pytest.raises(DataError, match=r"missing\.jsonl"):
            train("builtin:tiny", tmp_path / "missing.jsonl", reward, runs)
        with pytest.raises(ConfigError, match="there is no such key"):
            train(overrides={"learner.rank": 2})
        with pytest.raises(ConfigError, match=r"data\.eval: no set"):
            evaluate(overrides=["data.eval={}"])
        assert not (tmp_path / "runs").exists()
