"""The dispatcher: flies groups from prompt to verdict and keeps queue, prompt frontier and journal in step.

Contract
- Every event of the queue goes through here, and what the queue answers is carried out at once (`_carry_out`), without an
  await in between: an outcome is recorded at the moment it is decided, so a snapshot between two awaits is consistent.
- A group flies on its own: generate (again, for members that failed, as the queue says), score (by reference actors as well,
  where there are such), tell the queue. A failure of the infrastructure ends the group, never the run, unless no actor is left.
  What was scored whole is also shown to the watcher, which holds nothing up.
- Between `ground` and `clear` the engines are free for a learner that needs their devices: what was being written is
  parked with the tokens it has, and goes on afterwards, under newer weights, with what is left of its budget.
- `sampling.early_stop`: a group that is overdue is parked and judged by the answers that came in time. If these say that
  it can hardly teach anything it is stopped; a share of such groups goes on all the same, to measure what stopping loses.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from ray.exceptions import ObjectLostError, RayTaskError

from learner.reference_group import ReferenceGroup
from orchestrator.clerks import ClerkFleet
from orchestrator.config import Config
from orchestrator.difficulty import PassRates
from orchestrator.fleet import PartialsLost, RolloutFleet
from orchestrator.flight import Flight
from orchestrator.journal import Outcome
from orchestrator.prompts import PromptStream
from orchestrator.replica import is_of_an_argument
from orchestrator.reporting import BatchReport
from orchestrator.reward_fleet import RewardFleet, RewardsLost, lost_rewards
from orchestrator.sampling_queue import SamplingQueue
from orchestrator.sampling_types import Commands, Done, Member, OfferAgain, Resample, Stage
from orchestrator.watcher import Watcher
from rollout_workers.worker import RolloutRequest, SamplingSettings

logger = logging.getLogger(__name__)

PARK_AGAIN_S = 1.0


class AnswersLost(RuntimeError):
    """The answers of a group can't be judged: they, or whoever was to judge them, are gone."""


class Dispatcher:
    """`tasks` starts a task whose failure ends the run; `changed` is called when something happened to a group."""

    def __init__(
        self,
        config: Config,
        queue: SamplingQueue,
        prompts: PromptStream,
        rollouts: RolloutFleet,
        rewards: RewardFleet,
        clerks: ClerkFleet,
        report: BatchReport,
        pass_rates: PassRates,
        watcher: Watcher,
        reference: ReferenceGroup | None,
        *,
        filter_on: str,
        lineage: int,
        start_task: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        changed: Callable[[], None],
    ) -> None:
        self._config = config
        self._queue = queue
        self._prompts = prompts
        self._rollouts = rollouts
        self._rewards = rewards
        self._clerks = clerks
        self._report = report
        self._pass_rates = pass_rates
        self._watcher = watcher
        self._reference = reference
        self._filter_on = filter_on
        self._lineage = lineage
        self._start_task = start_task
        self._changed = changed
        self._dispatched = queue.counts.dispatched
        self._flying: set[asyncio.Task[None]] = set()
        self._cleared = asyncio.Event()  # for generation
        self._cleared.set()
        self._asking = 0
        self._landed = asyncio.Event()  # nothing is being asked of the engines
        self._over = False
        self.flights: dict[str, Flight] = {}
        self._outcomes: list[Outcome] = []  # decided, and not written to the journal yet

    def dispatch(self) -> None:
        """Send as many prompts on their way as the queue has room for and the rest of the run can use."""
        while not self._over and min(self._queue.room(), self._wanted()) > 0:
            prompt = self._prompts.next()
            if prompt is None:
                self._queue.prompts_exhausted()
                return
            group_id = f"g{self._lineage}-{self._dispatched:06d}"
            self._dispatched += 1
            flight = Flight(group_id, prompt, self._config.sampling.answers_per_group, self._queue.version)
            self.flights[group_id] = flight
            self._queue.dispatched(group_id, prompt.prompt_id, prompt.epoch)
            task = self._start_task(self._fly(flight))
            self._flying.add(task)
            task.add_done_callback(self._flying.discard)

    def acknowledged(self, version: int) -> None:
        """Every engine has `version`: what was trained on is settled."""
        self._carry_out(self._queue.acknowledged(version))

    def stop(self) -> None:
        """The run is over: groups still in flight are given up, their prompts not used up."""
        self._over = True  # an answer that arrives in this moment may outrun its task's cancellation
        for task in self._flying.copy():
            task.cancel()

    async def ground(self) -> None:
        """From now on ask nothing of the engines; returns when nothing is left running in them."""
        self._cleared.clear()
        while self._asking:
            self._landed.clear()
            self._report.parked(await self._rollouts.park())
            try:
                await asyncio.wait_for(self._landed.wait(), PARK_AGAIN_S)
            except TimeoutError:
                continue  # a request that had been waiting for an engine was sent after `park`

    def clear(self) -> None:
        """Let generation go on."""
        self._cleared.set()

    def take_outcomes(self) -> list[Outcome]:
        """The outcomes decided since the last call: they are to be written down now."""
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def _wanted(self) -> int:
        """Groups that the rest of the run can still use: nothing is generated for batches that will never be."""
        rest = (self._config.run.batches - self._queue.version) * self._config.sampling.groups_per_batch
        return rest - self._queue.counts.untrained

    async def _fly(self, flight: Flight) -> None:
        """One group from dispatch to the queue's verdict."""
        try:
            if not await self._generate(flight):
                return
            referring = asyncio.ensure_future(self._refer(flight))
            try:
                await self._score(flight, flight.payload)
                await referring
            finally:
                referring.cancel()
        except (PartialsLost, AnswersLost) as error:
            self._carry_out(self._queue.failed(flight.group_id, str(error)))
            return
        members = flight.members(self._filter_on)
        commands = self._queue.scored(flight.group_id, members)
        self._judged(flight, members)
        self._watcher.look_at(flight)
        if flight.control is not None:
            useful = not any(isinstance(c, Done) and c.outcome is Stage.FILTERED for c in commands)
            self._report.went_on(flight, useful=useful)
        self._carry_out(commands)

    async def _generate(self, flight: Flight) -> bool:
        """Have every answer written that can be; False if the group was stopped on the way."""
        indexes: Sequence[int] = range(flight.size)
        while True:
            await self._ask(flight, indexes)
            self._changed()  # an answer that has to be asked for again is progress all the same
            if flight.parked:
                self._queue.parked(flight.group_id)
                if flight.overdue and not flight.reviewed and await self._stopped(flight):
                    return False
                await self._cleared.wait()  # for as long as the learner works, which has a deadline
                self._queue.resumed(flight.group_id)
                indexes = flight.parked
                continue
            commands = self._queue.generated(flight.group_id, flight.missing)
            if not commands:
                break
            (resample,) = commands
            assert isinstance(resample, Resample)
            indexes, flight.attempt = resample.indexes, flight.attempt + 1
        flight.payload = self._payload(flight)
        flight.generated_at = time.time()
        return True

    def _payload(self, flight: Flight) -> Any:
        """A reference to the answers that are there whole, None if there are none."""
        if not flight.answered:
            return None
        if len(flight.payloads) == 1 and not flight.interrupted:
            return flight.payloads[0]
        return self._clerks.merged(flight.payloads, flight.answered)

    async def _ask(self, flight: Flight, indexes: Sequence[int]) -> None:
        """One request for these members; interrupted ones go on where they were."""
        await self._cleared.wait()  # for as long as the learner works, which has a deadline
        r, stop_after_s = self._config.rollout, self._config.sampling.early_stop.after_s
        request = RolloutRequest(
            group_id=flight.group_id,
            prompt_id=flight.prompt.prompt_id,
            epoch=flight.prompt.epoch,
            messages=flight.prompt.messages,
            indexes=tuple(indexes),
            sampling=SamplingSettings(
                r.temperature,
                r.max_response_tokens,
                seed_base=self._config.run.seed if self._config.run.deterministic else None,
            ),
            timeout_s=r.answer_timeout_s,
            attempt=flight.attempt,
            # Behind an evaluation, which the loop waits for; an old group before a younger one, also when it was parked.
            priority=1 + flight.dispatched_at_version,
        )
        timer = None
        if stop_after_s is not None and not flight.reviewed and self._queue.settings.filter:
            left_s = stop_after_s - flight.generating_s
            timer = asyncio.get_running_loop().call_later(max(0.0, left_s), self._overdue, flight)
        began = time.monotonic()
        self._asking += 1
        try:
            flight.add(await self._rollouts.generate(request, flight.partials))
        finally:
            self._asking -= 1
            flight.generating_s += time.monotonic() - began
            if timer is not None:
                timer.cancel()
            if not self._asking:
                self._landed.set()

    async def _score(self, flight: Flight, payload: Any) -> None:
        """Have the answers behind `payload` judged, which are those in `flight.answered`."""
        if payload is None:
            return
        prompt = flight.prompt
        try:
            results = await self._rewards.score(payload, prompt.columns, prompt.reward, prompt.text)
        except RewardsLost as error:
            results = lost_rewards(len(flight.answered), str(error))
        except (ObjectLostError, RayTaskError) as error:
            raise AnswersLost(f"its answers were lost: {error}") from error
        flight.judge(results)

    async def _refer(self, flight: Flight) -> None:
        """Have reference actors score the answers, while others are written or learned from."""
        if self._reference is None or flight.payload is None:
            return
        try:
            flight.reference = await self._reference.score(flight.payload)
        except (ObjectLostError, RayTaskError) as error:
            if isinstance(error, RayTaskError) and not is_of_an_argument(error):
                raise
            raise AnswersLost(f"its answers were lost: {error}") from error

    def _judged(self, flight: Flight, members: Sequence[Member]) -> None:
        """What was learnt of a group and its prompt, whatever becomes of it."""
        self._pass_rates.observe(flight.prompt.prompt_id, flight.prompt.epoch, [m.filter_value for m in members])
        self._report.scored(flight)

    # Early stop

    def _overdue(self, flight: Flight) -> None:
        flight.overdue = True
        self._start_task(self._interrupt(flight.group_id))

    async def _interrupt(self, group_id: str) -> None:
        self._report.parked(await self._rollouts.park([group_id]))

    async def _stopped(self, flight: Flight) -> bool:
        """Judge an overdue group by the answers that came in time; whether that ended it."""
        flight.reviewed = True
        await self._score(flight, self._payload(flight))
        members = [m for m in flight.members(self._filter_on) if m.index in flight.results]
        stoppable = self._queue.hardly_useful(members)
        if stoppable and flight.draw("control") >= self._config.sampling.early_stop.control_share:
            commands = self._queue.stopped(flight.group_id)
            self._judged(flight, members)
            self._report.stopped(flight)
            self._carry_out(commands)
            return True
        if stoppable:
            flight.control = flight.tokens
        flight.results = {}  # judged anew when it is whole: a reward may compare the answers of a group
        return False

    def _carry_out(self, commands: Commands) -> None:
        """What the queue decided about groups: tell the frontier, the journal and the metrics."""
        for command in commands:
            if isinstance(command, OfferAgain):
                self._prompts.offer_again(command.prompt_id, command.epoch)
                self.flights.pop(command.group_id)
            elif isinstance(command, Done):
                flight = self.flights.pop(command.group_id)
                self._prompts.done(command.prompt_id, command.epoch)
                self._outcomes.append(flight.outcome(command.outcome.value, command.reason))
                if command.outcome in (Stage.TRAINED, Stage.FILTERED):
                    self._report.consumed(flight)
                if command.outcome is Stage.FAILED:
                    logger.warning(
                        "group %s (prompt %s) failed: %s", command.group_id, command.prompt_id, command.reason
                    )
        self.dispatch()
        self._changed()
