"""Simulated engines against one that is stepped token by token."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.simulation.engines import Engine, Fleet, SpeedClock, Stay, TokenVersions


@dataclass
class Answer:
    group: int
    left: int
    versions: list[int] = field(default_factory=list)  # of each token


def step_by_step(
    arrivals: Sequence[tuple[float, Sequence[int]]],
    publishes: Sequence[float],
    base_s: float,
    per_answer_s: float,
    places: int,
    prefill_s: float,
) -> tuple[list[float], list[list[TokenVersions]]]:
    """When each group is finished, and its answers' version spans: one step after the other, one token per answer."""
    now_s = 0.0
    coming = deque(enumerate(arrivals))
    waiting: deque[Answer] = deque()
    active: list[Answer] = []
    answers = [[Answer(number, length) for length in lengths] for number, (_, lengths) in enumerate(arrivals)]
    ends = [math.nan] * len(arrivals)
    while coming or waiting or active:
        if not waiting and not active:
            now_s = max(now_s, coming[0][1][0])
        while coming and coming[0][1][0] <= now_s:
            number, _ = coming.popleft()
            waiting.extend(answers[number])
            now_s += prefill_s
        while waiting and len(active) < places:
            active.append(waiting.popleft())
        version = sum(at <= now_s for at in publishes)
        now_s += base_s + per_answer_s * len(active)
        for answer in active:
            answer.left -= 1
            answer.versions.append(version)
            ends[answer.group] = now_s  # of its last token in the end
        active = [answer for answer in active if answer.left]
    return ends, [[spans(answer.versions) for answer in group] for group in answers]


def spans(versions: Sequence[int]) -> TokenVersions:
    return tuple((version, versions.count(version)) for version in sorted(set(versions)))


def by_events(
    engine: Engine, publishes: list[float], events: Sequence[tuple[float, Sequence[int] | None]], prefill_s: float
) -> tuple[list[float], list[list[TokenVersions]]]:
    """The same of an `Engine`, at which `events` happen: arrivals, or publishes (None)."""
    ends: dict[int, float] = {}
    stays: dict[int, Stay] = {}
    key = 0
    for at_s, lengths in [*events, (math.inf, ())]:
        while engine.busy and engine.next_finish() <= at_s:
            end = engine.next_finish()
            stay = engine.finish(end)
            ends[stay.key], stays[stay.key] = end, stay
        if lengths is None:
            publishes.append(at_s)
        elif lengths:
            engine.add(key, lengths, prefill_s, at_s)
            key += 1
    return [ends[i] for i in range(key)], [stays[i].token_versions() for i in range(key)]


class TestEngine:
    @given(
        groups=st.lists(
            st.tuples(st.integers(0, 3000), st.lists(st.integers(1, 30), min_size=1, max_size=5)), max_size=12
        ),
        publishes=st.lists(st.integers(1, 20000), max_size=5, unique=True),
        places=st.integers(1, 12),
        base_s=st.sampled_from([0.0, 0.031]),
        per_answer_s=st.sampled_from([0.0071, 0.00013]),
        prefill_s=st.sampled_from([0.0, 0.0029, 1.3]),
    )
    def test_is_the_engine_that_makes_one_step_after_the_other(
        self,
        groups: list[tuple[int, list[int]]],
        publishes: list[int],
        places: int,
        base_s: float,
        per_answer_s: float,
        prefill_s: float,
    ) -> None:
        arrivals: list[tuple[float, list[int]]] = []
        at_s = 0.0
        for gap, lengths in groups:
            at_s += gap / 1777
            arrivals.append((at_s, lengths))
        published = sorted(number / 1733 for number in publishes)
        expected = step_by_step(arrivals, published, base_s, per_answer_s, places, prefill_s)
        seen: list[float] = []
        events = sorted([*arrivals, *((at, None) for at in published)], key=lambda event: event[0])
        ends, versions = by_events(Engine(base_s, per_answer_s, places, seen), seen, events, prefill_s)
        assert ends == pytest.approx(expected[0], rel=1e-9)
        assert versions == expected[1]

    def test_alone(self) -> None:
        engine = Engine(0.01, 0.001, 8, [])
        engine.add(0, [10, 30], 0.5, 2.0)
        assert engine.next_finish() == pytest.approx(2.0 + 0.5 + 10 * 0.012 + 20 * 0.011)

    def test_what_arrives_in_a_step_joins_at_the_next(self) -> None:
        engine = Engine(1.0, 0.0, 8, [])
        engine.add(0, [3], 0.0, 0.0)
        engine.add(1, [1], 0.0, 0.4)
        assert engine.next_finish() == 2.0

    def test_answers_without_a_place_wait_in_order(self) -> None:
        events = [(0.0, [5, 3, 1]), (0.0, [1, 1, 1])]
        ends, _ = by_events(Engine(1.0, 0.0, 2, []), [], events, 0.0)
        assert ends == [5.0, 6.0]  # one place: 5, 1 token; the other: 3, 1, 1 (of the second group), 1

    def test_an_empty_answer_has_no_versions_and_takes_no_time(self) -> None:
        engine = Engine(1.0, 0.0, 8, publishes := [])
        engine.add(0, [0, 0], 0.0, 3.0)
        assert engine.next_finish() == 3.0
        engine.add(1, [0, 2], 0.0, 3.0)
        assert engine.finish(3.0).token_versions() == [(), ()]
        publishes.append(3.5)
        assert engine.next_finish() == 5.0
        assert engine.finish(5.0).token_versions() == [(), ((0, 1), (1, 1))]
        engine.add(2, [0], 0.0, 9.0)
        assert engine.finish(engine.next_finish()).token_versions() == [()]
        engine.add(3, [1], 0.0, 20.0)
        assert engine.next_finish() == 21.0
        assert engine.finish(21.0).token_versions() == [((1, 1),)]


class TestSpeedClock:
    def test_shows_what_went_by_at_each_speed(self) -> None:
        clock = SpeedClock()
        assert clock.at(10.0) == clock.when(10.0) == 10.0
        clock.set_speed(10.0, 0.5)
        assert clock.at(14.0) == 12.0
        assert clock.when(12.0) == 14.0
        clock.set_speed(14.0, 0.0)
        assert clock.at(99.0) == 12.0
        assert clock.when(13.0) == math.inf
        clock.set_speed(20.0, 1.0)
        assert clock.when(13.0) == 21.0


class TestFleet:
    @given(st.integers(1, 5), st.lists(st.tuples(st.integers(0, 900), st.integers(1, 400)), min_size=1, max_size=30))
    def test_is_engines_of_which_the_one_with_the_fewest_groups_gets_the_next(
        self, engines: int, groups: list[tuple[int, int]]
    ) -> None:
        parts = [Engine(0.01, 0.001, 4, []) for _ in range(engines)]
        fleet = Fleet([Engine(0.01, 0.001, 4, []) for _ in range(engines)])
        held: list[set[int]] = [set() for _ in range(engines)]
        now_s = 0.0
        for key, (gap, length) in enumerate([*groups, (10**9, 1)]):
            now_s += gap / 1777
            while (end := fleet.next_finish()) <= now_s:
                number = min(range(engines), key=lambda n: parts[n].next_finish() if parts[n].busy else math.inf)
                assert parts[number].next_finish() == end
                stay, expected = fleet.finish(), parts[number].finish(end)
                assert (stay.key, stay.ends) == (expected.key, expected.ends)
                held[number].remove(stay.key)
                assert fleet.busy == sum(part.busy for part in parts)
            number = min(range(engines), key=lambda n: len(held[n]))
            held[number].add(key)
            parts[number].add(key, [length, length], 0.1, now_s)
            fleet.add(key, [length, length], 0.1, now_s)
            assert fleet.busy == sum(part.busy for part in parts)
