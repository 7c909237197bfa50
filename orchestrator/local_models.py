"""Reward models in this process, without Ray: for a check of rewards, where a group or two is judged at a time.

`with LocalModels(models, device) as scorers: scorers.score(names, trajectories)`, from any thread. Every wait has a deadline.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Collection, Coroutine, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

from reward_workers.reward_model import RewardModel
from reward_workers.reward_model_worker import RewardModelWorker
from rollout_workers.trajectory import RewardResult, Status, Trajectory

X = TypeVar("X")
CLOSE_TIMEOUT_S = 30.0


class LocalModels:
    """Workers on one event loop, in a thread of its own. A model that is named twice is loaded once.

    `device` is auto, cpu or gpu; `start_timeout_s` is for loading one model, `timeouts_s` for one group, by model.
    """

    def __init__(
        self, models: Sequence[RewardModel], *, device: str, start_timeout_s: float, timeouts_s: Mapping[str, float]
    ) -> None:
        self._device = device
        self._start_timeout_s = start_timeout_s
        self._timeouts_s = timeouts_s
        self._models = {model.name: model for model in models}
        self._workers: dict[str, RewardModelWorker] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="reward-models", daemon=True)

    def __enter__(self) -> LocalModels:
        self._thread.start()
        try:
            for name, model in self._models.items():
                self._workers[name] = RewardModelWorker(model, device=_found(self._device))
                self._wait(self._workers[name].start(), self._start_timeout_s)
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def score(self, names: Collection[str], trajectories: Sequence[Trajectory]) -> dict[str, list[RewardResult]]:
        """Verdicts of the named models, one per trajectory: statuses of those that are late."""
        return {name: self._score(name, trajectories) for name in names}

    def _score(self, name: str, trajectories: Sequence[Trajectory]) -> list[RewardResult]:
        timeout_s = self._timeouts_s[name]
        try:
            return self._wait(self._workers[name].score_group(trajectories), timeout_s)
        except TimeoutError:
            late = RewardResult(None, Status.TIMED_OUT, detail={"error": f"no scores within {timeout_s:g} s"})
            return [late] * len(trajectories)

    def _wait(self, coroutine: Coroutine[Any, Any, X], timeout_s: float) -> X:
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result(timeout_s)
        finally:
            future.cancel()  # of no effect on one that is done

    def _close(self) -> None:
        for worker in self._workers.values():
            self._wait(worker.close(), CLOSE_TIMEOUT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_TIMEOUT_S)
        self._loop.close()


def _found(device: str) -> str:
    if device != "auto":
        return device
    import torch

    return "gpu" if torch.cuda.is_available() else "cpu"
