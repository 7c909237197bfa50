"""`headway simulate`: what it leaves, what it refuses, and that it needs nothing of a run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pretend_run import PretendRun

from orchestrator import cli
from orchestrator.simulation.command import PAGE, RESULT
from orchestrator.simulation.types import Timing

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).resolve().parents[3]
SMALL = (
    "simulate.steps=12",
    "simulate.rollout_gpus=4",
    "simulate.learner_gpus=2",
    "sampling.groups_per_batch=8",
    "sampling.answers_per_group=4",
)


class Shell:
    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.output = folder / "out"
        self._capsys = capsys

    def simulate(self, *arguments: str) -> tuple[int, str, str]:
        """Exit code, stdout, stderr."""
        code = cli.main(["simulate", f"simulate.output={self.output}", *arguments])
        captured = self._capsys.readouterr()
        return code, captured.out, captured.err

    def done(self, *arguments: str) -> list[dict[str, Any]]:
        """The reports that a command left."""
        code, out, err = self.simulate(*arguments)
        assert code == 0, err
        assert str(self.output / PAGE) in out
        assert (self.output / PAGE).stat().st_size > 1e6  # with plotly's script
        return json.loads((self.output / RESULT).read_text())["reports"]

    def refused(self, *arguments: str) -> str:
        code, _, err = self.simulate(*arguments)
        assert code == 2
        assert not list(self.output.rglob(RESULT))
        return err


@pytest.fixture
def shell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(tmp_path, capsys)


def test_a_setting_beside_the_synchronous_ones(shell: Shell) -> None:
    asked, same, turns = shell.done(*SMALL, "staleness.max=2")
    assert [report["gpus"] for report in (asked, same, turns)] == ["4 + 2", "4 + 2", "6 in turns"]
    assert [report["staleness"] for report in (asked, same, turns)] == [2, 0, 0]
    fastest = min(same["summary"]["mean_step_s"], turns["summary"]["mean_step_s"])
    assert asked["speedup"] == pytest.approx(fastest / asked["summary"]["mean_step_s"])
    assert asked["summary"]["staleness_max"] <= 2


def test_the_same_command_gives_the_same_result(shell: Shell) -> None:
    first = shell.done(*SMALL)
    assert shell.done(*SMALL) == first
    assert shell.done(*SMALL, "simulate.seed=1") != first


def test_a_setting_that_is_synchronous_itself(shell: Shell) -> None:
    reports = shell.done(*SMALL, "placement=shared", "staleness.max=0", "simulate.learner_gpus=4")
    assert [(report["gpus"], report["staleness"]) for report in reports] == [("4 in turns", 0)]
    assert reports[0]["speedup"] == 1


def test_a_users_own_configuration(shell: Shell) -> None:
    keys = ("simulate.steps=12", "data=files", "data.train.mine.path=rows.jsonl", "model.path=/models/mine")
    asked, *_ = shell.done("experiment=node_8gpu", *keys, "sampling.groups_per_batch=8")
    assert (asked["gpus"], asked["staleness"]) == ("4 + 4", 1)


def test_advice(shell: Shell) -> None:
    best, *others = shell.done(*SMALL, "simulate.advise=true", "staleness.max=1")
    assert best["name"] == "recommended"
    assert max(report["staleness"] for report in (best, *others)) == 1
    assert "staleness.max=" in json.loads((shell.output / RESULT).read_text())["advice"]


@pytest.mark.parametrize("flags", [[], ["-m"]])
def test_the_folder_of_results_may_be_given_below_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cli.main(["simulate", 'simulate={output: "~/mine"}', *SMALL, *flags, "staleness.max=0"]) == 0
    assert (tmp_path / "mine" / RESULT).exists()


class TestSweep:
    def test_whole_nodes(self, shell: Shell) -> None:
        reports = shell.done(*SMALL, "-m", "staleness={max: 0},{max: 2}")
        assert [report["staleness"] for report in reports] == [0, 2]

    def test_one_table_over_all_jobs(self, shell: Shell) -> None:
        before = sys.argv
        reports = shell.done(*SMALL, "--multirun", "staleness.max=0,2", "placement=split,shared", "data.train.a.path=b")
        assert sys.argv is before
        assert [report["name"] for report in reports] == [
            "staleness.max=0, placement=split",
            "staleness.max=0, placement=shared",
            "staleness.max=2, placement=split",
            "staleness.max=2, placement=shared",
        ]
        for number in range(4):
            job = json.loads((shell.output / str(number) / RESULT).read_text())
            assert job["reports"][0]["summary"] == reports[number]["summary"]

    def test_a_single_simulation_gives_the_same(self, shell: Shell, tmp_path: Path) -> None:
        swept = shell.done(*SMALL, "-m", "staleness.max=0,2")
        shell.output = tmp_path / "single"
        single, *_ = shell.done(*SMALL, "staleness.max=2")
        assert swept[1]["summary"] == single["summary"]

    def test_sweeps_plugins_can_be_chosen(self, shell: Shell) -> None:
        assert len(shell.done(*SMALL, "-m", "staleness.max=0,1", "hydra.sweep.subdir=job_${hydra.job.num}")) == 2
        assert (shell.output / "job_1" / RESULT).exists()

    def test_results_are_not_mixed_with_older_ones(self, shell: Shell) -> None:
        shell.done(*SMALL, "-m", "staleness.max=0,1")
        code, _, err = shell.simulate(*SMALL, "-m", "staleness.max=0")
        assert code == 2
        assert f"simulate.output={shell.output}: it holds results already" in err

    @pytest.mark.parametrize(
        ("argument", "message"),
        [
            ("stalenes.max=0,1", "stalenes: there is no such key; did you mean staleness?"),
            ("staleness.max=0,x", "Value 'x' of type 'str' could not be converted to Integer"),
            ("staleness.max=-1,-2", "staleness.max=-1: expected at least 0"),
            ("hydra.sweep.dir=elsewhere", "hydra.sweep.dir: give simulate.output"),
            ("hydra/launcher=nothing", "hydra/launcher"),
        ],
    )
    def test_refused(self, shell: Shell, argument: str, message: str) -> None:
        assert message in shell.refused(*SMALL, "-m", argument)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    timing = Timing(
        decode_base_s=0.02,
        decode_per_answer_s=0.001,
        max_concurrent_answers=128,
        learn_s_per_token=0.001,
        publish_s=0.1,
        between_s=0.1,
    )
    folder = tmp_path_factory.mktemp("runs") / "mine"
    return f"simulate.from_run={PretendRun(folder, timing, ['run.batches=12', 'staleness.max=1']).write()}"


class TestFromARun:
    def test_its_configuration_is_where_it_starts_from(self, shell: Shell, run: str) -> None:
        asked, synchronous = shell.done(run, "simulate.steps=20")
        assert (asked["gpus"], asked["staleness"], synchronous["staleness"]) == ("1 + 1", 1, 0)
        assert asked["timing"]["learn_s_per_token"] == pytest.approx(0.001, rel=0.2)
        further, *_ = shell.done(run, "simulate.steps=20", "staleness.max=3")
        assert further["staleness"] == 3

    def test_a_sweep(self, shell: Shell, run: str) -> None:
        reports = shell.done(run, "simulate.steps=20", "-m", "staleness.max=0,2")
        assert [report["staleness"] for report in reports] == [0, 2]
        assert reports[0]["timing"] == reports[1]["timing"]

    def test_what_is_fitted_can_not_be_given(self, shell: Shell, run: str) -> None:
        assert "simulate.score_s=2: with simulate.from_run this is fitted" in shell.refused(run, "simulate.score_s=2")

    def test_keys_may_be_given_at_once_and_folders_below_home(
        self, shell: Shell, run: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HOME", str(Path(run.partition("=")[2]).parent))
        mine = 'simulate={from_run: "~/mine", steps: 20}'
        assert "simulate.score_s=2: with simulate.from_run" in shell.refused(mine, "simulate={score_s: 2}")
        [report] = shell.done(mine, "-m", "staleness.max=2")
        assert report["staleness"] == 2
        asked, *_ = shell.done(mine)
        assert asked["gpus"] == "1 + 1"

    def test_groups_can_not_be_chosen(self, shell: Shell, run: str) -> None:
        assert "experiment=tiny: here only single keys can be changed" in shell.refused(run, "experiment=tiny")

    def test_no_such_run(self, shell: Shell, tmp_path: Path) -> None:
        assert f"simulate.from_run={tmp_path}: its config.yaml" in shell.refused(f"simulate.from_run={tmp_path}")

    def test_engines_of_another_width(self, shell: Shell, run: str) -> None:
        message = shell.refused(run, "simulate.gpus_per_engine=2", "simulate.rollout_gpus=2")
        assert "simulate.gpus_per_engine=2: the run in simulate.from_run has engines of 1" in message


class TestRefused:
    def test_a_mistyped_key(self, shell: Shell) -> None:
        assert "simulate.step: there is no such key; did you mean simulate.steps?" in shell.refused("simulate.step=3")

    def test_a_flag(self, shell: Shell) -> None:
        assert "--cfg: no such flag; headway simulate has only --multirun" in shell.refused("--cfg", "job")

    def test_a_sweep_without_the_flag(self, shell: Shell) -> None:
        assert "commas outside brackets would be a sweep" in shell.refused(*SMALL, "staleness.max=0,1")

    def test_a_group_of_one(self, shell: Shell) -> None:
        assert "sampling.answers_per_group=1" in shell.refused("sampling.answers_per_group=1")

    def test_a_model_that_does_not_fit(self, shell: Shell) -> None:
        assert "give an engine more GPUs" in shell.refused("simulate.model.parameters_billion=70")


def test_what_is_not_simulated_is_said(shell: Shell, caplog: pytest.LogCaptureFixture) -> None:
    shell.done(*SMALL, "staleness.adaptive=true", "staleness.max=1")
    assert "staleness.adaptive is not simulated" in caplog.text


def test_nothing_heavy_is_imported(tmp_path: Path) -> None:
    script = f"""
import sys
from orchestrator import cli
code = cli.main(["simulate", "simulate.output={tmp_path}/out", *{SMALL!r}])
heavy = [m for m in ("torch", "ray", "vllm", "deepspeed", "transformers", "wandb", "pyarrow") if m in sys.modules]
sys.exit(f"{{code}} {{heavy}}" if code or heavy else 0)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
