"""Throughput of the sampling queue alone: group lifecycles per CPU second, by groups in total and at once.

A lifecycle is dispatched, generated, scored, then taken in a batch and acknowledged, or set aside. Groups of
eight finish in random order; of every 20 four are filtered, one fails and one has a member resampled. Filling
the queue and making the members is not counted; each row is the best of three. The last line is `ratio X`:
fastest over slowest row, by groups in total or by groups at once, whichever is larger.

    python scripts/bench_queue.py [--quick]
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from orchestrator.sampling_queue import SamplingQueue
from orchestrator.sampling_types import Member, QueueSettings
from rollout_workers.trajectory import Status

ANSWERS = 8
MAX_STALENESS = 4


def members(version: int, *, differ: bool = True) -> tuple[Member, ...]:
    """A group sampled at `version`, with half its answers right or with none."""
    rewards = [float(differ and index % 2) for index in range(ANSWERS)]
    return tuple(
        Member(index, Status.SCORED, reward, reward, ((version, 64),), 64) for index, reward in enumerate(rewards)
    )


def lifecycles_per_s(total: int, capacity: int, seed: int = 0) -> float:
    """Drive `total` groups through a queue that holds `capacity` untrained ones, and time it."""
    rng = random.Random(seed)
    groups_per_batch = capacity // (MAX_STALENESS + 1)
    settings = QueueSettings(
        groups_per_batch,
        ANSWERS,
        filter=True,
        window_batches=MAX_STALENESS,
        max_staleness=MAX_STALENESS,
        member_retries=1,
    )
    queue = SamplingQueue(settings)
    flying: list[str] = []
    dispatched = 0

    def dispatch(count: int) -> None:
        nonlocal dispatched
        for _ in range(count):
            group_id = str(dispatched)
            queue.dispatched(group_id, group_id, 0)
            flying.append(group_id)
            dispatched += 1

    good, equal = members(0), members(0, differ=False)
    draws = [rng.random() for _ in range(4999)]
    dispatch(queue.room())
    finished = 0
    start = time.process_time()
    while finished < total:
        place = int(draws[finished % len(draws)] * len(flying))
        group_id, flying[place] = flying[place], flying[-1]
        flying.pop()
        kind = finished % 20
        if kind == 1:
            queue.generated(group_id, missing=(ANSWERS - 1,))
        queue.generated(group_id)
        if kind == 0:
            queue.failed(group_id, "benchmark")
        else:
            queue.scored(group_id, equal if kind < 6 else good)
        finished += 1
        while (batch := queue.take_batch()) is not None:
            queue.acknowledged(batch.version + 1)
            pause = time.process_time()
            good = members(queue.version)
            start += time.process_time() - pause
        dispatch(queue.room())
    elapsed = time.process_time() - start
    queue.check()
    return finished / elapsed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the groups, once")
    quick = parser.parse_args().quick
    share, repeats = (10, 1) if quick else (1, 3)
    by_total = [(total, 1000) for total in (1_000, 10_000, 100_000, 1_000_000)]
    by_capacity = [(200_000, capacity) for capacity in (10, 100, 1_000, 10_000, 100_000)]
    print(f"{'groups in total':>16} {'at once':>8} {'lifecycles/s':>13}")
    slowest, ratios = [], []
    for rows in (by_total, by_capacity):
        rates = []
        for total, capacity in rows:
            total = max(1000, total // share)
            rates.append(max(lifecycles_per_s(total, capacity, seed) for seed in range(repeats)))
            print(f"{total:>16,} {capacity:>8,} {rates[-1]:>13,.0f}", flush=True)
        slowest.append(min(rates))
        ratios.append(max(rates) / min(rates))
    print(
        f"slowest {min(slowest):,.0f} lifecycles/s; fastest over slowest: by total {ratios[0]:.2f}, at once {ratios[1]:.2f}"
    )
    print(f"ratio {max(ratios):.2f}")


if __name__ == "__main__":
    main()
