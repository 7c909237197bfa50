"""Jobs of several learner processes, as the tests start them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def run_processes(script: Path, job: dict[str, Any]) -> None:
    """`job["ranks"]` processes of `script`, to their end. A rank that fails shows its output."""
    folder = Path(job["folder"])
    environment = os.environ | {
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }
    command = [sys.executable, str(script)]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(job["ranks"]), f"file://{folder}/rendezvous", json.dumps(job)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(job["ranks"])
    ]
    try:
        for rank, process in enumerate(processes):
            output, _ = process.communicate(timeout=200)
            assert process.returncode == 0, f"rank {rank}:\n{output}"
    finally:
        for process in processes:
            process.kill()
