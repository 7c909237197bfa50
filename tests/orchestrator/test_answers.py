"""Asking until every member is answered, or the retries are spent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from fakes import FakeEngine, LocalActor, patch_ray, rollout_fleet

from orchestrator.answers import Answers, ask
from orchestrator.clerks import Clerk, ClerkFleet
from orchestrator.fleet import FleetError, RolloutFleet
from rollout_workers.trajectory import Trajectory
from rollout_workers.worker import RolloutRequest, SamplingSettings


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    patch_ray(monkeypatch)


def request() -> RolloutRequest:
    messages = ({"role": "user", "content": "?"},)
    return RolloutRequest("g", "s:1", 0, messages, (0, 1, 2), SamplingSettings(1.0, 8), timeout_s=1.0)


def asked(
    engines: Callable[[int], FakeEngine],
    count: int = 1,
    retries: int = 2,
    max_restarts: int = 3,
    disturb: Callable[[RolloutFleet], None] = lambda fleet: None,
) -> tuple[Answers, tuple[Trajectory, ...] | None]:
    """The answers, and what their payload holds."""

    async def scenario() -> tuple[Answers, tuple[Trajectory, ...] | None]:
        fleet = rollout_fleet(engines, count, max_restarts=max_restarts)
        await fleet.start(0)
        disturb(fleet)
        answers = await ask(request(), fleet, ClerkFleet([LocalActor(Clerk())], 5.0), retries=retries)
        return answers, None if answers.payload is None else await answers.payload

    return asyncio.run(asyncio.wait_for(scenario(), 20))


def test_one_attempt_where_nothing_fails() -> None:
    engine = FakeEngine()
    answers, payload = asked(lambda index: engine)
    assert [member.index for member in answers.members] == [0, 1, 2]
    assert answers.errors == []
    assert payload is not None
    assert [t.index for t in payload] == [0, 1, 2]
    assert len(engine.requests) == 1


def test_only_what_failed_is_asked_again_and_all_answers_are_one_payload() -> None:
    engine = FakeEngine(fails=lambda request, index: index != 2 and request.attempt < index + 1)
    answers, payload = asked(lambda index: engine)
    assert [(r.attempt, r.indexes) for r in engine.requests] == [(0, (0, 1, 2)), (1, (0, 1)), (2, (1,))]
    assert answers.errors == []
    assert payload is not None
    assert [t.index for t in payload] == [0, 1, 2]


def test_what_still_fails_after_the_retries_is_reported() -> None:
    engine = FakeEngine(fails=lambda request, index: index == 1)
    answers, payload = asked(lambda index: engine, retries=1)
    assert len(engine.requests) == 2
    assert answers.errors == ["TimeoutError: too slow"]
    assert payload is not None
    assert [t.index for t in payload] == [0, 2]


def test_no_answer_at_all_is_no_payload() -> None:
    answers, payload = asked(lambda index: FakeEngine(fails=lambda request, index: True), retries=0)
    assert payload is None
    assert len(answers.errors) == 3


def test_a_lost_engine_is_replaced_and_asked_again() -> None:
    def lose(fleet: RolloutFleet) -> None:
        fleet._replicas[0].handle.kill()

    answers, payload = asked(lambda index: FakeEngine(), disturb=lose)
    assert answers.errors == []
    assert payload is not None
    assert len(payload) == 3


def test_with_no_engine_left_the_error_says_so() -> None:
    def lose(fleet: RolloutFleet) -> None:
        fleet._replicas[0].handle.kill()

    with pytest.raises(FleetError, match="no rollout actor is left"):
        asked(lambda index: FakeEngine(), max_restarts=0, disturb=lose)
