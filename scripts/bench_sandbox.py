"""Sandboxed Python calls a second on one core: each a fresh process, confined, that loads a function and answers three calls.

The benchmark binds itself and its sandboxes to one core. On a machine with other work on that core the rate by CPU time, beside
the one by the clock, says what the core would do alone. The bare loop forks and confines nothing: `python` started anew for
each program, as graders without a warm process do.

    python scripts/bench_sandbox.py [--programs 1000]
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import time

from reward_workers import code
from reward_workers.code import grade_code
from reward_workers.sandbox.pool import Pool

PROGRAM = "def solve(n):\n    return n * n\n"
FUNCTION = {"kind": "function", "entry_point": "solve", "cases": [{"args": [n], "expected": n * n} for n in (3, 5, 12)]}
STDIO = {"kind": "stdio", "cases": [{"stdin": "3\n", "expected_stdout": "9\n"}]}
ASSERTS = {"kind": "asserts", "asserts": ["assert solve(3) == 9", "assert solve(5) == 25"]}
RUNS = {
    "function, 3 calls": (PROGRAM, FUNCTION),
    "function with numpy": (f"import numpy\n{PROGRAM}", FUNCTION),
    "script": ("print(int(input()) ** 2)\n", STDIO),
    "asserts, 2 processes": (PROGRAM, ASSERTS),
}


def cpu_s() -> float:
    """CPU time of this process and of all its children that have ended."""
    both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(used.ru_utime + used.ru_stime for used in both)


def measure(program: str, tests: dict[str, object], count: int) -> tuple[float, float]:
    """Programs a second, by the clock and by CPU time; starting the zygote is not counted by the clock."""
    code.POOL = pool = Pool()
    for _ in range(20):
        grade_code(program, tests)
    before, begun = cpu_s(), time.perf_counter()
    for _ in range(count):
        if grade_code(program, tests).value != 1:
            raise SystemExit("a program that is right did not pass")
    wall_s = time.perf_counter() - begun
    pool.close()  # its children's time is counted once they have ended
    return count / wall_s, count / (cpu_s() - before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=1000)
    count = parser.parse_args().programs
    core = max(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})
    print(f"core {core}, sandbox: {code.POOL.capabilities()}")
    print(f"{'':24}{'a second':>10}{'by CPU time':>14}")
    rates = {}
    for name, (program, tests) in RUNS.items():
        rates[name] = measure(program, tests, count)
        print(f"{name:24}{rates[name][0]:10.0f}{rates[name][1]:14.0f}")
    begun = time.perf_counter()
    for _ in range(30):
        subprocess.run([sys.executable, "-I", "-c", PROGRAM], check=True)
    print(f"{'bare python, unconfined':24}{30 / (time.perf_counter() - begun):10.0f}")
    print(f"calls_per_s {rates['function, 3 calls'][0]:.0f}")


if __name__ == "__main__":
    main()
