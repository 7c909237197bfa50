"""How well a simulation fitted to one run predicts another one: mean step time and stale ratio, beside the real ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from orchestrator.simulation.fit import Fit
from orchestrator.simulation.recording import Recording, read_recording
from orchestrator.simulation.scenario import Scenario
from orchestrator.simulation.simulator import simulate
from orchestrator.simulation.types import SimulationResult

SEEDS = 8  # simulations whose mean is the prediction: a short one depends on the groups it happens to draw


@dataclass(frozen=True)
class Prediction:
    """Of one run. Its deviations are shares: 0.1 is 10%."""

    run_dir: Path
    step_s: float
    predicted_step_s: float
    stale_ratio: float
    predicted_stale_ratio: float

    @property
    def step_deviation(self) -> float:
        """Of the step time, relative to the real one."""
        return abs(self.predicted_step_s / self.step_s - 1)

    @property
    def stale_deviation(self) -> float:
        """Of the stale ratio: the difference, because it is a share itself and often 0."""
        return abs(self.predicted_stale_ratio - self.stale_ratio)

    @property
    def deviation(self) -> float:
        """The larger of the two."""
        return max(self.step_deviation, self.stale_deviation)


def predict(fit: Fit, run_dir: Path, *, seeds: int = SEEDS) -> Prediction:
    """What the fit says about the run in `run_dir`, by its configuration alone, beside what that run did.

    Raises ConfigError where the folder is no run's, or the run is too short or on machines that the fit says nothing about.
    """
    real = read_recording(run_dir)
    results = simulate_run(fit, real, seeds=seeds)
    return Prediction(
        run_dir=run_dir,
        step_s=real.mean_step_s,
        predicted_step_s=float(np.mean([result.mean_step_s for result in results])),
        stale_ratio=real.stale_ratio,
        predicted_stale_ratio=float(np.mean([result.stale_ratio for result in results])),
    )


def simulate_run(fit: Fit, run: Recording, *, seeds: int) -> Sequence[SimulationResult]:
    """Simulations of a run with the same settings and as many steps."""
    scenario = Scenario(run.layout, run.config.staleness.max)
    return [simulate(scenario.settings(run.config, fit, steps=len(run.steps), seed=seed)) for seed in range(seeds)]
