"""What a run goes on from: found, or refused, before anything starts."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from orchestrator.checkpoint import Checkpoint, CheckpointStore
from orchestrator.compose import load
from orchestrator.config import ConfigError, SourceConfig
from orchestrator.journal import JOURNAL
from orchestrator.prepare import Prepared
from orchestrator.prompts import PromptStream, load_sources
from orchestrator.resume import model_state, to_resume
from orchestrator.sources import DataError
from reward_workers.reward import RewardSet


def reward(completion: str) -> float:
    return 0.0


def prepared(*overrides: str, rows: int = 8) -> Prepared:
    config = load(["experiment=tiny", "run.name=mine", "run.batches=5", "checkpoint.resume=auto", *overrides])
    source = SourceConfig(generator="orchestrator.tasks.synthetic", options={"size": rows})
    chat: Any = None
    return Prepared(config, "none", chat, load_sources({"main": source}, "train"), [], RewardSet.of(reward), None)


def saved(folder: Path, *overrides: str, version: int = 3) -> CheckpointStore:
    """A checkpoint of a run with these overrides."""
    before = prepared(*overrides)
    stream = PromptStream.from_config(before.train, before.config.data)
    stream.next()
    store = CheckpointStore(folder / "checkpoints", keep=1)
    with store.saving(version):
        store.commit(version, {"model": model_state(before.config), "prompts": stream.state()})
    return store


def resumed(folder: Path, store: CheckpointStore, *overrides: str, rows: int = 8) -> Checkpoint | None:
    return to_resume(prepared(*overrides, rows=rows), folder, store)


def test_the_newest_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = saved(tmp_path)
    with caplog.at_level(logging.WARNING):
        checkpoint = resumed(tmp_path, store)
    assert checkpoint is not None
    assert (checkpoint.version, caplog.text) == (3, "")
    assert resumed(tmp_path, store, "checkpoint.resume=never") is None


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model.lora.rank=8"], r"model\.lora\.rank=8: the checkpoint .*v000003 was taken with 4"),
        (["model.lora.rank=0"], r"model\.lora\.rank=0: .* taken with 4"),
        (["model.lora.alpha=8"], r"model\.lora\.alpha=8\.0: .* taken with 32\.0"),
        (["model.lora.targets=.*q_proj"], r"model\.lora\.targets=\.\*q_proj: .* taken with all-linear"),
    ],
)
def test_another_adapter_is_refused(tmp_path: Path, overrides: list[str], words: str) -> None:
    """Where names or shapes differ its weights would be left out, and with another alpha they would weigh something else."""
    store = saved(tmp_path, "model.lora.rank=4")
    assert resumed(tmp_path, store, "model.lora.rank=4") is not None
    with pytest.raises(ConfigError, match=words):
        resumed(tmp_path, store, "model.lora.rank=4", *overrides)


@pytest.mark.parametrize("changed", ["model.lora.alpha=8", "model.lora.targets=.*q_proj"])
def test_without_an_adapter_its_settings_do_not_matter(tmp_path: Path, changed: str) -> None:
    store = saved(tmp_path, "model.lora.rank=0")
    assert resumed(tmp_path, store, "model.lora.rank=0", changed) is not None


def test_a_checkpoint_of_an_older_version_is_refused(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", keep=1)
    with store.saving(3):
        store.commit(3, {"prompts": {}})
    with pytest.raises(
        ConfigError, match=r"checkpoint\.resume=auto: the checkpoint .*v000003 was written by an older version"
    ):
        resumed(tmp_path, store)


def test_f35_other_prompts_are_refused_before_an_engine_starts(tmp_path: Path) -> None:
    store = saved(tmp_path)
    with pytest.raises(DataError, match=r"data\.seed=1: the checkpoint was taken with 0"):
        resumed(tmp_path, store, "data.seed=1")
    with pytest.raises(DataError, match="it had 8 rows, now 9"):
        resumed(tmp_path, store, rows=9)


def test_another_model_is_pointed_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It may be the same one in another place."""
    store = saved(tmp_path)
    assert resumed(tmp_path, store, "model.path=/moved/tiny") is not None
    assert "model.path=/moved/tiny: the checkpoint was taken with builtin:tiny" in caplog.text


def test_f04_a_run_that_has_ended_says_that_nothing_is_left(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = saved(tmp_path, version=5)
    assert resumed(tmp_path, store, "run.batches=6") is not None
    assert caplog.text == ""
    assert resumed(tmp_path, store) is not None
    assert "run.batches=5: the checkpoint is of version 5, nothing is left to train" in caplog.text


def test_a_start_in_place_of_a_resume_is_told_where_it_takes_something_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = saved(tmp_path)
    (tmp_path / "checkpoints" / "v000003" / "complete.json").unlink()
    decided, trained = (
        tmp_path / JOURNAL / kind / "lineage-0000-version-000000-shard-000.parquet"
        for kind in ("outcomes", "trajectories")
    )
    assert resumed(tmp_path, store) is None
    decided.parent.mkdir(parents=True)
    decided.touch()  # of a run that starved before its first batch
    assert resumed(tmp_path, store) is None
    assert "starts anew" not in caplog.text
    trained.parent.mkdir(parents=True)
    trained.touch()
    assert resumed(tmp_path, store) is None
    assert "there is no whole checkpoint in" in caplog.text
    assert "the run starts anew at version 0" in caplog.text
    with pytest.raises(ConfigError, match=r"checkpoint\.resume=must: there is no whole checkpoint"):
        resumed(tmp_path, store, "checkpoint.resume=must")
