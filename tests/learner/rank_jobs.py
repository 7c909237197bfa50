"""Jobs of several learner processes, as the tests start them.

The processes are forked off a server that has torch, DeepSpeed and transformers imported already: a job of a second
should not take eight.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Main = Callable[[int, int, str, dict[str, Any]], None]  # rank, ranks, rendezvous, job

ENVIRONMENT = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
TIMEOUT_S = 200.0

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "deepspeed", "transformers.models.llama.modeling_llama", "peft"])


def run_processes(main: Main, job: dict[str, Any]) -> None:
    """`job["ranks"]` processes of `main`, to their end. A rank that fails shows its output."""
    folder = Path(job["folder"])
    outputs = [folder / f"output-{rank}.txt" for rank in range(job["ranks"])]
    processes = [
        _context.Process(target=_rank, args=(main, rank, job, output), daemon=True)
        for rank, output in enumerate(outputs)
    ]
    deadline = time.monotonic() + TIMEOUT_S
    try:
        with pytest.MonkeyPatch.context() as patch:  # the first start starts the server as well
            for name, value in ENVIRONMENT.items():
                patch.setenv(name, value)
            for process in processes:
                process.start()
        for rank, (process, output) in enumerate(zip(processes, outputs, strict=True)):
            process.join(max(0.0, deadline - time.monotonic()))
            assert process.exitcode == 0, f"rank {rank} ended with {process.exitcode}:\n{output.read_text()}"
    finally:
        for process in processes:
            process.kill()


def _rank(main: Main, rank: int, job: dict[str, Any], output: Path) -> None:
    with output.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    main(rank, job["ranks"], f"file://{job['folder']}/rendezvous", job)
    os._exit(0)  # at once, as an actor ends: gloo's threads may abort a process that is being taken down
