"""The independent checker at work during training: it judges a share of the training answers beside the reward.

Contract
- No group waits for it: `look_at` starts a task and returns. A verdict counts for the batch that is recorded next.
- It never touches training. Where the checker fails, is lost, or is so slow that too many groups wait for it, answers are
  unscored and counted; their reward, their group and the run go on as if nothing had happened.
- Which groups are watched depends on their ids alone. Groups that `sampling.early_stop` ended are not: they lack answers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from ray.exceptions import RayError

from orchestrator.clerks import ClerkFleet
from orchestrator.config import Config
from orchestrator.fleet import FleetError
from orchestrator.flight import Flight
from orchestrator.reward_fleet import RewardFleet, RewardsLost
from orchestrator.watch import Example, GapAlarm, GapWatch, RewardGamed

logger = logging.getLogger(__name__)

MOST_PENDING_BATCHES = 2  # as many groups wait for the checker at most
PROMPT_CHARACTERS, ANSWER_CHARACTERS = 160, 320  # of an example


class Watcher:
    """`checker` judges (None: nothing is watched), `primary` names the reward function that it is compared with.

    `state` is that of a checkpoint. `start_task` starts a task whose failure ends the run. `alert(title, text)` tells whoever
    is away from the terminal.
    """

    def __init__(
        self,
        config: Config,
        primary: str,
        checker: RewardFleet | None,
        clerks: ClerkFleet,
        *,
        state: Mapping[str, Any] | None,
        start_task: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        alert: Callable[[str, str], None],
    ) -> None:
        watch = config.reward.watch
        self._share = watch.share
        self._stops = watch.on_gap == "stop"
        self._most_pending = MOST_PENDING_BATCHES * config.sampling.groups_per_batch
        self._primary = primary
        self._checker = checker
        self._clerks = clerks
        self._start_task = start_task
        self._alert = alert
        self._watch = GapWatch(primary, window_batches=watch.window_batches, max_gap=watch.max_gap)
        if state is not None and checker is not None:  # a time without one ends what is known of it
            self._watch.restore(state)
        self._alarm: GapAlarm | None = None
        self._pending: set[asyncio.Task[None]] = set()
        self._slow = False  # it was said that the checker is
        self._over = False

    def look_at(self, flight: Flight) -> None:
        """Have the answers of a group that was scored just now judged by the checker as well, if it is one to watch."""
        checker = self._checker
        if checker is None or self._over or flight.draw("watch") >= self._share:
            return
        rewards = {index: flight.component(index, self._primary) for index in flight.answered}
        if all(reward is None for reward in rewards.values()):
            return
        if len(self._pending) >= self._most_pending:
            if not self._slow:
                logger.warning(
                    "reward.watch: the checker is slower than training: %d groups wait for it, further ones go unwatched "
                    "meanwhile and count in watch/unscored_ratio. Lower reward.watch.share or raise reward.workers",
                    len(self._pending),
                )
            self._slow = True
            self._watch.observe(list(rewards.values()), [None] * len(rewards))
            return
        task = self._start_task(self._judge(checker, flight, rewards))
        self._pending.add(task)
        task.add_done_callback(self._pending.discard)

    async def _judge(self, checker: RewardFleet, flight: Flight, rewards: Mapping[int, float | None]) -> None:
        """Ask the checker, which has a deadline, and take in what it says."""
        prompt = flight.prompt
        try:
            verdicts = await checker.score(flight.payload, prompt.columns, None, prompt.text)
        except (RewardsLost, RayError) as error:
            logger.warning("reward.watch: group %s could not be judged: %s", flight.group_id, error)
            self._watch.observe(list(rewards.values()), [None] * len(rewards))
            return
        values = {index: result.value for index, result in zip(rewards, verdicts, strict=True)}
        flight.checked = values
        self._watch.observe(list(rewards.values()), list(values.values()))
        both = [(r, c, index) for index, r in rewards.items() if r is not None and (c := values[index]) is not None]
        if not both:
            return
        reward, verdict, index = max(both, key=lambda found: found[0] - found[1])
        if self._watch.wants(reward - verdict):
            answer = await self._text(flight, index)
            question = str(prompt.messages[-1].get("content"))
            self._watch.show(
                Example(
                    prompt.prompt_id,
                    flight.group_id,
                    _short(question, PROMPT_CHARACTERS),
                    _short(answer, ANSWER_CHARACTERS),
                    reward,
                    verdict,
                )
            )

    async def _text(self, flight: Flight, index: int) -> str:
        """An answer's text; only those that are kept as examples travel to the driver."""
        try:
            return (await self._clerks.completions(flight.payload))[flight.position(index)]
        except (FleetError, RayError) as error:
            logger.warning("reward.watch: an answer of group %s could not be read: %s", flight.group_id, error)
            return "(lost)"

    def close_batch(self) -> dict[str, float]:
        """`watch/*` of what was judged since the last call."""
        values, self._alarm = self._watch.close_batch()
        return values

    def sound(self) -> None:
        """Raise the alarm that the last batch gave, if it gave one: RewardGamed with reward.watch.on_gap=stop."""
        if self._alarm is None:
            return
        text = str(self._alarm)
        self._alert("The reward parts from its checker", text)
        if self._stops:
            raise RewardGamed(text)
        logger.warning("%s", text)

    def stop(self) -> None:
        """The run is over: what is still being judged is given up."""
        self._over = True
        for task in self._pending.copy():
            task.cancel()

    def state(self) -> dict[str, Any]:
        """What a resumed run goes on from, of JSON's types."""
        return self._watch.state()


def _short(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[:limit] + "…"
