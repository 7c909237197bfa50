"""Speed of the simulator: CPU seconds for whole runs of several sizes, the sampling queue included.

Answers are heavy-tailed (lognormal, the longest of a hundred is eight times the median) and a fifth of the groups is
filtered. The last line is `largest X s`: the run with most engines and groups.

    python scripts/bench_simulator.py [--quick]
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from orchestrator.sampling_types import QueueSettings
from orchestrator.simulation.simulator import simulate
from orchestrator.simulation.types import SimulationResult, SimulationSettings, Timing
from orchestrator.simulation.workload import SyntheticWorkload

ANSWERS = 16
LEARN_S = 60.0  # a batch


def settings(engines: int, groups: int, staleness: int, steps: int) -> SimulationSettings:
    workload = SyntheticWorkload(
        prompt_tokens=512, median_tokens=2000, spread=0.9, max_tokens=16384, pass_alpha=0.7, pass_beta=0.7
    )
    timing = Timing(
        decode_base_s=0.008,
        decode_per_answer_s=5e-5,
        max_concurrent_answers=256,
        prefill_s_per_token=1e-5,
        score_s=0.5,
        learn_s_per_token=LEARN_S / (groups * ANSWERS * 3000),
        publish_s=5.0,
        pause_s=1.0,
        between_s=1.0,
    )
    queue = QueueSettings(groups, ANSWERS, filter=True, max_staleness=staleness)
    return SimulationSettings(queue, timing, workload, engines, steps)


def measured(wanted: SimulationSettings) -> tuple[SimulationResult, float]:
    began = time.process_time()
    result = simulate(wanted)
    return result, time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a twentieth of the steps")
    share = 20 if parser.parse_args().quick else 1
    sizes = [(1, 8, 1, 1000), (16, 64, 1, 1000), (64, 128, 0, 1000), (64, 128, 4, 1000), (1024, 512, 2, 1000)]
    print(
        f"{'engines':>8} {'groups':>7} {'staleness':>10} {'steps':>6} {'dispatched':>11} {'CPU s':>7} {'groups/s':>9}"
    )
    for engines, groups, staleness, steps in sizes:
        result, seconds = measured(settings(engines, groups, staleness, steps // share))
        dispatched = int(result.steps.dispatched_groups.sum())
        print(
            f"{engines:>8,} {groups:>7,} {staleness:>10} {steps // share:>6,} {dispatched:>11,} {seconds:>7.1f} "
            f"{dispatched / seconds:>9,.0f}",
            flush=True,
        )
    print(f"largest {seconds:.1f} s")


if __name__ == "__main__":
    main()
