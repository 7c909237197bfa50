"""Ranks that are threads of one process: for what adds up over ranks without a model."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from learner.selection import Total

Result = TypeVar("Result")


class Ranks:
    """As many threads, which add up in lockstep."""

    def __init__(self, count: int) -> None:
        self._barrier = threading.Barrier(count, timeout=30)
        self._given: dict[int, torch.Tensor] = {}
        self._count = count

    def run(self, work: Callable[[int, Total], Result]) -> list[Result]:
        """What `work(rank, total)` returns on each."""
        with ThreadPoolExecutor(self._count) as pool:
            jobs = [
                pool.submit(work, rank, lambda values, rank=rank: self._total(rank, values))
                for rank in range(self._count)
            ]
            return [job.result(timeout=30) for job in jobs]

    def _total(self, rank: int, values: torch.Tensor) -> torch.Tensor:
        self._given[rank] = torch.as_tensor(values)
        self._barrier.wait()
        total = torch.stack([self._given[r] for r in range(self._count)]).sum(0)
        self._barrier.wait()
        return total
