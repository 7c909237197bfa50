"""Rollout engines in simulated time: when each group is finished, and which version wrote which of its tokens.

One decoding step gives every answer of an engine one token, so an engine counts its steps, and an answer that joins at
step s with n tokens to write ends at step s + n, whatever else happens. Only how long the steps take depends on how many
answers take part in them. From that follows all that makes this fast and still exact:

- An engine with k places is in steps what k servers with one queue are in time: an answer that has to wait takes over the
  place that gets free first. It is enough to know at which step each place gets free (`_ends`, sorted).
- From step s to step t an engine makes t - s steps and sum(min(end, t) - s) tokens over the places, so it takes
  base * (t - s) + per_answer * that sum. No event is needed for a single answer, only for the last one of a group.

Engine clock: seconds of an engine that moves at full speed, the same for all (`SpeedClock` turns them into seconds of the run,
through pauses and slow-downs). What happens to an engine during a step takes effect at the step's end: arrivals join
then, and a new version writes from the next step on.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat

TokenVersions = tuple[tuple[int, int], ...]

_ROUNDING = 1e-5  # of a step: a moment so little after a step's end is that end


class SpeedClock:
    """The engine clock: it runs at `speed` seconds per second of the run, which changes from time to time."""

    def __init__(self) -> None:
        self.speed = 1.0
        self._since_s = 0.0  # of the run
        self._at_s = 0.0  # what the engine clock showed then

    def set_speed(self, now_s: float, speed: float) -> None:
        if speed != self.speed:
            self._at_s, self._since_s, self.speed = self.at(now_s), now_s, speed

    def at(self, run_s: float) -> float:
        """What the engine clock shows at a moment of the run, one that is not before the last change of speed."""
        return self._at_s + (run_s - self._since_s) * self.speed

    def when(self, engine_s: float) -> float:
        """The moment of the run at which it will show `engine_s`; infinite if it stands still."""
        return self._since_s + (engine_s - self._at_s) / self.speed if self.speed else math.inf


@dataclass(slots=True, eq=False)
class Stay:
    """A group's answers on an engine, from arrival to the end of the last one.

    `lengths`, `joins` and `ends` are by answer, the latter two in steps. `version` was the engine's at the arrival; `marks`
    are the steps from which on versions `version + 1`, `version + 2`, … wrote, known once the group is finished.
    """

    key: int
    version: int
    lengths: Sequence[int]
    joins: Sequence[int]
    ends: Sequence[int]
    marks: Sequence[int] = ()

    def token_versions(self) -> list[TokenVersions]:
        """`(version, tokens)` spans of each answer, oldest first, as an engine would report them."""
        version = self.version
        if not self.marks and 0 not in self.lengths:
            return list(zip(zip(repeat(version), self.lengths)))
        first = self.marks[0] if self.marks else math.inf
        return [
            ((version, end - join),) if join < end <= first else self._spans(join, end)
            for join, end in zip(self.joins, self.ends, strict=True)
        ]

    def _spans(self, join: int, end: int) -> TokenVersions:
        """Of an answer that meets a change of version, or is empty."""
        spans = []
        version = self.version
        for mark in self.marks:
            if mark >= end:
                break
            if mark > join:
                spans.append((version, mark - join))
                join = mark
            version += 1
        if end > join:
            spans.append((version, end - join))
        return tuple(spans)


class Engine:
    """One engine. Times are of the engine clock and must not decrease from call to call.

    `publishes[v]` is when version v + 1 was acknowledged; the list is shared by all engines and only ever grows.
    """

    __slots__ = (
        "_base_s",
        "_ends",
        "_marks",
        "_now_s",
        "_per_answer_s",
        "_places",
        "_prefill_s",
        "_publishes",
        "_stays",
        "_step",
    )

    def __init__(self, base_s: float, per_answer_s: float, places: int, publishes: Sequence[float]) -> None:
        self._base_s = base_s
        self._per_answer_s = per_answer_s
        self._places = places
        self._publishes = publishes
        self._step = 0  # steps made so far
        self._now_s = 0.0  # when the last of them ended
        self._prefill_s = 0.0  # before the next one
        self._ends: list[int] = []  # of the places in use: the step at which each gets free, sorted
        self._stays: list[tuple[int, int, Stay]] = []  # heap by last step
        self._marks: list[int] = []  # steps made when version 1, 2, … came

    @property
    def busy(self) -> bool:
        return bool(self._stays)

    def add(self, key: int, lengths: Sequence[int], prefill_s: float, now_s: float) -> None:
        """A group arrives: the engine works on its prompt for `prefill_s`, then on its answers as places permit."""
        if len(self._marks) < len(self._publishes):
            self._catch_up()
        self._advance(now_s)
        self._prefill_s += prefill_s
        step, ends = self._step, self._ends
        if len(ends) + len(lengths) <= self._places:
            joins = [step] * len(lengths)
            own_ends = [step + length for length in lengths]
            ends += own_ends
            ends.sort()
        else:
            joins, own_ends = [], []
            for length in lengths:
                join = step if len(ends) < self._places else ends.pop(0)
                insort(ends, join + length)
                joins.append(join)
                own_ends.append(join + length)
        heapq.heappush(self._stays, (max(own_ends), key, Stay(key, len(self._marks), lengths, joins, own_ends)))

    def next_finish(self) -> float:
        """When the next group will be finished if nothing else arrives; the engine must be busy."""
        last, ends, step = self._stays[0][0], self._ends, self._step
        if last == step:
            return self._now_s
        over = bisect_left(ends, last)  # places that get free before it
        tokens = sum(ends[:over]) - over * step + (len(ends) - over) * (last - step)
        return self._now_s + self._prefill_s + self._base_s * (last - step) + self._per_answer_s * tokens

    def finish(self, now_s: float) -> Stay:
        """The next group is finished, at the moment that `next_finish` gave."""
        last, _, stay = heapq.heappop(self._stays)
        if len(self._marks) < len(self._publishes):
            self._catch_up()
        if last > self._step:
            self._prefill_s = 0.0
        self._step, self._now_s = last, now_s
        del self._ends[: bisect_right(self._ends, last)]
        stay.marks = self._marks[stay.version :]
        return stay

    def _catch_up(self) -> None:
        """Note the steps at which versions came since the last call."""
        while len(self._marks) < len(self._publishes):
            self._advance(self._publishes[len(self._marks)])
            self._marks.append(self._step)

    def _advance(self, now_s: float) -> None:
        """Go to the first end of a step at or after `now_s`; without work, to `now_s`."""
        step, ends = self._step, self._ends
        at_s = self._now_s + self._prefill_s  # when the next step begins
        places = len(ends)
        over = 0
        while over < places:
            duration_s = self._base_s + self._per_answer_s * (places - over)
            needed = math.ceil((now_s - at_s) / duration_s - _ROUNDING)
            if needed <= ends[over] - step:
                if needed > 0:
                    step += needed
                    at_s += needed * duration_s
                break
            at_s += (ends[over] - step) * duration_s
            step = ends[over]
            over += 1
        else:
            at_s = max(at_s, now_s)
        if step > self._step or over == places:
            self._step, self._now_s, self._prefill_s = step, at_s, 0.0
            del ends[: bisect_right(ends, step)]


class Fleet:
    """All engines. A group goes to the one with the fewest answers outstanding, the first of several.

    Groups all have the same number of answers, so what is counted are groups. Times are of the engine clock.
    """

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._engines = engines
        self._outstanding = [0] * len(engines)  # groups, by engine
        self._by_count = [list(range(len(engines)))]  # numbers of the engines with so many groups, each list sorted
        self._least = 0
        self._finishes: list[tuple[float, int, int]] = []  # heap: when, number, stamp; outdated ones are skipped
        self._stamps = [0] * len(engines)
        self.busy = 0  # engines with work

    def add(self, key: int, lengths: Sequence[int], prefill_s: float, now_s: float) -> None:
        while not self._by_count[self._least]:
            self._least += 1
        number = self._by_count[self._least][0]
        engine = self._engines[number]
        self._count(number, +1)
        engine.add(key, lengths, prefill_s, now_s)
        self._schedule(number)

    def next_finish(self) -> float:
        """When the next group is finished; infinite if there is none."""
        finishes, stamps = self._finishes, self._stamps
        while finishes and finishes[0][2] != stamps[finishes[0][1]]:
            heapq.heappop(finishes)
        return finishes[0][0] if finishes else math.inf

    def finish(self) -> Stay:
        """The group whose end is `next_finish`."""
        at_s, number, _ = heapq.heappop(self._finishes)
        engine = self._engines[number]
        stay = engine.finish(at_s)
        if self._count(number, -1):
            self._schedule(number)
        return stay

    def _count(self, number: int, change: int) -> int:
        """An engine got a group or finished one; how many it has now."""
        before = self._outstanding[number]
        after = self._outstanding[number] = before + change
        if not before or not after:
            self.busy += change
        same = self._by_count[before]
        del same[bisect_left(same, number)]
        if after == len(self._by_count):
            self._by_count.append([])
        insort(self._by_count[after], number)
        if after < self._least:
            self._least = after
        return after

    def _schedule(self, number: int) -> None:
        self._stamps[number] += 1
        heapq.heappush(self._finishes, (self._engines[number].next_finish(), number, self._stamps[number]))
