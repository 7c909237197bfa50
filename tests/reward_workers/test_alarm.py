"""The alarm on failing rewards."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_workers.alarm import ErrorAlarm
from reward_workers.reward import RewardResult, Status

GOOD = RewardResult(1.0)


def failed(name: str = "math", message: str = "boom", status: Status = Status.ERRORED) -> RewardResult:
    return RewardResult(None, status, detail={name: {"error": message}, "style": {"words": 3}})


def test_f24_a_batch_of_errors_raises_the_alarm() -> None:
    alarm = ErrorAlarm().add([failed()] * 20)
    assert alarm is not None
    assert (alarm.failed, alarm.seen, alarm.function, alarm.message) == (20, 20, "math", "boom")
    assert "20 of the last 20" in str(alarm)
    assert "'math' (20 times): boom" in str(alarm)


def test_names_the_function_and_its_commonest_message() -> None:
    results = [failed("judge", "429", Status.TIMED_OUT)] * 3 + [failed("judge", "cut")] * 2 + [failed()] * 4
    alarm = ErrorAlarm().add(results + [GOOD] * 20)
    assert alarm is not None
    assert (alarm.function, alarm.failures, alarm.message) == ("judge", 5, "429")


def test_silent_below_the_minimum_and_at_the_limit() -> None:
    alarm = ErrorAlarm(limit=0.05, window=100, minimum=20)
    assert alarm.add([failed()] * 5) is None
    assert alarm.add([GOOD] * 95) is None  # 5% is not over 5%
    assert alarm.add([failed()]) is None  # one failure in, one out of the window
    assert alarm.add([failed()] * 5) is not None


def test_what_no_function_scored_is_not_a_failure() -> None:
    others = [RewardResult(None, Status.UNSCORED), RewardResult(None, Status.UNPARSEABLE_ANSWER)]
    assert ErrorAlarm().add(others * 50) is None


def test_a_failure_without_a_cause() -> None:
    alarm = ErrorAlarm().add([RewardResult(None, Status.TIMED_OUT)] * 20)
    assert alarm is not None
    assert (alarm.function, alarm.message) == ("unknown", "timed_out")


@given(st.lists(st.booleans(), max_size=80), st.integers(1, 10), st.integers(0, 30), st.floats(0, 1))
def test_is_the_share_among_the_latest(failures: list[bool], minimum: int, more: int, limit: float) -> None:
    window = minimum + more
    watch = ErrorAlarm(limit, window, minimum)
    for count in range(1, len(failures) + 1):
        alarm = watch.add([failed() if failures[count - 1] else GOOD])
        recent = failures[max(0, count - window) : count]
        assert (alarm is not None) == (len(recent) >= minimum and sum(recent) > limit * len(recent))


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match=r"between 0 and 1, got 5"):
        ErrorAlarm(limit=5)
    with pytest.raises(ValueError, match=r"between 1 and the window, 10, got 20"):
        ErrorAlarm(window=10, minimum=20)
