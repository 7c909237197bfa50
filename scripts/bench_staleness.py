"""The same live run at several bounds of staleness, side by side: real engine, learner and rewards, the tiny model.

Answers are of very different lengths, and long ones are slow twice over: to write, and to judge (the reward sleeps for as
long as the answer is). So a queue that favours what is finished first would show it in the length ratio: the mean length
of consumed answers (trained and filtered) over that of all scored ones.

    python scripts/bench_staleness.py [--batches 16] [--staleness 0 2]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RATIO = "bias/trained_to_dispatched_length"


def slow_letters(completion: str) -> float:
    """Right if the letter e is frequent; 0.5 ms a character to judge."""
    time.sleep(0.0005 * len(completion))
    return float(completion.count("e") > len(completion) / 16)


def run(folder: Path, staleness: int, batches: int) -> list[dict[str, float]]:
    """The records of one run's batches."""
    from orchestrator.sinks import read_metrics

    overrides = [
        "experiment=tiny",
        "reward=custom",
        f"reward.functions.slow.path={Path(__file__).resolve()}:slow_letters",
        "reward.workers=1",
        "placement=split",
        "data.eval={}",
        "logging.wandb=disabled",
        "logging.console=plain",
        "checkpoint.every_batches=0",
        "rollout.max_response_tokens=192",
        "sampling.groups_per_batch=8",
        "sampling.answers_per_group=4",
        f"staleness.max={staleness}",
        f"run.batches={batches}",
        f"run.dir={folder}",
        f"run.name=staleness-{staleness}",
    ]
    command = [sys.executable, "-m", "orchestrator.cli", "train", *overrides]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)
    if done.returncode:
        raise SystemExit(f"the run at staleness.max={staleness} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return [record for record in read_metrics(folder / f"staleness-{staleness}" / "metrics.jsonl") if RATIO in record]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=16)
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 2])
    arguments = parser.parse_args()
    print(
        f"{'staleness.max':>13} {'batch s':>8} {'stale':>6} {'mean':>5} {'max':>4} {'filtered':>9} "
        f"{'length ratio, lowest':>21} {'highest':>8} {'at the end':>11}"
    )
    times = []
    with tempfile.TemporaryDirectory() as folder:
        for staleness in arguments.staleness:
            records = run(Path(folder), staleness, arguments.batches)
            steady = records[2:]  # the first batches fill the queue
            times.append(statistics.median(record["time_s/batch"] for record in steady))
            ratios = [record[RATIO] for record in records]
            print(
                f"{staleness:>13} {times[-1]:>8.2f} {statistics.fmean(r['staleness/stale_ratio'] for r in steady):>6.2f} "
                f"{statistics.fmean(r['staleness/mean'] for r in steady):>5.2f} "
                f"{max(r['staleness/max'] for r in records):>4.0f} {sum(r['group/filtered'] for r in records):>9.0f} "
                f"{min(ratios):>21.3f} {max(ratios):>8.3f} {ratios[-1]:>11.6f}",
                flush=True,
            )
    print(f"ratio {times[0] / times[-1]:.2f}")


if __name__ == "__main__":
    main()
