"""Reading lists, unions and differences of sets: what is written as several values.

Contract. Pure. Commas inside numbers and brackets are no separators; a list that mixes sentences and values is none.
"""

from __future__ import annotations

import re
from dataclasses import replace

from reward_workers.math_equality import equal
from reward_workers.math_notation import NotMathError, Token, TooComplexError
from reward_workers.math_part import MAX_ITEMS, Part, Read, is_word
from reward_workers.math_regions import common, less, region_of, without
from reward_workers.math_syntax import Node
from reward_workers.math_values import Assignment, Group, Interval, Quantity, Region, Value, Words, symbols_of


def union(text: Part, depth: int, read: Read) -> Value | None:
    r"""`(0, 1) \cup (2, 3)`, also after `x \in`."""
    parts, separators = text.split(lambda t: t.text == "cup" or (t.kind == "word" and t.text == "U"))
    if not separators or len(parts) > MAX_ITEMS:
        return None
    intervals: list[Interval] = []
    name = ""
    first, _ = parts[0].split(lambda t: t.kind == "cmd" and t.text == "in")
    if len(first) == 2 and len(first[0]) == 1:
        name, parts[0] = first[0].tokens[0].text, first[1]
    for part in parts:
        region = region_of(read(_set(part), depth + 1))
        if region is None:
            return None
        intervals.extend(region.intervals)
    return Region(tuple(intervals), name)


def _set(text: Part) -> Part:
    """A part of a union in plain braces, which are those of a set there."""
    if len(text) < 2 or (text.tokens[0].text, text.tokens[-1].text) != ("{", "}"):
        return text
    first, *inner, last = text.tokens
    opening, closing = (replace(token, text=f"\\{token.text}") for token in (first, last))
    return Part(text.source, (opening, *inner, closing))


def difference(text: Part, depth: int, read: Read) -> Value | None:
    r"""`\R \setminus \{0\}`, `\R - \{0\}`."""
    tokens = text.tokens
    cut = next((i for i, t in enumerate(tokens) if t.kind == "cmd" and t.text == "setminus"), None)
    if cut is None:
        cut = next((i for i, t in enumerate(tokens[1:-1], 1) if t.text == "-" and tokens[i + 1].text == "\\{"), None)
    if not cut:
        return None
    left, right = read(text[:cut], depth + 1), read(_set(text[cut + 1 : len(text)]), depth + 1)
    is_set = isinstance(left, Group) and left.brackets in ("", "{}")
    region = None if is_set else region_of(left)
    if region is None:
        return None
    if isinstance(right, Region) or (isinstance(right, Group) and right.brackets != "{}"):
        holes = region_of(right)
        return holes and less(region, holes.intervals)
    if not isinstance(right, Group):
        return None
    points = [item.node for item in right.items if isinstance(item, Quantity) and not symbols_of(item.node)]
    return without(region, points) if len(points) == len(right.items) else None


def listed(text: Part, depth: int, read: Read, bracketed: bool = False) -> Value | None:
    """A bare list: `1, 2`, `x = 1 or x = 2`, `1331 and 1728`, `x > 1 and x < 3`."""
    parts, separators = _items(text, bracketed)
    if not separators:
        return None
    if len(parts) > MAX_ITEMS:
        raise TooComplexError(f"a list of more than {MAX_ITEMS}")
    values = [read(part, depth + 1) for part in parts if part.tokens]
    if not values:
        return None
    if bracketed:
        return Group(tuple(values))
    if any(t.kind in ("word", "text") for t in separators) and all(map(_is_lone_symbol, values)):
        return None  # `p or q` is one statement
    if _once(values) and any(is_word(t, "or") for t in separators):
        return values[0]  # `3/4, or 0.75`
    if isinstance(values[0], Region) and values[0].name and all(isinstance(v, Quantity) for v in values[1:]):
        return _excluded(values[0], [v.node for v in values[1:] if isinstance(v, Quantity)])
    if any(isinstance(v, Words) and not v.notation and re.search("[a-z]{3}", v.text) for v in values) and not all(
        isinstance(v, Words) for v in values
    ):
        return None if any(is_word(t, "or", "and") for t in separators) else Group(tuple(values))
    if any(isinstance(v, Region) for v in values):  # x = 0 or x > 1
        values = [_as_region(v) or v for v in values]
    if len({v.name for v in values if isinstance(v, Region)}) > 1 and not any(is_word(t, "or") for t in separators):
        return Group(tuple(values))  # x > 0, y > 0
    if all(isinstance(v, Region) for v in values):
        return _joined([v for v in values if isinstance(v, Region)], any(is_word(t, "or") for t in separators))
    if isinstance(values[0], Assignment):
        name = values[0].name
        if all(isinstance(v, Assignment) and v.name == name for v in values):
            return Group(tuple(v.value for v in values if isinstance(v, Assignment)), name=name)
        if all(isinstance(v, Quantity | Words) for v in values[1:]):
            return Group((values[0].value, *values[1:]), name=name)
    if all(isinstance(v, Group) and v.name for v in values):  # x = ±1, x = ±2
        groups = [v for v in values if isinstance(v, Group)]
        if len({g.name for g in groups}) == 1:
            return Group(tuple(item for g in groups for item in g.items), name=groups[0].name)
    if any(isinstance(v, Group) and not v.brackets for v in values):
        values = [i for v in values for i in (v.items if isinstance(v, Group) and not v.brackets else (v,))]
    return Group(tuple(values))


def _as_region(value: Value) -> Region | None:
    """`x = 0` as the values that x can have."""
    number = value.value if isinstance(value, Assignment) else None
    if not isinstance(value, Assignment) or not isinstance(number, Quantity) or symbols_of(number.node) or number.unit:
        return None
    return Region((Interval(number.node, number.node, True, True),), value.name)


def _is_lone_symbol(value: Value) -> bool:
    return isinstance(value, Quantity) and value.node.kind == "sym" and not value.unit


def _once(values: list[Value]) -> bool:
    """Whether all values are plain numbers and the same one."""
    numbers = [v for v in values if isinstance(v, Quantity) and v.base is None and not symbols_of(v.node)]
    if len(numbers) < len(values) or len({number.unit for number in numbers}) > 1:
        return False
    try:
        return all(equal(numbers[0].node, number.node) is True for number in numbers[1:])
    except (NotMathError, TooComplexError):
        return False


def _items(text: Part, bracketed: bool) -> tuple[list[Part], list[Token]]:
    """The items of a list. Commas inside a number, `1,000`, are no separators, unless brackets suggest a pair."""
    semicolons = any(t.kind == "op" and t.text == ";" for t in text.tokens)
    commas = [(i, t) for i, t in enumerate(text.tokens) if t.kind == "op" and t.text == ","]
    inside: set[int] = set()  # where commas of numbers end
    if commas:
        spaced = any(i + 1 < len(text) and text.tokens[i + 1].space for i, _ in commas)
        numbers = {
            t.start
            for i, t in commas
            if 0 < i < len(text) - 1
            and (left := text.tokens[i - 1]).kind == (right := text.tokens[i + 1]).kind == "num"
            and not (t.space or right.space)
            and left.text.isdigit()
            and len(left.text) <= 3
            and (left.text[0] != "0" or (i > 1 and text.tokens[i - 2].text == ","))
            and re.fullmatch(r"\d{3}(\.\d+)?", right.text)
        }
        if semicolons or spaced or (not bracketed and len(numbers) == len(commas)):
            inside = numbers
    return text.split(
        lambda t: (
            (t.kind == "op" and (t.text == ";" or (t.text == "," and t.start not in inside)))
            or is_word(t, "or", "and", ", and", ", or", "and/or", "and also")
        )
    )


def _joined(regions: list[Region], union: bool) -> Region | None:
    names = {r.name for r in regions}
    if len(names) > 1:
        return None
    intervals = [i for r in regions for i in r.intervals]
    if union:
        return Region(tuple(intervals), regions[0].name)
    both = common(regions)
    if both is not None:
        # `x < 1, x > 3` can only mean either.
        return both if both.intervals or len(regions) > 2 else Region(tuple(intervals), regions[0].name)
    if len(intervals) == 2:
        low = next((i for i in intervals if i.high is None and i.low is not None), None)
        high = next((i for i in intervals if i.low is None and i.high is not None), None)
        if low is not None and high is not None:
            return Region((Interval(low.low, high.high, low.low_closed, high.high_closed),), regions[0].name)
    return None


def _excluded(region: Region, points: list[Node]) -> Region | None:
    """`x \neq 1, 2`: after a region without points, more of them."""
    is_punctured = all(None in (i.low, i.high) and not i.low_closed and not i.high_closed for i in region.intervals)
    return without(region, points) if is_punctured and len(region.intervals) == 2 else None
