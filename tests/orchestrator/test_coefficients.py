"""Coefficients that follow the policy: by hand, over a resume, and in what is written down."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeLearner, FakeRun, Killed, fake_config, patch_ray

from learner.batch import Coefficients, RankPlan
from learner.tally import Tally
from learner.worker import LearnReport
from orchestrator.algorithm import check_algorithm
from orchestrator.coefficients import CoefficientControl
from orchestrator.compose import load
from orchestrator.config import AlgorithmConfig, ConfigError
from orchestrator.journal import read_trajectories

KL = AlgorithmConfig(kl_coefficient=0.1, kl_target=0.02, kl_horizon_answers=100)
ENTROPY = AlgorithmConfig(
    entropy_coefficient=0.01, entropy_target=0.2, entropy_step=0.005, entropy_coefficient_max=0.02
)


def test_the_kl_coefficient_follows_the_kl() -> None:
    """Ziegler et al.: times 1 + clip(KL / target - 1, -0.2, 0.2) * answers / horizon."""
    control, expected = CoefficientControl(KL), 0.1
    for kl, answers, factor in ((0.04, 50, 1.1), (0.022, 100, 1.1), (-0.01, 10, 0.98), (0.02, 100, 1.0)):
        control.observe({"actor/kl_ref": kl}, answers)
        expected *= factor
        assert control.of_batch.kl == pytest.approx(expected)
        assert control.metrics() == {"actor/kl_coefficient": control.of_batch.kl}
    assert control.of_batch.entropy is None


def test_the_entropy_bonus_is_there_at_or_below_the_target() -> None:
    """Skywork-OR1: the coefficient moves by a step each batch; above the target it is not applied."""
    control = CoefficientControl(ENTROPY)
    assert control.of_batch == Coefficients(entropy=0.01)
    seen = []
    for entropy in (0.1, 0.2, 0.15, 0.3, 0.25, 0.1):
        control.observe({"actor/entropy": entropy, "actor/kl_ref": 9.0}, 10)
        seen.append(control.of_batch.entropy)
    assert seen == pytest.approx([0.015, 0.02, 0.02, 0.0, 0.0, 0.015])  # held at the maximum; 0.015 and 0.01 unused
    for _ in range(9):
        control.observe({"actor/entropy": 1.0}, 10)
    control.observe({"actor/entropy": 0.2}, 10)
    assert control.of_batch.entropy == pytest.approx(0.005), "it never fell below 0"


@pytest.mark.parametrize("metrics", [{}, {"actor/kl_ref": math.nan, "actor/entropy": math.inf}])
def test_a_batch_without_a_figure_changes_nothing(metrics: dict[str, float]) -> None:
    control = CoefficientControl(AlgorithmConfig(kl_coefficient=0.1, kl_target=0.02, entropy_target=0.2))
    before = control.state()
    control.observe(metrics, 64)
    assert control.state() == before


def test_fixed_coefficients_are_the_objectives_and_stay() -> None:
    control = CoefficientControl(AlgorithmConfig(kl_coefficient=0.1, entropy_coefficient=0.2))
    control.observe({"actor/kl_ref": 9.0, "actor/entropy": 9.0}, 64)
    assert control.of_batch == Coefficients()
    assert control.metrics() == {"actor/kl_coefficient": 0.1, "actor/entropy_coefficient": 0.2}
    assert CoefficientControl(AlgorithmConfig()).metrics() == {}


def test_a_state_is_gone_on_from_unless_the_coefficient_is_fixed_now() -> None:
    control = CoefficientControl(KL)
    control.observe({"actor/kl_ref": 1.0}, 100)
    again = CoefficientControl(KL)
    again.restore(control.state())
    assert again.of_batch.kl == pytest.approx(0.12)
    fixed = CoefficientControl(AlgorithmConfig(kl_coefficient=0.3))
    fixed.restore(control.state())
    assert fixed.metrics() == {"actor/kl_coefficient": 0.3}


def test_a_coefficient_that_was_fixed_begins_as_configured() -> None:
    before = CoefficientControl(AlgorithmConfig())
    control = CoefficientControl(AlgorithmConfig(kl_coefficient=0.01, kl_target=0.1, entropy_target=1.0))
    control.restore(before.state())
    assert control.of_batch == Coefficients(kl=0.01, entropy=0.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kl_target": 0.1}, r"kl_target=0\.1 multiplies algorithm\.kl_coefficient=0\.0: expected .* above 0"),
        ({"kl_coefficient": 0.1, "kl_estimator": "k1"}, "kl_estimator=k1 as a term of the loss pulls nowhere"),
        ({"entropy_target": 0.1, "entropy_coefficient": -0.1}, "from 0 to algorithm.entropy_coefficient_max=0.05"),
        ({"entropy_target": 0.1, "entropy_coefficient": 0.1}, "from 0 to algorithm.entropy_coefficient_max=0.05"),
    ],
)
def test_terms_without_pull_and_targets_that_no_coefficient_reaches_are_refused(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_algorithm(AlgorithmConfig(**changes), 4)


def test_what_can_be_steered_is_accepted() -> None:
    check_algorithm(KL, 4)
    check_algorithm(ENTROPY, 4)
    check_algorithm(AlgorithmConfig(entropy_target=0.1), 4)
    in_reward = {"advantage": "reinforce_pp", "kl_placement": "reward", "kl_estimator": "k1"}
    check_algorithm(AlgorithmConfig(kl_coefficient=0.1, kl_target=0.1, **in_reward), 4)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("algorithm.kl_target=0", r"algorithm\.kl_target=0\.0: expected more than 0"),
        ("algorithm.entropy_step=0", r"algorithm\.entropy_step=0\.0: expected more than 0"),
        ("algorithm.kl_horizon_answers=63", "expected at least the 64 answers of a batch"),
    ],
)
def test_values_are_checked(override: str, message: str) -> None:
    sizes = ["sampling.groups_per_batch=8", "sampling.answers_per_group=8"]
    with pytest.raises(ConfigError, match=message):
        load(["experiment=tiny", "algorithm.kl_coefficient=0.1", "algorithm.kl_target=0.1", *sizes, override])


# Runs

KLS = [0.04, 0.01, 0.021, 0.5, 0.0, 0.02]
ENTROPIES = [0.1, 0.3, 0.15, 0.05, 0.5, 0.1]


class Drifting(FakeLearner):
    """Its KL and entropy depend on how many updates were made; it remembers what each batch was learned with."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.seen: list[Coefficients] = []

    async def learn(self, plans: Sequence[RankPlan], *data: Any) -> tuple[list[LearnReport], Tally, Any]:
        self.seen.append(plans[0].coefficients)
        kl, entropy = KLS[self.optimizer_step], ENTROPIES[self.optimizer_step]
        reports, _, logprobs = await super().learn(plans, *data)
        return reports, Tally({"tokens": (10.0,), "kl_ref": (10 * kl,), "entropy": (10 * entropy,)}), logprobs


@pytest.fixture
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    patch_ray(monkeypatch)
    monkeypatch.setattr("orchestrator.run.prefix_sharing", lambda prepared: True)


def test_a_resumed_run_goes_on_with_the_same_coefficients(no_ray: None, tmp_path: Path) -> None:
    """And each batch's are reported, and in the journal."""
    config = fake_config(
        "run.batches=6",
        "checkpoint.every_batches=2",
        "algorithm.kl_coefficient=0.1",
        "algorithm.kl_target=0.02",
        "algorithm.kl_horizon_answers=8",
        "algorithm.entropy_target=0.2",
    )
    whole = FakeRun(tmp_path / "whole", config, learner=Drifting()).execute()
    expected = [0.1]
    for kl in KLS[:-1]:
        expected.append(expected[-1] * (1 + min(max(kl / 0.02 - 1, -0.2), 0.2) * 4 / 8))
    assert [c.kl for c in whole.learner.seen] == pytest.approx(expected)  # type: ignore[attr-defined]
    assert len(set(expected)) == 6
    bonuses = [0.0, 0.001, 0.0, 0.001, 0.002, 0.0]  # with a step of 0.001, from 0
    assert [c.entropy for c in whole.learner.seen] == pytest.approx(bonuses)  # type: ignore[attr-defined]

    with pytest.raises(Killed):
        FakeRun(tmp_path / "broken", config, learner=Drifting(dies_at=3)).execute()
    resumed = FakeRun(tmp_path / "broken", config, learner=Drifting(), resume=True).execute()
    assert resumed.learner.loaded[0].name == "v000002"
    assert resumed.learner.seen == whole.learner.seen[2:]  # type: ignore[attr-defined]
    assert resumed.values("actor/kl_coefficient") == whole.values("actor/kl_coefficient")[2:]
    assert whole.values("actor/kl_coefficient") == pytest.approx(expected)
    assert whole.values("actor/entropy_coefficient") == pytest.approx(bonuses)
    rows = read_trajectories(tmp_path / "broken").to_pylist()
    for version, coefficients in enumerate(whole.learner.seen):  # type: ignore[attr-defined]
        found = {(r["kl_coefficient"], r["entropy_coefficient"]) for r in rows if r["policy_version"] == version}
        assert found == {(coefficients.kl, coefficients.entropy)}


def test_fixed_coefficients_are_not_in_the_journal(no_ray: None, tmp_path: Path) -> None:
    run = FakeRun(tmp_path, fake_config("run.batches=1", "algorithm.kl_coefficient=0.1"), learner=Drifting()).execute()
    assert run.learner.seen == [Coefficients()]  # type: ignore[attr-defined]
    assert run.values("actor/kl_coefficient") == [0.1]
    [row, *_] = read_trajectories(tmp_path).to_pylist()
    assert row["kl_coefficient"] is row["entropy_coefficient"] is None
