"""The reward actors as a fleet: verdicts for every group in bounded time, or a status that says why not."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.fleet import SLACK_S, FleetError
from orchestrator.replica import LOST
from orchestrator.reward_model_fleet import RewardModelFleet
from reward_workers.alarm import ErrorAlarm
from rollout_workers.trajectory import RewardResult, Status

logger = logging.getLogger(__name__)


class RewardsLost(RuntimeError):
    """No reward actor could judge the group."""


class RewardFleet:
    """Reward actors: each group goes to the least loaded one; an actor that dies is restarted by Ray and asked again.

    `models` score a group first, where its row's reward set has them; the actors judge the rest and make one verdict of all.
    They are shared with other fleets: whoever made them starts and closes them.
    """

    def __init__(
        self,
        actors: Sequence[Any],
        *,
        deadline_s: float,
        tries: int,
        alarm: ErrorAlarm,
        models: Sequence[RewardModelFleet] = (),
    ) -> None:
        self._actors = list(actors)
        self._outstanding = [0] * len(self._actors)
        self._deadline_s = deadline_s
        self._tries = tries
        self._alarm = alarm
        self._models = tuple(models)

    def lenient(self) -> RewardFleet:
        """The same actors for a purpose that no failure may stop: they are asked once, and there is no alarm."""
        return RewardFleet(
            self._actors, deadline_s=self._deadline_s, tries=1, alarm=ErrorAlarm(1.0), models=self._models
        )

    async def start(self, timeout_s: float) -> None:
        """Load the reward functions everywhere. Raises what a function's import raises."""
        for index, reference in enumerate([actor.start.remote() for actor in self._actors]):
            try:
                await asyncio.wait_for(reference, timeout_s)
            except TimeoutError as error:
                raise FleetError(f"reward-{index} did not start within {timeout_s:.0f} s") from error

    async def score(
        self, trajectories: Any, columns: Mapping[str, Any], names: Sequence[str] | None, text: str | None
    ) -> list[RewardResult]:
        """Verdicts on the trajectories behind a reference, in order. Raises FleetError when too many are failures."""
        given = await self._scores(trajectories, names)
        reason = ""
        for _ in range(self._tries):
            index = min(range(len(self._actors)), key=lambda i: self._outstanding[i])
            self._outstanding[index] += 1
            try:
                results: list[RewardResult] = await asyncio.wait_for(
                    self._actors[index].score_group.remote(trajectories, columns, names, text, given),
                    self._deadline_s,
                )
            except TimeoutError:
                reason = f"reward-{index} did not answer within {self._deadline_s:.0f} s"
            except LOST as error:
                reason = f"reward-{index} was lost: {str(error).splitlines()[0]}"
            else:
                alarm = self._alarm.add(results)
                if alarm is not None:
                    raise FleetError(f"reward.max_error_ratio: {alarm}")
                return results
            finally:
                self._outstanding[index] -= 1
            logger.warning("%s", reason)
        raise RewardsLost(reason)

    async def _scores(
        self, trajectories: Any, names: Sequence[str] | None
    ) -> dict[str, list[RewardResult] | RewardResult]:
        """What the reward models among the named components say, by name."""
        models = [model for model in self._models if names is None or model.name in names]
        verdicts = await asyncio.gather(*(model.score(trajectories) for model in models))
        return {model.name: verdict for model, verdict in zip(models, verdicts, strict=True)}

    async def close(self) -> None:
        import ray

        closings = [asyncio.wait_for(actor.close.remote(), SLACK_S) for actor in self._actors]
        for outcome in await asyncio.gather(*closings, return_exceptions=True):
            if isinstance(outcome, BaseException):
                logger.warning("a reward actor did not close cleanly: %r", outcome)
        for actor in self._actors:
            ray.kill(actor)


def lost_rewards(count: int, reason: str) -> list[RewardResult]:
    """Verdicts of a group that no actor could judge: a status, never a number."""
    return [RewardResult(None, Status.ERRORED, detail={"worker": {"error": reason}}) for _ in range(count)]
