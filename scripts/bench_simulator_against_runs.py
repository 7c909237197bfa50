"""How well the simulator, fitted to one run, predicts other runs of the same task on the same machines.

    python scripts/bench_simulator_against_runs.py FIT_RUN OTHER_RUN...

Each argument is the folder of a finished run. The others may differ from the first in their sampling (answers_per_group,
groups_per_batch, window), in staleness.max and in the number of engines and ranks; nothing of them but their configuration is
used for the prediction. Deviations: of the step time relative to the real one, of the stale ratio in points. The first row is
the fit on its own run.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from orchestrator.config import ConfigError
from orchestrator.simulation.fit import fit_run
from orchestrator.simulation.prediction import predict


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("fit_run", type=Path)
    parser.add_argument("other_run", type=Path, nargs="+")
    arguments = parser.parse_args()
    fit = fit_run(arguments.fit_run)
    print(f"fitted to {arguments.fit_run}: {fit.measured}")
    print(f"a group's generation is met within {fit.decode_error:.0%} (root mean square over the mean)\n")
    print(f"{'run':32} {'step s':>8} {'predicted':>10} {'off':>7} {'stale':>7} {'predicted':>10} {'off':>7}")
    predictions = [predict(fit, run) for run in (arguments.fit_run, *arguments.other_run)]
    for p in predictions:
        print(
            f"{p.run_dir.name:32} {p.step_s:8.3f} {p.predicted_step_s:10.3f} {p.step_deviation:7.1%} "
            f"{p.stale_ratio:7.1%} {p.predicted_stale_ratio:10.1%} {p.stale_deviation:7.1%}"
        )
    print(f"\nworst deviation {max(p.deviation for p in predictions[1:]):.1%}")


if __name__ == "__main__":
    try:
        main()
    except ConfigError as error:
        sys.exit(str(error))
