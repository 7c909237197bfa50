"""The benchmark beside TRL: what makes the two sides equal, and how its figures are worked out. Nothing is trained here."""

from __future__ import annotations

import dataclasses
import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from orchestrator.compose import load

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench_vs_trl.py"


@pytest.fixture(scope="module")
def bench() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))


def cell(bench: dict[str, Any], *seconds: float) -> Any:
    return bench["Cell"](tuple(bench["Step"](s, 64, 640.0, 0.25) for s in seconds), (100.0,))


@pytest.mark.parametrize(("tuning", "rank", "rate"), [("full", 0, 2e-5), ("lora", 16, 3e-4)])
def test_trl_follows_the_configuration_of_headway(
    bench: dict[str, Any], tuning: str, rank: int, rate: float, tmp_path: Path
) -> None:
    config = load(bench["overrides"](tuning, 3))
    arguments = bench["trl_arguments"](config, tmp_path)
    assert (config.model.path, config.model.dtype) == ("builtin:smollm2_135m", "bfloat16")
    assert (config.model.lora.rank, arguments["learning_rate"], arguments["max_steps"]) == (rank, rate, 3)
    assert (arguments["epsilon"], arguments["epsilon_high"], arguments["beta"]) == (0.2, 0.28, 0.0)
    answers = arguments["per_device_train_batch_size"] * arguments["gradient_accumulation_steps"]
    assert answers == config.sampling.groups_per_batch * config.sampling.answers_per_group == 64
    assert config.algorithm.updates_per_batch * config.algorithm.epochs_per_batch == 1
    assert arguments["max_completion_length"] == config.rollout.max_response_tokens
    # Nothing but the steps takes time, and none takes more answers than TRL's.
    assert config.sampling.filter is False
    assert (config.eval.at_start, config.eval.at_end, config.eval.every_batches) == (False, False, 0)
    assert config.checkpoint.every_batches == 0


def test_the_rows_are_the_prompts_of_the_first_batches_each_once(bench: dict[str, Any]) -> None:
    rows = bench["trl_rows"](load(bench["overrides"]("full", 2)), 2)
    texts = [row["prompt"][-1]["content"] for row in rows]
    assert len(texts) == len(set(texts)) == 16
    assert all(row["answer"].isdigit() for row in rows)


def test_only_records_of_batches_are_steps(bench: dict[str, Any]) -> None:
    batch = {"time_s/batch": 12.5, "batch/answers": 64, "response_length/mean": 20.0, "reward/mean": 0.25}
    lines = [json.dumps(record) for record in ({"lineage": 0}, {"eval/pass_at_1": 0.2}, batch)]
    assert [dataclasses.astuple(step) for step in bench["headway_steps"](lines)] == [(12.5, 64, 1280.0, 0.25)]


def test_the_last_line_is_the_smaller_ratio_of_medians(bench: dict[str, Any]) -> None:
    cells = {
        ("full", "headway"): cell(bench, 10.0, 11.0, 90.0),
        ("full", "trl"): cell(bench, 44.0, 44.0, 10.0),
        ("lora", "headway"): cell(bench, 10.0),
        ("lora", "trl"): cell(bench, 25.0),
    }
    lines = bench["report"](cells)
    assert lines[-3:] == [
        "full: TRL 44.0 s/step, Headway 11.0 s/step, ratio 4.00",
        "lora: TRL 25.0 s/step, Headway 10.0 s/step, ratio 2.50",
        "ratio 2.50",
    ]
    assert lines[3].split() == ["lora", "headway", "1", "10.0", "10.0-10.0", "6.40", "10.0", "0.25", "100"]


def test_a_failed_side_ends_the_benchmark_with_its_output(bench: dict[str, Any], tmp_path: Path) -> None:
    command = [sys.executable, "-c", "print('out of luck'); raise SystemExit(3)"]
    with pytest.raises(SystemExit, match=r"exit code 3:\nout of luck"):
        bench["run_process"](command, tmp_path / "log")


def test_without_trl_it_says_how_to_install_it() -> None:
    code = (
        "import importlib.metadata as m, runpy, sys\n"
        "def missing(name): raise m.PackageNotFoundError(name)\n"
        "m.version = missing\n"
        f"sys.argv = ['bench']; runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert "-m pip install --no-deps trl==" in done.stderr
