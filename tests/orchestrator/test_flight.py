"""A flight: what the queue and the journal are told about a group."""

from __future__ import annotations

import pytest

from orchestrator.flight import Flight
from orchestrator.prompts import Prompt
from rollout_workers.trajectory import RewardResult, Status
from rollout_workers.worker import MemberReport

PROMPT = Prompt("main:7", "main", ({"role": "user", "content": "?"},), {}, None, 2, "?")


def half_failed() -> Flight:
    """Member 1 of three has no answer."""
    flight = Flight("g", PROMPT, 3, dispatched_at_version=4)
    flight.reports = {
        0: MemberReport(0, ((4, 3), (5, 2)), 5, 8),
        1: MemberReport(1, error="lost"),
        2: MemberReport(2, ((4, 6),), 6, 8, truncated=True),
    }
    return flight


def test_verdicts_go_to_the_members_that_answered() -> None:
    flight = half_failed()
    flight.judge([RewardResult(1.5, components={"right": 1.0, "short": 0.5}), RewardResult(None, Status.UNSCORED)])
    first, failed, last = flight.members("right")
    assert (first.reward, first.filter_value, first.token_versions) == (1.5, 1.0, ((4, 3), (5, 2)))
    assert (failed.status, failed.reward, failed.response_length) == (Status.ERRORED, None, 0)
    assert (last.status, last.reward, last.truncated) == (Status.UNSCORED, None, True)
    assert flight.answered == [0, 2]
    assert flight.position(2) == 1


def test_without_the_component_the_total_stands_in() -> None:
    flight = half_failed()
    flight.judge([RewardResult(0.5), RewardResult(1.0)])
    assert [member.filter_value for member in flight.members("right")] == [0.5, None, 1.0]


def test_as_many_verdicts_as_answers() -> None:
    with pytest.raises(ValueError, match="zip"):
        half_failed().judge([RewardResult(1.0)])


def test_an_outcome_keeps_the_order_of_the_members() -> None:
    flight = half_failed()
    flight.judge([RewardResult(1.0), RewardResult(0.0)])
    outcome = flight.outcome("failed", "why")
    assert outcome.reward_values == [1.0, None, 0.0]
    assert outcome.response_lengths == [5, 0, 6]
    assert (outcome.prompt_id, outcome.epoch, outcome.dispatched_at_version) == ("main:7", 2, 4)
    assert Flight("g", PROMPT, 2, 0).outcome("failed", "lost").reward_values == [None, None]
