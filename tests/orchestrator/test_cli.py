"""The command line: bad input is one clear message, no traceback, nothing started and nothing written."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from orchestrator import cli
from orchestrator.config import ConfigError
from orchestrator.fleet import FleetError
from orchestrator.run import Starved


@pytest.fixture(autouse=True)
def same_logging() -> Iterator[None]:
    level = logging.getLogger().level
    yield
    logging.getLogger().setLevel(level)


class Shell:
    """Runs `headway train` with the tiny model in a folder of its own; `runs` must not be there unless a run began."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self.runs = folder / "runs"
        self._capsys = capsys

    def train(self, *overrides: str, command: str = "train") -> tuple[int, str]:
        """Exit code and what went to stderr."""
        code = cli.main([command, "experiment=tiny", f"run.dir={self.runs}", "run.name=x", *overrides])
        return code, self._capsys.readouterr().err

    def refused(self, *overrides: str, command: str = "train") -> str:
        with mock.patch("orchestrator.cluster.Cluster.__aenter__") as started:
            code, message = self.train(*overrides, command=command)
        assert not started.called
        assert code == 2
        assert message.startswith("headway: ")
        assert "Traceback" not in message
        assert not self.runs.exists()
        return message

    def rows(self, *lines: str, name: str = "rows.jsonl") -> str:
        (self.folder / name).write_text("\n".join(lines) + "\n")
        return str(self.folder / name)


@pytest.fixture
def shell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(tmp_path, capsys)


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    assert "usage: headway" in capsys.readouterr().out
    assert cli.main(["train", "--help"]) == 0
    assert "usage: headway" in capsys.readouterr().out
    assert cli.main([]) == 2
    assert cli.main(["trian"]) == 2
    assert "unknown command 'trian'" in capsys.readouterr().err


class TestRefused:
    def test_unknown_key(self, shell: Shell) -> None:
        assert "learner.rank: there is no such key; did you mean learner.ranks?" in shell.refused("learner.rank=2")

    def test_model_that_is_not_there(self, shell: Shell) -> None:
        assert "model.path=./no/model/here: no such folder" in shell.refused("model.path=./no/model/here")
        assert "model.path=builtin:huge: there is no such built-in model" in shell.refused("model.path=builtin:huge")

    def test_answers_longer_than_the_model_allows(self, shell: Shell) -> None:
        message = shell.refused("rollout.max_response_tokens=9000")
        assert "rollout.max_prompt_tokens" in message
        assert "2048" in message

    def test_data_file_that_is_not_there(self, shell: Shell) -> None:
        message = shell.refused("data=files", "data.train.mine.path=no_rows.jsonl")
        assert "data.train.mine.path=no_rows.jsonl" in message

    def test_data_file_with_a_broken_line(self, shell: Shell) -> None:
        path = shell.rows('{"prompt": "a"}', '{"prompt": "b"', '{"prompt": "c"}')
        assert f"{path}:2" in shell.refused("data=files", f"data.train.mine.path={path}")

    def test_column_that_no_row_has(self, shell: Shell) -> None:
        path = shell.rows(*[json.dumps({"prompt": f"say {i}", "goal": "x"}) for i in range(8)])
        reward = shell.folder / "own.py"
        reward.write_text("def own(completion, answer):\n    return 0.0\n")
        message = shell.refused(
            "data=files", "reward=custom", f"data.train.mine.path={path}", f'reward.functions.own.path="{reward}:own"'
        )
        assert "data.train.mine" in message
        assert "'own'" in message
        assert "answer" in message
        assert "goal" in message

    def test_reward_that_is_not_there(self, shell: Shell) -> None:
        message = shell.refused("reward.functions.own.path=no_such_module.reward")
        assert "reward.functions: reward function 'no_such_module.reward': there is no module" in message

    def test_f08_fewer_prompts_than_a_batch(self, shell: Shell) -> None:
        message = shell.refused("data.train.synthetic.options.size=3", "sampling.groups_per_batch=64")
        assert "sampling.groups_per_batch=64: data.train has only 3 prompts" in message

    def test_prompt_that_is_too_long(self, shell: Shell) -> None:
        path = shell.rows(*[json.dumps({"prompt": "say " * (n + 1)}) for n in range(100)])
        message = shell.refused("data=files", f"data.train.mine.path={path}", "rollout.max_prompt_tokens=100")
        assert "rollout.max_prompt_tokens=100" in message
        assert path in message

    def test_resume_without_a_checkpoint(self, shell: Shell) -> None:
        message = shell.refused("checkpoint.resume=must")
        assert f"checkpoint.resume=must: there is no whole checkpoint in {shell.runs / 'x' / 'checkpoints'}" in message

    def test_nothing_to_evaluate(self, shell: Shell) -> None:
        assert "data.eval: no set to evaluate" in shell.refused("data.eval={}", command="eval")

    def test_a_run_of_that_name_exists(self, shell: Shell) -> None:
        trajectories = shell.runs / "x" / "journal" / "trajectories"
        trajectories.mkdir(parents=True)
        (trajectories / "lineage-0000-version-000000-shard-000.parquet").touch()
        before = sorted(shell.runs.rglob("*"))
        code, message = shell.train()
        assert code == 2
        assert "run.name=x" in message
        assert "checkpoint.resume=auto" in message
        assert sorted(shell.runs.rglob("*")) == before


class Broken:
    """A cluster that can't be entered."""

    error: BaseException

    def __init__(self, *arguments: Any, **named: Any) -> None:
        pass

    async def __aenter__(self) -> None:
        raise self.error

    async def __aexit__(self, *arguments: Any) -> None:
        pass


class Silent:
    """W&B, not there."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        pass

    def write(self, record: Any) -> None:
        pass

    def close(self, failed: bool) -> None:
        pass


class Remote(RuntimeError):
    """As Ray wraps an error of an actor: its text is the whole remote traceback, its cause the error."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(f"Traceback (most recent call last): …\n{cause}")
        self.cause = cause


class TestFailed:
    @pytest.fixture(autouse=True)
    def broken(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import orchestrator.cluster  # so that the run's own import finds the replacement

        monkeypatch.setattr(orchestrator.cluster, "Cluster", Broken)
        monkeypatch.setattr("orchestrator.api.WandbSink", Silent)

    @pytest.mark.parametrize(
        ("error", "line"),
        [
            (FleetError("no rollout actor is left"), "FleetError: no rollout actor is left"),
            (ZeroDivisionError("of all things"), "ZeroDivisionError: of all things"),
            (Remote(ValueError("in the actor")), "ValueError: in the actor"),
        ],
    )
    @pytest.mark.parametrize("command", ["train", "eval"])
    def test_a_message_for_the_person_and_a_traceback_for_the_log(
        self, shell: Shell, monkeypatch: pytest.MonkeyPatch, error: Exception, line: str, command: str
    ) -> None:
        monkeypatch.setattr(Broken, "error", error, raising=False)
        code, message = shell.train(command=command)
        log = shell.runs / "x" / "logs" / "driver.log"
        assert code == 1
        assert f"headway: {line}\nThe traceback is in {log}\n" in message
        assert "Traceback (most" not in message
        assert "Traceback (most recent call last)" in log.read_text()
        assert str(error).splitlines()[-1] in log.read_text()

    def test_a_start_that_failed_does_not_take_the_name(self, shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Broken, "error", ConfigError("the run asks for 50 CPU cores"), raising=False)
        for _ in range(2):
            code, message = shell.train()
            assert code == 2
            assert "headway: the run asks for 50 CPU cores" in message

    def test_a_run_that_starved_before_its_first_batch_does_not_take_the_name(
        self, shell: Shell, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(Broken, "error", Starved("no group could be trained on"), raising=False)
        outcomes = shell.runs / "x" / "journal" / "outcomes"
        outcomes.mkdir(parents=True)
        (outcomes / "lineage-0000-version-000000-shard-000.parquet").touch()
        code, message = shell.train()
        assert code == 1
        assert "no group could be trained on" in message

    def test_what_a_resume_says_is_in_the_log(self, shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Broken, "error", ConfigError("the run asks for 50 CPU cores"), raising=False)
        trajectories = shell.runs / "x" / "journal" / "trajectories"
        trajectories.mkdir(parents=True)
        (trajectories / "lineage-0000-version-000000-shard-000.parquet").touch()
        shell.train("checkpoint.resume=auto")
        shell.train("checkpoint.resume=must")
        log = (shell.runs / "x" / "logs" / "driver.log").read_text()
        assert "what it recorded before counts no more" in log
        assert "checkpoint.resume=must: there is no whole checkpoint" in log

    def test_interrupted(self, shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Broken, "error", KeyboardInterrupt(), raising=False)
        code, message = shell.train()
        assert code == 130
        assert message.endswith("headway: interrupted\n")

    def test_a_second_process_is_kept_out(self, shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
        import fcntl

        (shell.runs / "x").mkdir(parents=True)
        with (shell.runs / "x" / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            # Its checkpoints are not even looked at: that process may be removing them.
            code, message = shell.train("checkpoint.resume=must")
        assert code == 2
        assert "run.name=x: another process is working on" in message

    def test_an_error_before_there_is_a_log_is_raised(self, shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken(*arguments: Any) -> None:
            raise ZeroDivisionError

        monkeypatch.setattr("orchestrator.api.prepare", broken)
        with pytest.raises(ZeroDivisionError):
            shell.train()


def test_the_entry_point_without_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["headway"])
    assert cli.main() == 2
