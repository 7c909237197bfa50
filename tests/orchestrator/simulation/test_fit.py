"""Fits to runs whose times are known: parameters are found again, and other runs are predicted."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from pretend_run import EPOCH_S, PROMPT_TOKENS, PretendRun

from orchestrator.config import ConfigError, SimulateConfig
from orchestrator.journal import JOURNAL, Outcome, write_outcomes
from orchestrator.simulation.fit import Fit, fit, fit_run
from orchestrator.simulation.hardware import Layout
from orchestrator.simulation.prediction import predict
from orchestrator.simulation.recording import read_recording
from orchestrator.simulation.types import Timing

pytestmark = pytest.mark.thorough

TRUE = Timing(
    decode_base_s=0.02,
    decode_per_answer_s=0.0008,
    max_concurrent_answers=128,
    learn_s_per_token=0.0012,
    score_s=0.1,
    publish_s=0.2,
    pause_s=0.05,
    between_s=0.15,
    engine_speed_while_learning=0.6,
    learner_speed_while_generating=0.7,
)
# Without the filter: how often a batch waits for a replaced group is chance, and a short run's mean step time with it.
PLAIN = ("run.batches=40", "sampling.filter=false")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def one_ahead(folder: Path) -> Path:
    return PretendRun(folder / "one_ahead", TRUE, [*PLAIN, "staleness.max=1"]).write()


@pytest.fixture(scope="module")
def fitted(one_ahead: Path) -> Fit:
    return fit_run(one_ahead)


def test_a_recording_holds_what_the_run_did(one_ahead: Path) -> None:
    recording = read_recording(one_ahead)
    assert len(recording.steps) == 40
    assert recording.prompt_tokens == PROMPT_TOKENS
    assert recording.shares_prefixes
    assert recording.layout == Layout(1, 1, 1, shared=False)
    assert recording.score_s == pytest.approx(TRUE.score_s, rel=0.1)
    steps = recording.steps
    assert np.all(np.diff(steps.acknowledged_s) > 0)
    assert np.all(steps.taken_s[1:] >= steps.acknowledged_s[:-1])
    assert np.mean(steps.acknowledged_s - steps.learned_s) == pytest.approx(TRUE.publish_s, rel=0.05)
    assert recording.stale_ratio > 0.5
    [first, *_] = recording.groups
    assert first.dispatched_s == 0
    assert len(first.lengths) == len(first.rewards) == 8


def test_parameters_are_found_again(fitted: Fit) -> None:
    for name, within in {
        "decode_base_s": 0.15,
        "decode_per_answer_s": 0.15,
        "learn_s_per_token": 0.1,
        "publish_s": 0.05,
        "pause_s": 0.05,
        "between_s": 0.05,
        "score_s": 0.1,
        "engine_speed_while_learning": 0.15,
        "learner_speed_while_generating": 0.15,
    }.items():
        assert getattr(fitted.measured, name) == pytest.approx(getattr(TRUE, name), rel=within), name
    assert fitted.measured.learn_base_s == 0
    assert fitted.decode_error < 0.05


@pytest.mark.parametrize(
    "overrides",
    [["staleness.max=0"], ["staleness.max=1", "sampling.answers_per_group=16"], ["staleness.max=2"]],
    ids=["synchronous", "larger_groups", "further_ahead"],
)
def test_other_runs_are_predicted(fitted: Fit, folder: Path, overrides: list[str]) -> None:
    run = PretendRun(folder / "-".join(overrides).replace("=", "_"), TRUE, [*PLAIN, *overrides], seed=1).write()
    prediction = predict(fitted, run, seeds=3)
    assert prediction.step_deviation < 0.1
    assert prediction.stale_deviation < 0.1


def test_a_constant_part_of_learning_shows(folder: Path) -> None:
    timing = replace(TRUE, learn_base_s=0.3, learn_s_per_token=0.0004, learner_speed_while_generating=1.0)
    run = PretendRun(folder / "constant", timing, [*PLAIN, "staleness.max=0"], noise=0.01).write()
    measured = fit_run(run).measured
    assert measured.learn_base_s == pytest.approx(0.3, rel=0.3)
    assert measured.learn_s_per_token == pytest.approx(0.0004, rel=0.5)


def test_a_synchronous_run_shows_no_slow_down(folder: Path) -> None:
    run = PretendRun(folder / "synchronous", TRUE, [*PLAIN, "staleness.max=0"], seed=2).write()
    measured = fit_run(run).measured
    assert (measured.engine_speed_while_learning, measured.learner_speed_while_generating) == (1, 1)


class TestOtherMachines:
    def test_the_learner_is_split_among_its_gpus(self, fitted: Fit) -> None:
        timing = fitted.timing(Layout(3, 2, 1, shared=False))
        assert timing.learn_s_per_token == pytest.approx(fitted.measured.learn_s_per_token / 2)
        assert timing.decode_base_s == fitted.measured.decode_base_s

    def test_turns(self, fitted: Fit) -> None:
        timing = fitted.timing(Layout(2, 2, 1, shared=True))
        assert (timing.engine_speed_while_learning, timing.learner_speed_while_generating) == (0, 1)
        assert timing.pause_s == timing.publish_s
        assert timing.learn_base_s == SimulateConfig().turn_s

    def test_speeds_that_the_keys_set(self, fitted: Fit) -> None:
        keys = SimulateConfig(engine_speed_while_learning=0.3)
        timing = replace(fitted, keys=keys).timing(fitted.recording.layout)
        assert timing.engine_speed_while_learning == 0.3
        assert timing.learner_speed_while_generating == fitted.measured.learner_speed_while_generating

    def test_engines_of_another_width(self, fitted: Fit) -> None:
        with pytest.raises(ConfigError, match=r"simulate\.gpus_per_engine=2"):
            fitted.timing(Layout(2, 1, 2, shared=False))


def test_where_both_sides_take_turns_engines_stand_still(one_ahead: Path) -> None:
    recording = read_recording(one_ahead)
    shared = replace(recording, layout=replace(recording.layout, shared=True))
    measured = fit(shared).measured
    assert (measured.engine_speed_while_learning, measured.learner_speed_while_generating) == (0, 1)
    assert measured.pause_s == measured.publish_s


def test_what_was_decided_after_the_last_batch_is_left_out(one_ahead: Path, tmp_path: Path) -> None:
    """A run that ends writes down what fed no batch any more."""
    run = shutil.copytree(one_ahead, tmp_path / "ended")
    late = Outcome("g0-009999", "p", 0, "filtered", [1.0], [9], 40, EPOCH_S + 9000, EPOCH_S + 9001)
    write_outcomes(run / JOURNAL, 0, 40, [late])
    recording = read_recording(run)
    assert recording.groups == read_recording(one_ahead).groups
    assert recording.lost_s == ()


def test_groups_that_left_no_trace_are_missed_by_their_numbers(one_ahead: Path, tmp_path: Path) -> None:
    recording = read_recording(one_ahead)
    assert recording.lost_s == ()
    # The outcomes of its groups are taken away, as if they had gone stale.
    run = shutil.copytree(one_ahead, tmp_path / "lossy")
    for path in (run / "journal" / "outcomes").glob("*-version-00001[5-9]-*"):
        path.unlink()
    lossy = read_recording(run)
    assert lossy.lost_s
    assert list(lossy.lost_s) == sorted(lossy.lost_s)


class TestRefused:
    def test_no_run(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"simulate.from_run=.*there is no config.yaml"):
            read_recording(tmp_path)

    def test_too_short(self, tmp_path: Path) -> None:
        run = PretendRun(tmp_path / "short", TRUE, ["run.batches=5"]).write()
        with pytest.raises(ConfigError, match=r"only 5 batches were trained .* needs at least 8"):
            read_recording(run)
