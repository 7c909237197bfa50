"""A machine that is busy with other things makes no honest program late."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

LIMIT_S = 0.4  # of CPU, so 1.2 by the clock, of which the program gets a thirteenth
SCRIPT = """
import json, os, subprocess, sys
os.sched_setaffinity(0, {int(sys.argv[1])})
from reward_workers.code import grade_code
program = "def spin(n):\\n    return sum(i * i for i in range(n))"
case = {"args": [3_000_000], "expected": sum(i * i for i in range(3_000_000))}
tests = {"kind": "function", "entry_point": "spin", "cases": [case]}
grade_code(program, tests, timeout_s=30.0)  # the sandbox is up
# Twelve that want the same core, in sessions of their own: a kernel may share it out by session.
others = [subprocess.Popen([sys.executable, "-c", "while True: pass"], start_new_session=True) for _ in range(12)]
try:
    graded = [
        grade_code(text, tests, timeout_s=float(sys.argv[2]))
        for text in (program, "def spin(n):\\n    while True: pass")
    ]
finally:
    for other in others:
        other.kill()
print(json.dumps([[result.value, result.detail] for result in graded]))
"""


@pytest.mark.thorough
def test_a_program_that_gets_no_cpu_is_not_timed_out() -> None:
    core = min(os.sched_getaffinity(0))
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(core), str(LIMIT_S)], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    (value, detail), (_, endless) = json.loads(done.stdout.splitlines()[-1])
    assert value == 1.0, detail
    assert endless["outcome"] == "timeout"  # one that uses up its time is, all the same
