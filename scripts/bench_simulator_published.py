"""Published speed-ups of asynchronous over synchronous training, beside those that the simulator gives for the same settings.

    python scripts/bench_simulator_published.py

What a publication says about its synchronous run calibrates the simulator: the time of learning, and that of generation on all
GPUs. The latter is met by the time of a decoding step with few answers, which is what the last and longest ones take; the
rest of the engines is the roofline's. The asynchronous run is then simulated with its split of the GPUs, and its learning time
where that was published too, else the synchronous one shared out over fewer GPUs. What was not published is assumed, as the
notes say; the speed-up is that of the mean step. Other systems' queues, batches that are learned in parts while they fill, and
changes of the answers' lengths in the course of a run are not simulated.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from orchestrator.checks import validate_simulation
from orchestrator.compose import load
from orchestrator.config import Config
from orchestrator.simulation.hardware import Layout, Roofline
from orchestrator.simulation.scenario import Scenario
from orchestrator.simulation.simulator import simulate
from orchestrator.simulation.types import SimulationResult, Timing, Workload

VERL = "verl, docs/advance/fully_async.md"
ONE_STEP = "verl, docs/advance/one_step_off.md"
# H20: 96 GB at 4,000 GB/s, 148 dense bf16 TFLOP/s.
H20 = "simulate.gpu={memory_gb:96,memory_gb_per_s:4000,peak_tflops:148}"
LEARNER_MFU = 0.4  # by which published learning times tell how long answers were, or lengths how long learning took


@dataclass(frozen=True)
class Published:
    """One comparison. Seconds are of one step: generation and learning of the synchronous run on all GPUs, learning of the
    asynchronous one on `learner_gpus`. Without `learner_gpus` the best split is searched, without `generate_s` generation is the
    roofline's and `learn_s` a multiple of it. `speedup` is the published one, lowest and highest.
    """

    name: str
    source: str
    overrides: tuple[str, ...]
    gpus: int
    learner_gpus: int | None
    staleness: int
    generate_s: float | None
    learn_s: float
    speedup: tuple[float, float]
    learn_async_s: float | None = None
    other_s: float = 0.0  # what else a synchronous step holds
    notes: str = ""


def lengths(prompt_tokens: int, median: int, spread: float) -> str:
    return (
        f"simulate.workload={{prompt_tokens:{prompt_tokens},median_response_tokens:{median},response_spread:{spread}}}"
    )


PUBLISHED = (
    *(
        Published(
            f"fully async 7B, {gpus} GPUs",
            VERL,
            # 1,050 tokens of prompt and answer are what the learner's 269.8 s on 32 GPUs come to at LEARNER_MFU.
            (H20, lengths(150, 500, 1.1), "rollout.max_response_tokens=28672", "sampling.filter=false"),
            gpus=gpus,
            learner_gpus=gpus // 2,
            staleness=1,
            generate_s=generate_s,
            learn_s=old_s + update_s,
            learn_async_s=update_async_s,
            other_s=step_s - generate_s - old_s - update_s,
            speedup=speedup,
            notes="staleness threshold 0.5 there, staleness.max=1 here",
        )
        for gpus, step_s, generate_s, old_s, update_s, update_async_s, speedup in (
            (32, 790.10, 357.41, 107.71, 269.80, 313.81, (1.70, 2.66)),
            (64, 365.28, 150.72, 70.26, 133.41, 156.98, (1.83, 2.09)),
            (128, 356.30, 177.85, 53.92, 113.81, 113.16, (2.35, 2.67)),
        )
    ),
    Published(
        "one step off 7B, 16 GPUs",
        ONE_STEP,
        # 550 tokens, by the learner's 286 s on 16 GPUs.
        (H20, lengths(150, 220, 1.1), "rollout.max_response_tokens=20480", "sampling.filter=false"),
        gpus=16,
        learner_gpus=12,
        staleness=1,
        generate_s=247,
        learn_s=88 + 286,
        learn_async_s=108 + 337,
        other_s=749 - 247 - 88 - 286,
        speedup=(1.23, 1.44),
        notes="FSDP2; 1.23 by the whole run, 1.44 by the step",
    ),
    Published(
        "AReaL 1.5B, 128 GPUs",
        "arXiv:2505.24298, table 1",
        (
            lengths(200, 4000, 0.8),
            "simulate.model={parameters_billion:1.5,kv_bytes_per_token:28672}",
            "rollout.max_response_tokens=27648",
            "sampling.filter=false",
        ),
        gpus=128,
        learner_gpus=32,
        staleness=4,
        # 41.0 h for 1,000 steps; 46 million tokens x 8 x 1.5e9 operations on 128 H800 at LEARNER_MFU.
        generate_s=147.6 - 11.0,
        learn_s=11.0,
        speedup=(2.77, 2.77),
        notes="lengths assumed, learning from them; a quarter of the GPUs learns (not confirmed)",
    ),
    Published(
        "ROLL Flash 8B, 128 GPUs",
        "arXiv:2510.11345",
        (
            lengths(200, 9000, 0.6),
            "simulate.model={parameters_billion:8.2,kv_bytes_per_token:147456}",
            "rollout.max_response_tokens=32768",
            "sampling={groups_per_batch:256,filter:false}",
        ),
        gpus=128,
        learner_gpus=None,
        staleness=2,
        generate_s=None,
        learn_s=0.3 / 0.7,
        speedup=(2.24, 2.24),
        notes="RLVR, at most 2.24; generation is 70% of a step («over 70%» there); all else is assumed, the best split is searched",
    ),
)


class Calibrated:
    """A roofline with other decoding steps and published learning times; `Machines` of the simulation."""

    def __init__(self, config: Config, published: Published) -> None:
        self._roofline = Roofline(config)
        self._published = published
        self.decode_base_factor = 1.0
        self.learn_factor = 1.0

    def workload(self, answers_per_group: int) -> Workload:
        return self._roofline.workload(answers_per_group)

    def timing(self, layout: Layout) -> Timing:
        timing, p = self._roofline.timing(layout), self._published
        if layout.shared:
            learn_s, other_s = p.learn_s, p.other_s
        else:
            learn_s, other_s = p.learn_async_s or p.learn_s * p.gpus / layout.learner_gpus, 1.0
        return replace(
            timing,
            decode_base_s=timing.decode_base_s * self.decode_base_factor,
            learn_base_s=learn_s * self.learn_factor,
            learn_s_per_token=0.0,
            between_s=other_s,
        )

    def calibrate(self, config: Config, synchronous: Scenario) -> None:
        """Meet the time of generation of the synchronous run; or without one, let learning be a multiple of it."""
        published_s = self._published.generate_s
        if published_s is None:
            self.learn_factor = self._generate_s(config, synchronous)
            return
        for _ in range(4):
            longest_s = self.timing(synchronous.layout).decode_base_s * config.rollout.max_response_tokens
            missing = (published_s - self._generate_s(config, synchronous)) / longest_s
            self.decode_base_factor *= max(0.2, 1 + missing)

    def _generate_s(self, config: Config, synchronous: Scenario) -> float:
        result = run(config, self, synchronous, 8)
        return float(result.steps.collect_s[result.measured].mean())


def run(config: Config, machines: Calibrated, scenario: Scenario, steps: int) -> SimulationResult:
    return simulate(scenario.settings(config, machines, steps=steps, seed=0))


def simulated(published: Published) -> tuple[SimulationResult, SimulationResult, Layout]:
    """The synchronous run, calibrated; the asynchronous one; and its split."""
    overrides = ["experiment=simulation", "simulate.score_s=0", *published.overrides]
    config = load(overrides, validate_simulation)
    everyone = Layout(published.gpus, published.gpus, 1, shared=True)
    synchronous = Scenario(everyone, 0)
    machines = Calibrated(config, published)
    machines.calibrate(config, synchronous)
    shares = (
        [published.learner_gpus]
        if published.learner_gpus
        else range(published.gpus // 8, published.gpus, published.gpus // 8)
    )
    splits = [everyone.split(published.gpus - learner_gpus) for learner_gpus in shares]
    results = {split: run(config, machines, Scenario(split, published.staleness), 40) for split in splits}
    best = min(results, key=lambda split: results[split].mean_step_s)
    return run(config, machines, synchronous, 16), results[best], best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    print(f"{'what':32} {'GPUs':>9} {'sync s':>8} {'async s':>8} {'stale':>6} {'published':>12} {'simulated':>10}")
    for published in PUBLISHED:
        synchronous, asynchronous, split = simulated(published)
        low, high = published.speedup
        claimed = f"{low:.2f}x" if low == high else f"{low:.2f}-{high:.2f}x"
        print(
            f"{published.name:32} {split.rollout_gpus:>4}+{split.learner_gpus:<4} {synchronous.mean_step_s:8.1f} "
            f"{asynchronous.mean_step_s:8.1f} {asynchronous.stale_ratio:6.0%} {claimed:>12} "
            f"{synchronous.mean_step_s / asynchronous.mean_step_s:9.2f}x   {published.source}; {published.notes}"
        )


if __name__ == "__main__":
    main()
