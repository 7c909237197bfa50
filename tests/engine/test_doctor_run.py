"""`headway doctor` on real engines and a real learner, and `headway replay` of real runs."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from orchestrator import cli
from orchestrator.api import replay
from orchestrator.replay_journal import recorded_versions

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

CHECKS = """
weights resources disk batches masks logprobs logprobs+after+an+update shift versions rewards replay temperature direction
checkpoint memory
"""


@pytest.fixture(autouse=True)
def same_logging() -> Iterator[None]:
    level = logging.getLogger().level
    yield
    logging.getLogger().setLevel(level)


def test_a_chain_that_is_right_passes_every_check(
    tmp_path: Path, small: list[str], ray_session: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a temperature, a reference in an actor of its own and an entropy bonus; and the run that it made can be replayed."""
    code = cli.main(
        [
            "doctor",
            *small,
            f"run.dir={tmp_path}",
            "run.name=run",
            "rollout.temperature=0.8",
            "algorithm.kl_coefficient=0.05",
            "learner.reference=own",
            "algorithm.entropy_coefficient=0.01",
            "sampling.filter=true",
            "learner.warmup_steps=100",
        ]
    )
    folder = tmp_path / "run" / "doctor"
    report = json.loads((folder / "doctor.json").read_text())
    failing = {check["name"]: check for check in report["checks"] if check["verdict"] != "pass"}
    assert failing == {}
    assert code == 0
    assert report["passed"]
    found = {check["name"]: check for check in report["checks"]}
    assert set(found) == {name.replace("+", " ") for name in CHECKS.split()}
    assert found["temperature"]["figures"]["fitted"] == pytest.approx(0.8, rel=0.01)
    assert found["logprobs"]["figures"]["mean"] < 1e-4
    assert "every engine followed" in capsys.readouterr().out
    assert sorted(path.name for path in folder.iterdir()) == ["doctor.json", "lock", "logs", "run"]
    assert not (tmp_path / "run" / "journal").exists()  # the name is still free

    stored = replay(folder / "run", 1)
    assert stored.differing == []
    assert stored["actor/loss"].note == "holds a KL term and an entropy bonus: needs replay.forward=true"
    again = replay(folder / "run", 0, forward=True)
    assert again.differing == []
    assert again["actor/loss"].replayed == pytest.approx(again["actor/loss"].recorded, rel=1e-5)
    assert again["actor/kl_ref"].replayed is not None
    assert again["learner logprobs"].difference is not None
    assert again["learner logprobs"].difference < 1e-5


def test_every_step_of_an_off_policy_run_replays_to_its_loss(launch: Callable, ray_session: None) -> None:
    run = launch(
        "run.batches=6",
        "staleness.max=2",
        "algorithm.updates_per_batch=2",
        "rollout.max_response_tokens=32",
        "checkpoint.every_batches=3",
    )
    assert run.finish(240) == 0, run.output
    assert recorded_versions(run.folder) == list(range(6))
    losses = []
    for version in range(6):
        replayed = replay(run.folder, version)
        assert replayed.differing == []
        assert replayed["advantage of each answer"].difference == 0
        assert replayed["mismatch/kl"].difference is not None
        loss = replayed["actor/loss"]
        assert loss.replayed == pytest.approx(loss.recorded, rel=1e-6, abs=1e-9)
        losses.append(abs(loss.recorded or 0.0))
    assert max(losses) > 1e-3  # not all of them cancel

    # Version 3 is kept: its logprobs come out again, from the checkpoint and in another process.
    forward = replay(run.folder, 3, forward=True)
    assert forward.differing == []
    assert forward["learner logprobs, first update"].difference == pytest.approx(0, abs=1e-5)
    other = replay(run.folder, 3, overrides=["algorithm.loss_options={clip_low: 0.0001, clip_high: 0.0001}"])
    assert "actor/loss" in {figure.name for figure in other.differing}
