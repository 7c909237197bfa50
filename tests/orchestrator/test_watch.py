"""The gap between reward and checker: what is compared, when it is an alarm, and that a resumed watch goes on exactly."""

from __future__ import annotations

import json
import math
import random
import statistics
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.metrics import find
from orchestrator.watch import EXAMPLES, Compared, Example, GapAlarm, GapWatch

Values = Sequence[float | None]
Group = tuple[Values, Values]  # rewards, checkers

number = st.floats(-2, 2)
member = st.tuples(st.none() | number, st.none() | number)
group = st.lists(member, max_size=5)
history = st.lists(st.lists(group, max_size=4), max_size=14)  # batches of groups


def watch(window_batches: int = 3, max_gap: float = 0.2) -> GapWatch:
    return GapWatch("right", window_batches=window_batches, max_gap=max_gap)


def closed(of: GapWatch, groups: Sequence[Sequence[tuple[float | None, float | None]]]) -> dict[str, float]:
    values, _ = fed(of, groups)
    return values


def fed(
    of: GapWatch, groups: Sequence[Sequence[tuple[float | None, float | None]]]
) -> tuple[dict[str, float], GapAlarm | None]:
    """Close a batch of these groups."""
    for members in groups:
        of.observe([reward for reward, _ in members], [checker for _, checker in members])
    return of.close_batch()


def both(groups: Sequence[Sequence[tuple[float | None, float | None]]]) -> list[list[tuple[float, float]]]:
    """The answers that have both values, by group; groups without any left out."""
    pairs = [[(r, c) for r, c in members if r is not None and c is not None] for members in groups]
    return [members for members in pairs if members]


def mean_gap(groups: Sequence[Sequence[tuple[float, float]]]) -> float:
    return statistics.fmean(reward - checker for members in groups for reward, checker in members)


@given(history)
@settings(max_examples=60, deadline=None)
def test_every_figure_is_what_it_says(batches: list[list[list[tuple[float | None, float | None]]]]) -> None:
    """Against a recomputation from all answers at once."""
    watched = watch()
    seen: list[list[list[tuple[float, float]]]] = []  # of batches with compared answers
    for groups in batches:
        values = closed(watched, groups)
        for name in values:
            find(name)
        compared = both(groups)
        flat = [pair for members in compared for pair in members]
        lacking = sum(r is not None and c is None for members in groups for r, c in members)
        assert values.get("watch/answers", 0) == len(flat)
        assert values.get("watch/unscored_ratio", 0) == pytest.approx(lacking / max(1, lacking + len(flat)))
        if not flat:
            assert not {"watch/reward", "watch/gap", "watch/gap_growth"} & set(values)
            continue
        seen.append(compared)
        assert values["watch/reward"] == pytest.approx(statistics.fmean(r for r, _ in flat), abs=1e-9)
        assert values["watch/checker"] == pytest.approx(statistics.fmean(c for _, c in flat), abs=1e-9)
        assert values["watch/gap"] == pytest.approx(mean_gap(compared), abs=1e-9)
        assert 0 <= values.get("watch/agreement", 0.5) <= 1
        if len(seen) < 3:
            assert "watch/gap_growth" not in values
            continue
        first = [members for of_batch in seen[:3] for members in of_batch]
        last = [members for of_batch in seen[-3:] for members in of_batch]
        assert values["watch/gap_growth"] == pytest.approx(mean_gap(last) - mean_gap(first), abs=1e-9)


@given(st.lists(st.lists(st.tuples(number, number), min_size=1, max_size=4), min_size=2, max_size=8))
def test_the_error_of_a_gap_is_that_of_independent_groups(groups: list[list[tuple[float, float]]]) -> None:
    whole = sum((Compared.of(members) for members in groups), Compared())
    gap, answers = mean_gap(groups), sum(map(len, groups))
    residuals = [sum(r - c for r, c in members) - gap * len(members) for members in groups]
    expected = math.sqrt(sum(r**2 for r in residuals) * len(groups) / (len(groups) - 1)) / answers
    assert whole.gap_error == pytest.approx(expected, abs=1e-6)


def test_groups_of_one_size_have_the_error_of_the_mean_of_their_gaps() -> None:
    groups = [[(1.0, 0.0), (1.0, 1.0)], [(0.0, 0.0), (1.0, 1.0)], [(1.0, 0.0), (1.0, 0.0)]]
    whole = sum((Compared.of(members) for members in groups), Compared())
    assert whole.gap_error == pytest.approx(statistics.stdev([0.5, 0.0, 1.0]) / math.sqrt(3))
    assert Compared.of(groups[0]).gap_error == math.inf


@given(
    st.lists(st.lists(st.lists(number, min_size=1, max_size=4), min_size=1, max_size=4), min_size=1, max_size=14),
    st.floats(-5, 5),
)
@settings(max_examples=60, deadline=None)
def test_a_constant_difference_is_never_an_alarm(rewards: list[list[list[float]]], kinder: float) -> None:
    """However large, and whatever the rewards do."""
    watched = watch(max_gap=1e-3)
    for of_batch in rewards:
        values, alarm = fed(watched, [[(r, r - kinder) for r in members] for members in of_batch])
        assert alarm is None
        assert values.get("watch/gap_growth", 0) == pytest.approx(0, abs=1e-9)


@given(
    kinder=st.floats(-1, 1),
    growth=st.floats(0.21, 3),
    quiet=st.integers(0, 4),
    window=st.integers(1, 4),
    sizes=st.lists(st.integers(1, 4), min_size=2, max_size=4),
)
@settings(max_examples=60, deadline=None)
def test_a_drift_beyond_the_limit_is_an_alarm_once(
    kinder: float, growth: float, quiet: int, window: int, sizes: list[int]
) -> None:
    """As soon as the running mean is beyond it, and no later than when its whole window is."""
    watched = watch(window)

    def batch(gap: float) -> tuple[dict[str, float], GapAlarm | None]:
        return fed(watched, [[(gap + i, float(i)) for i in range(size)] for size in sizes])

    assert all(batch(kinder)[1] is None for _ in range(window + quiet))
    alarms = []
    for number_of in range(1, window + 3):
        values, alarm = batch(kinder + growth)
        share = min(number_of, window) / window
        assert values["watch/gap_growth"] == pytest.approx(growth * share, abs=1e-9)
        alarms += [(number_of, alarm)] * (alarm is not None)
    assert len(alarms) == 1
    assert alarms[0][0] <= window
    # The other way round it is no alarm: a policy that pleases the checker more games nothing.
    for _ in range(2 * window):
        assert batch(kinder - growth)[1] is None


def test_it_is_raised_again_after_a_fall_below_half_the_limit() -> None:
    watched = watch(window_batches=1, max_gap=0.2)

    def raised(gap: float) -> bool:
        return fed(watched, [[(gap, 0.0)], [(gap, 0.0)]])[1] is not None

    assert [raised(gap) for gap in (0.0, 0.3, 0.19, 0.3, 0.11, 0.3)] == [False, True, False, False, False, False]
    assert [raised(gap) for gap in (0.09, 0.19, 0.3, 0.3)] == [False, False, True, False]


def test_what_chance_explains_is_no_alarm() -> None:
    """Batches of two groups of four, whose gaps scatter widely around the same mean: of 400 runs hardly one is alarmed."""
    draw = random.Random(0)

    def alarmed(drift: float) -> bool:
        watched = watch(window_batches=5)
        raised = False
        for number_of in range(30):
            level = drift if number_of >= 10 else 0.0
            groups = []
            for _ in range(2):
                gap = draw.gauss(level, 0.4)
                groups.append([(gap + draw.gauss(0, 0.3), 0.0) for _ in range(4)])
            raised |= fed(watched, groups)[1] is not None
        return raised

    assert sum(alarmed(0.0) for _ in range(400)) <= 20
    assert sum(alarmed(0.8) for _ in range(100)) >= 95


@given(history, st.integers(0, 14), st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_restored_watch_goes_on_exactly(
    batches: list[list[list[tuple[float | None, float | None]]]], cut: int, half: bool
) -> None:
    """At a batch's end or in the middle of one, through JSON."""
    whole, first = watch(max_gap=0.05), watch(max_gap=0.05)
    rest = batches[cut:]
    for groups in batches[:cut]:
        assert fed(whole, groups) == fed(first, groups)
    if half and rest:
        for each in (whole, first):
            for members in rest[0]:
                each.observe([r for r, _ in members], [c for _, c in members])
            each.show(example(0.5, "half"))
    resumed = watch(max_gap=0.05)
    resumed.restore(json.loads(json.dumps(first.state())))
    assert resumed.state() == first.state()
    for groups in rest:
        assert fed(whole, groups) == fed(resumed, groups)


def test_a_complete_baseline_outlives_another_window() -> None:
    first = watch(window_batches=2)
    for _ in range(2):
        fed(first, [[(0.5, 0.0)], [(0.5, 0.0)]])
    resumed = watch(window_batches=4)
    resumed.restore(first.state())
    values = closed(resumed, [[(1.7, 0.0)], [(1.7, 0.0)]])
    assert values["watch/gap_growth"] == pytest.approx((0.5 + 0.5 + 1.7) / 3 - 0.5)  # not of a baseline with 1.7 in it


def test_values_of_different_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="shorter"):
        watch().observe([1.0, 0.0], [1.0])


def example(excess: float, name: str) -> Example:
    return Example(f"p-{name}", f"g-{name}", "What is 2+2?", f"answer {name}", excess, 0.0)


def test_the_alarm_shows_the_figures_and_the_worst_answers_of_its_window() -> None:
    watched = watch(window_batches=2)
    watched.show(example(9.0, "old"))
    for gap in (0.1, 0.1):
        fed(watched, [[(gap, 0.0), (gap + 1, 1.0)], [(gap, 0.0)]])
    assert not watched.wants(0.0)
    assert not watched.wants(-1.0)
    for excess, name in ((0.2, "mild"), (0.9, "bad"), (0.3, "fair"), (0.8, "poor")):
        assert watched.wants(excess)
        watched.show(example(excess, name))
    assert not watched.wants(0.3)
    fed(watched, [[(0.5, 0.0)], [(0.5, 0.0)]])
    watched.show(example(0.9, "newer"))
    _, alarm = fed(watched, [[(1.0, 0.0), (0.9, 1.0)], [(0.5, 0.0)]])
    assert alarm is not None
    assert [shown.answer for shown in alarm.examples] == ["answer newer", "answer bad", "answer poor"]
    assert len(alarm.examples) == EXAMPLES
    text = str(alarm)
    for piece in (
        "'right'",
        "last 2 batches",
        "0.680 and 0.200, a gap of +0.480 (5 answers)",
        "a gap of +0.100",
        "grown by 0.380",
        "reward.watch.max_gap=0.2",
        "order 0% alike",
        "checker_value",
        "read_trajectories",
        "reward 0.9, checker 0, prompt p-newer, group g-newer: 'What is 2+2?' -> 'answer newer'",
    ):
        assert piece in text, piece
    assert "old" not in text.split("To look at")[1]
