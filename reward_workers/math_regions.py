"""Sets of real numbers: unions of intervals, joined, cut and compared in one form.

Contract. Pure. A region whose ends are not all numbers, or that has an interval from a larger end to a smaller one, is
left as it was written: nothing is guessed about it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

from reward_workers.math_equality import approximate, equal
from reward_workers.math_notation import NotMathError
from reward_workers.math_syntax import Node
from reward_workers.math_values import Group, Interval, Quantity, Region, Value

MAX_INTERVALS = 50  # of a region that is brought into one form

REALS = Region((Interval(None, None),))


def interval(low: Node | None, high: Node | None, low_closed: bool, high_closed: bool) -> Interval:
    """From low to high, where either may be infinite."""
    if low is not None and low.kind == "neg" and low.args[0] == Node("const", "oo"):
        low = None
    if high == Node("const", "oo"):
        high = None
    return Interval(low, high, low_closed and low is not None, high_closed and high is not None)


def region_of(value: Value) -> Region | None:
    """A value as a union of intervals: an interval in brackets, several of them, or a set of numbers; None if it is none."""
    if isinstance(value, Region):
        return value
    if not isinstance(value, Group) or not value.items:
        return None
    if not value.brackets and all(isinstance(item, Group) for item in value.items):
        parts = [region_of(item) for item in value.items]
        known = [part for part in parts if part is not None]
        return Region(tuple(i for part in known for i in part.intervals)) if len(known) == len(parts) else None
    quantities = [item for item in value.items if isinstance(item, Quantity) and not item.unit]
    if len(quantities) != len(value.items):
        return None
    if value.brackets == "{}":
        return Region(tuple(Interval(q.node, q.node, True, True) for q in quantities), value.name)
    if len(quantities) == 2 and value.brackets in ("()", "[]", "(]", "[)"):
        low, high = (q.node for q in quantities)
        return Region((interval(low, high, value.brackets[0] == "[", value.brackets[1] == "]"),), value.name)
    return None


def without(region: Region, points: Sequence[Node]) -> Region | None:
    """A region without single points; None where it can't be told where they lie."""
    return less(region, [Interval(point, point, True, True) for point in points])


def less(region: Region, holes: Sequence[Interval]) -> Region | None:
    """What is left of a region without some intervals; None where it can't be told where they lie."""
    for hole in holes:
        below = () if hole.low is None else (Interval(None, hole.low, False, not hole.low_closed),)
        above = () if hole.high is None else (Interval(hole.high, None, not hole.high_closed, False),)
        cut = common([region, Region((*below, *above))])
        if cut is None:
            return None
        region = Region(cut.intervals, region.name)
    return region


def common(regions: Sequence[Region]) -> Region | None:
    """What several regions have in common; None where the order of their ends is not known."""
    left = list(regions[0].intervals)
    for region in regions[1:]:
        if len(left) * len(region.intervals) > MAX_INTERVALS:
            return None
        pairs = [_common(a, b) for a in left for b in region.intervals]
        if None in pairs:
            return None
        left = [one for pair in pairs if pair for one in pair]
    return Region(tuple(left), regions[0].name)


def merged(region: Region) -> Region:
    """The same region with its intervals in order, those that touch made one."""
    intervals = region.intervals
    if len(intervals) < 2 or len(intervals) > MAX_INTERVALS:
        return region
    if any(_place(end) is None for one in intervals for end in (one.low, one.high)) or any(map(_is_empty, intervals)):
        return region
    ordered = sorted(intervals, key=functools.cmp_to_key(_by_start))
    found = [ordered[0]]
    for one in ordered[1:]:
        last = found[-1]
        gap = 1 if last.high is None or one.low is None else _compare(last.high, one.low)
        if gap < 0 or (gap == 0 and not (last.high_closed or one.low_closed)):
            found.append(one)
        elif _by_end(last, one) < 0:
            found[-1] = Interval(last.low, one.high, last.low_closed, one.high_closed)
    return Region(tuple(found), region.name)


def _place(end: Node | None) -> float | None:
    """An end as a float; None where it has none. An infinite end needs none."""
    if end is None:
        return 0.0
    value = approximate(end, {})
    return value.real if value is not None and abs(value.imag) < 1e-12 and math.isfinite(value.real) else None


def _compare(a: Node, b: Node) -> int:
    """The sign of a - b, for ends that have a place."""
    try:
        if equal(a, b):
            return 0
    except NotMathError:
        pass
    x, y = _place(a) or 0.0, _place(b) or 0.0
    return (x > y) - (x < y)


def _by_start(a: Interval, b: Interval) -> int:
    if a.low is None or b.low is None:
        return (a.low is not None) - (b.low is not None)
    return _compare(a.low, b.low) or (b.low_closed - a.low_closed)


def _by_end(a: Interval, b: Interval) -> int:
    if a.high is None or b.high is None:
        return (b.high is not None) - (a.high is not None)
    return _compare(a.high, b.high) or (a.high_closed - b.high_closed)


def _is_empty(one: Interval) -> bool:
    if one.low is None or one.high is None:
        return False
    order = _compare(one.low, one.high)
    return order > 0 or (order == 0 and not (one.low_closed and one.high_closed))


def _common(a: Interval, b: Interval) -> list[Interval] | None:
    """The intersection of two intervals, empty where there is none; None where their order is not known."""
    if any(_place(end) is None for one in (a, b) for end in (one.low, one.high)):
        return None
    low, low_closed = _later(a.low, a.low_closed, b.low, b.low_closed, 1)
    high, high_closed = _later(a.high, a.high_closed, b.high, b.high_closed, -1)
    cut = Interval(low, high, low_closed, high_closed)
    return [] if _is_empty(cut) else [cut]


def _later(a: Node | None, a_closed: bool, b: Node | None, b_closed: bool, sign: int) -> tuple[Node | None, bool]:
    """Of two ends the one that leaves less: the larger low one (sign 1), the smaller high one (sign -1)."""
    if a is None:
        return b, b_closed
    if b is None:
        return a, a_closed
    order = _compare(a, b) * sign
    return (a, a_closed and (b_closed or order > 0)) if order >= 0 else (b, b_closed)
