"""Which split of a number of GPUs, and how much staleness: found by simulating short runs.

For each staleness, in rising order, the number of rollout GPUs is searched by trying neighbours of the best one so far at ever
smaller distances, since the step time falls and rises again as GPUs move from one side to the other. All short runs draw the
same answers, so that they differ by the setting alone. GPUs that both sides use in turns are tried as well. The best setting of
every staleness is simulated once more, longer; of these the recommendation is the one with the smallest staleness whose
step is at most `NEARLY` longer than the shortest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from orchestrator.config import Config, ConfigError
from orchestrator.simulation.hardware import Layout, Machines
from orchestrator.simulation.report import Report
from orchestrator.simulation.scenario import Scenario
from orchestrator.simulation.simulator import simulate
from orchestrator.simulation.types import SimulationResult

STALENESSES = (0, 1, 2, 4, 8)
MEASURED_STEPS, FINAL_STEPS = 10, 40  # beside those in which the pipeline fills and drains
SHARES = 32  # a split is searched in steps of this part of all GPUs, or of one engine
NEARLY = 0.03


@dataclass(frozen=True)
class Advice:
    """`reports` are the best settings found, the recommended one first, then by step time. `sentence` says why."""

    reports: tuple[Report, ...]
    sentence: str


def advise(
    config: Config,
    machines: Machines,
    own: Scenario,
    *,
    most_staleness: int | None = None,
    splits: bool = True,
    tried: Callable[[Scenario], None] = lambda _: None,
) -> Advice:
    """Search around the GPUs of `own`, with a staleness of at most `most_staleness` (None: the largest of `STALENESSES`).

    Without `splits` only the staleness is searched: the machines are known as they are. `tried` is called before each
    simulation. Raises ConfigError for fewer GPUs than an engine and a learner need.
    """
    search = _Search(config, machines, own.layout.total_gpus, tried)
    most = max(STALENESSES) if most_staleness is None else most_staleness
    stalenesses = sorted({*(s for s in STALENESSES if s <= most), most})
    found = search.splits(own, stalenesses) if splits else [replace(own, staleness=s) for s in stalenesses]
    if splits and own.layout.gpus_per_engine == 1:  # wider engines can't take turns with a learner
        found += [replace(own.taking_turns(), staleness=s) for s in stalenesses[:3]]
    results = {scenario: search.run(scenario, FINAL_STEPS) for scenario in found}
    starved = [result.starved for result in results.values() if result.starved]
    results = {scenario: result for scenario, result in results.items() if result.starved is None}
    if not results:
        raise ConfigError(f"simulate.advise=true: no setting could fill its batches. {starved[0]}")
    best = recommended(results)
    synchronous_s = min((r.mean_step_s for s, r in results.items() if s.staleness == 0), default=math.nan)
    ranked = sorted(results, key=lambda scenario: (scenario != best, results[scenario].mean_step_s))
    reports = tuple(
        Report.of("recommended" if scenario == best else "", scenario, results[scenario], synchronous_s)
        for scenario in ranked
    )
    return Advice(reports, _sentence(best, results, synchronous_s))


def recommended(results: dict[Scenario, SimulationResult]) -> Scenario:
    """The smallest staleness within `NEARLY` of the shortest step; of several settings with it the fastest."""
    shortest_s = min(result.mean_step_s for result in results.values())
    near = [scenario for scenario, result in results.items() if result.mean_step_s <= shortest_s * (1 + NEARLY)]
    return min(near, key=lambda scenario: (scenario.staleness, results[scenario].mean_step_s))


class _Search:
    def __init__(self, config: Config, machines: Machines, gpus: int, tried: Callable[[Scenario], None]) -> None:
        self._config = config
        self._machines = machines
        self._gpus = gpus
        self._tried = tried
        self._step_s: dict[Scenario, float] = {}

    def run(self, scenario: Scenario, measured_steps: int) -> SimulationResult:
        self._tried(scenario)
        # As many more as `SimulationResult` leaves out.
        steps = measured_steps + 2 * (scenario.staleness + 1) + 1 + scenario.staleness
        return simulate(scenario.settings(self._config, self._machines, steps=steps, seed=self._config.simulate.seed))

    def splits(self, own: Scenario, stalenesses: Sequence[int]) -> list[Scenario]:
        """The best split for each staleness."""
        width = own.layout.gpus_per_engine
        unit = max(width, self._gpus // SHARES // width * width)
        most = (self._gpus - 1) // unit  # units for rollout; the learner has what is left, at least one GPU
        if most < 1:
            raise ConfigError(
                f"simulate.advise=true: {self._gpus} GPUs are no engine of {width} and a learner; "
                "give simulate.rollout_gpus and simulate.learner_gpus, whose sum is shared out"
            )
        best, distance = max(1, most // 2), max(1, most // 4)
        found = []
        for staleness in stalenesses:
            best = self._best_units(own.layout, staleness, unit, best, distance, most)
            found.append(Scenario(own.layout.split(best * unit), staleness))
            distance = max(1, most // 8)  # the next one's best split is near
        return found

    def _best_units(self, layout: Layout, staleness: int, unit: int, start: int, distance: int, most: int) -> int:
        best = start
        while True:
            tries = [units for units in (best - distance, best, best + distance) if 1 <= units <= most]
            nearest = min(tries, key=lambda units: self._time(Scenario(layout.split(units * unit), staleness)))
            if nearest == best:
                if distance == 1:
                    return best
                distance = max(1, distance // 2)
            best = nearest

    def _time(self, scenario: Scenario) -> float:
        """Mean step time of a short run; infinite where the data can't fill its batches."""
        if scenario not in self._step_s:
            result = self.run(scenario, MEASURED_STEPS)
            self._step_s[scenario] = float("inf") if result.starved else result.mean_step_s
        return self._step_s[scenario]


def _sentence(best: Scenario, results: dict[Scenario, SimulationResult], synchronous_s: float) -> str:
    result, layout = results[best], best.layout
    if layout.shared:
        use = f"Let rollout and learner take turns on all {layout.total_gpus} GPUs"
        keys = f"placement=shared rollout.replicas={layout.engines} learner.ranks={layout.learner_gpus}"
    else:
        use = f"Use {layout.rollout_gpus} GPUs for rollout and {layout.learner_gpus} for the learner"
        keys = f"placement=split rollout.replicas={layout.engines} learner.ranks={layout.learner_gpus}"
    keys += f" rollout.tensor_parallel_size={layout.gpus_per_engine}" * (layout.gpus_per_engine > 1)
    shortest = min(results, key=lambda scenario: results[scenario].mean_step_s)
    step_s = result.mean_step_s
    if shortest.staleness > best.staleness:
        gain = 1 - results[shortest].mean_step_s / step_s
        why = f"staleness.max={shortest.staleness} would make it only {gain:.1%} shorter"
    else:
        why = "no setting that was tried is faster"
    return (
        f"{use} with staleness.max={best.staleness}: a step takes {step_s:.4g} s, {synchronous_s / step_s:.2f} times as fast as "
        f"the fastest synchronous setting found; {why}. Rollout is idle {result.rollout_idle_share:.0%} of the time, the "
        f"learner {result.learner_idle_share:.0%}; {result.stale_ratio:.0%} of the answers are stale. "
        f"In a run: {keys} staleness.max={best.staleness}"
    )
