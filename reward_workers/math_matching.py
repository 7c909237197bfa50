"""Whether a stated value is the right one, under a policy for what notation leaves open.

Contract. `matches` is True or False where that is certain by exact arithmetic, and otherwise asks `decide`, which is
given the notation of the two expressions in doubt. An answer that restates a calculation is not that calculation's
result: against a plain number only a plain number counts, and an operation such as a sine or an integral counts only
where the right answer has one of its family too.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TypeVar

from reward_workers.math_algebra import add as plus
from reward_workers.math_algebra import evaluate, multiple, negate
from reward_workers.math_equality import approximate, equal
from reward_workers.math_families import INTEGER, same_family
from reward_workers.math_forms import (
    bare,
    components,
    half_line,
    is_asked_for,
    is_clock,
    is_closed_form,
    is_graph,
    literal,
    of_integers,
    quotient,
    rename,
    units,
    values_by_name,
    with_arguments,
    with_units,
)
from reward_workers.math_notation import FAMILY, NotMathError, TooComplexError
from reward_workers.math_regions import merged, region_of
from reward_workers.math_syntax import Node, walk
from reward_workers.math_units import CURRENCIES, known
from reward_workers.math_values import (
    Assignment,
    Group,
    Interval,
    Matrix,
    Quantity,
    Region,
    Relation,
    Value,
    Words,
    symbols_of,
)

MAX_PAIRS = 2_000  # of items whose equality has to be tried one by one
MAX_FREE_CONSTANTS = 5

T = TypeVar("T")
Decide = Callable[[Node | str, Node | str], bool]  # the right expression, the stated one: a tree, or notation in LaTeX


@dataclass(frozen=True)
class Policy:
    """What counts as the same answer. The options of `grade_math` say what each means."""

    percent: str = "number"
    units: str = "lenient"
    tolerance: float = 0.0
    relative_tolerance: float = 0.0
    any_base: bool = False
    intervals_as_inequalities: bool = True
    allow_unevaluated: bool = False
    free_constants: tuple[str, ...] = ()


@dataclass(frozen=True)
class Matcher:
    """`whole`: what is compared is no part of something whose letters it shares, as a component of a vector is, so that a
    family may be counted from elsewhere.
    """

    policy: Policy
    decide: Decide
    whole: bool = True

    def matches(self, gold: Value, stated: Value) -> bool:
        """Whether the stated value is the right one. Raises TooComplexError, and what `decide` raises."""
        is_other = isinstance(stated, Assignment | Group | Relation) and not isinstance(gold, Assignment)
        if is_other and self._as_value(gold, stated):
            return True
        match gold:
            case Quantity():
                return self._quantity(gold, stated)
            case Assignment():
                return self._assignment(gold, stated)
            case Relation():
                return self._relation(gold, stated)
            case Region():
                return self._region(gold, stated)
            case Group():
                return self._group(gold, stated)
            case Matrix():
                return self._matrix(gold, stated)
        return self._words(gold, stated)

    def _as_value(self, gold: Value, stated: Value) -> bool:
        """`x = 5` states 5, `x + y = 5` as well, and so does `{5}` where the right answer is no list."""
        if isinstance(stated, Assignment):
            return self.matches(gold, stated.value)
        if isinstance(stated, Relation):
            if stated.value is None or not isinstance(gold, Quantity):
                return False
            return is_asked_for(stated.left, stated.right) and self._quantity(gold, stated.value)
        if not isinstance(stated, Group):
            return False
        if len(stated.items) == 1 and stated.brackets in ("", "{}", "[]") and not isinstance(gold, Group | Region):
            return self.matches(gold, stated.items[0])
        return False

    # Numbers and expressions

    def _quantity(self, gold: Quantity, stated: Value) -> bool:
        if isinstance(stated, Words) and stated.notation:
            return self._allowed_operations(gold, stated.notation) and self.decide(gold.node, stated.notation)
        if isinstance(stated, Group) and stated.brackets == "::" and len(stated.items) == 2 and not is_clock(stated):
            node = None if gold.unit or gold.base else quotient(stated)
            return node is not None and bare(gold.node).kind == "div" and self._same_ratio(node, gold)
        if isinstance(stated, Matrix | Group) and Node("sym", "j") in walk(gold.node):
            return self._in_unit_vectors(components(stated), gold.node)
        if not isinstance(stated, Quantity):
            return False
        gold, stated = with_units(gold, stated)
        if gold.base != stated.base and not self.policy.any_base:
            return False
        if not self._same_unit(gold.unit, stated.unit):
            return False
        wanted = [gold.node]
        if gold.unit == "%" or stated.unit == "%":
            wanted = self._percent(gold, stated.unit)
        return any(self._same_number(Quantity(node, gold.text), stated) for node in wanted)

    def _in_unit_vectors(self, components: Sequence[Value], sum_: Node) -> bool:
        """Whether components are those of `3i - j + 2k`."""
        if not 2 <= len(components) <= 3 or not all(isinstance(c, Quantity) and not c.unit for c in components):
            return False
        units = (Node("const", "i"), Node("sym", "j"), Node("sym", "k"))
        numbers = [c.node for c in components if isinstance(c, Quantity)]
        try:
            terms = [Node("mul", "", pair) for pair in zip(numbers, units, strict=False)]
            return equal(Node("add", "", tuple(terms)), sum_) is True
        except NotMathError:
            return False

    def _percent(self, gold: Quantity, stated_unit: str) -> list[Node]:
        """What the stated number may be, given that one of the two has a percent sign."""
        if gold.unit == stated_unit:
            return [gold.node]
        hundred = Node("num", Fraction(100))
        other = Node("div", "", (gold.node, hundred)) if gold.unit == "%" else Node("mul", "", (gold.node, hundred))
        return {"number": [gold.node], "fraction": [other], "either": [gold.node, other]}[self.policy.percent]

    def _same_unit(self, gold: str, stated: str) -> bool:
        if self.policy.units == "ignore" or gold == stated:
            return True
        if not gold or not stated:
            return self.policy.units == "lenient" or not gold
        if self.policy.units == "lenient" and (stated == "deg" and gold in ("degC", "degF")):
            return True  # which degrees is not said
        if self.policy.units == "lenient" and stated in CURRENCIES and gold.startswith(f"{stated} "):
            return True  # $18 for $18 per day
        # `72 clips` and `72 clips altogether`: of names that are no units one may say more than the other.
        if known(gold) or known(stated):
            return False
        return set(gold.split()) <= set(stated.split()) or set(stated.split()) <= set(gold.split())

    def _same_number(self, gold: Quantity, stated: Quantity) -> bool:
        if not self._evaluated(gold.node, stated.node):
            return False
        try:
            same = equal(gold.node, stated.node)
        except NotMathError:
            return False
        if not same and self.policy.free_constants:
            same = self._renamed(gold.node, stated.node) or same
        if not same and self.whole and INTEGER in symbols_of(gold.node):
            same = same_family(gold.node, of_integers(gold.node, stated.node)) or same
        if not same and (self.policy.tolerance or self.policy.relative_tolerance):
            return self._near(gold.node, stated.node)
        return self.decide(gold.node, stated.node) if same is None else same

    def _near(self, gold: Node, stated: Node) -> bool:
        a, b = evaluate(gold).rational, evaluate(stated).rational
        allowed = Fraction(self.policy.tolerance)
        if a is not None and b is not None:
            return abs(a - b) <= max(allowed, Fraction(self.policy.relative_tolerance) * abs(a))
        x, y = approximate(gold, {}), approximate(stated, {})
        if x is None or y is None:
            return False
        return abs(x - y) <= max(self.policy.tolerance, self.policy.relative_tolerance * abs(x))

    def _renamed(self, gold: Node, stated: Node) -> bool:
        """Whether the two are equal up to the names of free constants."""
        free = set(self.policy.free_constants)
        ours, theirs = sorted(symbols_of(gold) & free), sorted(symbols_of(stated) & free)
        if len(ours) != len(theirs) or not 0 < len(ours) <= MAX_FREE_CONSTANTS:
            return False
        return any(
            equal(gold, rename(stated, dict(zip(theirs, names, strict=True)))) for names in itertools.permutations(ours)
        )

    def _evaluated(self, gold: Node, stated: Node) -> bool:
        """Whether the stated form is a result and not a calculation, as far as the right answer's form can tell."""
        if self.policy.allow_unevaluated:
            return True
        families = {FAMILY[str(n.value)] for n in walk(stated) if str(n.value) in FAMILY and not is_closed_form(n)}
        if families - {FAMILY[str(n.value)] for n in walk(gold) if str(n.value) in FAMILY}:
            return False
        if not literal(gold):
            return True
        if not literal(stated):
            return False
        value = evaluate(gold).rational
        fraction = bare(stated)
        if value is None or value.denominator != 1 or fraction.kind != "div":
            return True
        return bare(gold).kind == "div"

    def _allowed_operations(self, gold: Quantity | Words, notation: str) -> bool:
        """The same rule for notation that is not understood here: it needs its operations in the right answer."""
        if self.policy.allow_unevaluated:
            return True
        text = gold.notation if isinstance(gold, Words) else gold.text
        return all(f"\\{name}" not in notation or f"\\{name}" in text for name in FAMILY)

    # Equations and regions

    def _assignment(self, gold: Assignment, stated: Value) -> bool:
        if isinstance(stated, Assignment) and (
            stated.name.removesuffix("()") == gold.name.removesuffix("()")
            or is_graph(gold, stated)
            or is_graph(stated, gold)
        ):
            if self.matches(gold.value, with_arguments(gold.left, stated)):
                return True
        elif not isinstance(stated, Assignment | Relation):
            return self.matches(gold.value, stated)
        if isinstance(gold.value, Quantity) and symbols_of(gold.value.node):
            return self._relation(Relation("=", gold.left, gold.value.node), stated)
        return False

    def _relation(self, gold: Relation, stated: Value) -> bool:
        if isinstance(stated, Assignment) and isinstance(stated.value, Quantity):
            stated = Relation("=", stated.left, stated.value.node)
        if isinstance(stated, Region):
            stated = half_line(stated) or stated
        if not isinstance(stated, Relation) or stated.sign != gold.sign:
            return False
        try:
            ours = plus(evaluate(gold.left), negate(evaluate(gold.right)))
            theirs = plus(evaluate(stated.left), negate(evaluate(stated.right)))
            factor = multiple(theirs, ours)
        except NotMathError:
            return False
        return factor is not None and (gold.sign in ("=", "neq") or factor > 0)

    def _region(self, gold: Region, stated: Value) -> bool:
        if isinstance(stated, Relation):
            line = half_line(gold)
            return line is not None and self._relation(line, stated)
        region = region_of(stated)
        if region is None or (region.name and gold.name and region.name != gold.name):
            return False
        if not self.policy.intervals_as_inequalities and bool(gold.name) != bool(region.name):
            return False
        return self._unordered(merged(gold).intervals, merged(region).intervals, self._same_interval)

    def _same_interval(self, gold: Interval, stated: Interval) -> bool:
        if (gold.low_closed, gold.high_closed) != (stated.low_closed, stated.high_closed):
            return False
        ends = ((gold.low, stated.low), (gold.high, stated.high))
        return all((a is None) == (b is None) and (a is None or b is None or self._same_end(a, b)) for a, b in ends)

    def _same_end(self, gold: Node, stated: Node) -> bool:
        return replace(self, whole=False)._same_number(Quantity(gold, ""), Quantity(stated, ""))

    # Collections

    def _group(self, gold: Group, stated: Value) -> bool:
        if isinstance(stated, Region):
            region = region_of(gold)
            return region is not None and self._region(region, stated)
        if isinstance(stated, Matrix) and gold.brackets == "()":
            return self._ordered(gold.items, components(stated))
        if gold.brackets == "()" and isinstance(stated, Quantity) and Node("sym", "j") in walk(stated.node):
            return self._in_unit_vectors(gold.items, stated.node)
        if gold.brackets == "::":
            return self._ratio(gold, stated)
        if gold.brackets == "{}" and len(gold.items) == 1 and isinstance(stated, Group) and stated.brackets == "()":
            return self.matches(gold.items[0], stated)
        if not isinstance(stated, Group):
            return len(gold.items) == 1 and gold.brackets in ("", "{}") and self.matches(gold.items[0], stated)
        if gold.name and stated.name and gold.name != stated.name:
            return False
        if "++" in (gold.brackets, stated.brackets):  # 2 hours 30 minutes
            return (
                gold.brackets == stated.brackets
                and units(gold) == units(stated)
                and self._ordered(gold.items, stated.items)
            )
        if _sequence(gold) or _sequence(stated):
            return gold.brackets == stated.brackets and self._ordered(gold.items, stated.items)
        unordered = ("", "{}")
        if gold.brackets == stated.brackets == "{}" and len(gold.items) != len(stated.items):
            return self._covers(gold.items, stated.items) and self._covers(stated.items, gold.items)
        if gold.brackets in unordered and stated.brackets in unordered:
            of_one = len(gold.items) == 1 or (gold.name and not gold.brackets)  # x = 1, x = 2
            return self._unordered(gold.items, stated.items, (self if of_one else replace(self, whole=False)).matches)
        values = values_by_name(stated) if gold.brackets == "()" else None
        if values is not None:
            return self._ordered(gold.items, values)
        alike = gold.brackets == stated.brackets or "" in (gold.brackets, stated.brackets)
        alike = alike or (len(gold.items) != 2 and {gold.brackets, stated.brackets} == {"()", "[]"})
        if gold.brackets in ("[]", "[)", "(]") and not stated.brackets and len(gold.items) == 2:
            return False  # an interval is more than its ends
        if not gold.brackets and len(gold.items) == 2 and stated.brackets in ("[]", "[)", "(]"):
            named = gold.name or any(isinstance(item, Assignment) for item in gold.items)
            if named or stated.brackets != "[]":
                return False  # two values are no interval
        # A set never is a tuple, and `::` is a ratio.
        if not alike or (gold.brackets != stated.brackets and {"{}", "::"} & {gold.brackets, stated.brackets}):
            return False
        return self._ordered(gold.items, stated.items)

    def _covers(self, some: Sequence[Value], others: Sequence[Value]) -> bool:
        """Whether each of the others is among some: of sets that name an element twice."""
        if len(some) * len(others) > MAX_PAIRS:
            raise TooComplexError(f"sets of {len(some)} and {len(others)} elements, some of them twice")
        part = replace(self, whole=False)
        return all(any(part.matches(one, other) for one in some) for other in others)

    def _ratio(self, gold: Group, stated: Value) -> bool:
        """3:4 is 6:8 and, of two numbers, 3/4. A time of the day is that time only."""
        if isinstance(stated, Quantity):
            return not is_clock(gold) and (node := quotient(gold)) is not None and self._same_ratio(node, stated)
        if not isinstance(stated, Group) or stated.brackets != "::" or len(gold.items) != len(stated.items):
            return False
        if is_clock(gold):
            return gold.name in ("", stated.name) and self._ordered(gold.items, stated.items)
        if self._ordered(gold.items, stated.items):
            return True
        firsts = (gold.items[0], stated.items[0])
        pairs = [
            [Node("div", "", (item.node, first.node)) for item in group.items if isinstance(item, Quantity)]
            for group, first in zip((gold, stated), firsts, strict=True)
            if isinstance(first, Quantity)
        ]
        return len(pairs) == 2 and all(self._same_ratio(a, Quantity(b, "")) for a, b in zip(*pairs, strict=True))

    def _same_ratio(self, gold: Node, stated: Quantity) -> bool:
        try:
            return not stated.unit and stated.base is None and equal(gold, stated.node) is True
        except NotMathError:
            return False

    def _ordered(self, gold: Sequence[Value], stated: Sequence[Value]) -> bool:
        part = replace(self, whole=False)
        return len(gold) == len(stated) and all(part.matches(a, b) for a, b in zip(gold, stated, strict=True))

    def _unordered(self, gold: Sequence[T], stated: Sequence[T], same: Callable[[T, T], bool]) -> bool:
        """Whether each has its partner. Numbers find theirs by value, so that long lists take no longer."""
        if len(gold) != len(stated):
            return False
        ours, theirs = [_number(item) for item in gold], [_number(item) for item in stated]
        if all(n is not None for n in (*ours, *theirs)) and not (
            self.policy.tolerance or self.policy.relative_tolerance
        ):
            if Counter(ours) != Counter(theirs):
                return False
            by_value = dict(zip(theirs, stated, strict=True))
            return all(same(item, by_value[n]) for item, n in zip(gold, ours, strict=True))
        if len(gold) ** 2 > MAX_PAIRS and not all(map(_is_equal, gold, stated)):
            raise TooComplexError(f"two lists of {len(gold)} items that are no plain numbers")
        left = list(stated)
        for item in gold:
            partner = next((i for i, other in enumerate(left) if same(item, other)), None)
            if partner is None:
                return False
            del left[partner]
        return True

    def _matrix(self, gold: Matrix, stated: Value) -> bool:
        if isinstance(stated, Group) and stated.brackets == "()":
            return self._ordered(components(gold), stated.items)
        if isinstance(stated, Quantity) and Node("sym", "j") in walk(stated.node):
            return self._in_unit_vectors(components(gold), stated.node)
        if isinstance(stated, Group) and stated.brackets == "[]" and len(gold.rows) == 1:
            return self._ordered(gold.rows[0], stated.items)
        if isinstance(stated, Group) and stated.brackets == "[]":  # [[1, 2], [3, 4]]
            rows = [row.items for row in stated.items if isinstance(row, Group) and row.brackets == "[]"]
            same = len(rows) == len(stated.items) == len(gold.rows)
            return same and all(self._ordered(a, b) for a, b in zip(gold.rows, rows, strict=True))
        if not isinstance(stated, Matrix) or len(gold.rows) != len(stated.rows):
            return False
        return all(self._ordered(a, b) for a, b in zip(gold.rows, stated.rows, strict=True))

    def _words(self, gold: Words, stated: Value) -> bool:
        if isinstance(stated, Quantity) and not stated.unit:
            return self._decided(gold, stated.node, stated.text)
        if not isinstance(stated, Words):
            return False
        return bool(gold.text and gold.text == stated.text) or self._decided(gold, stated.notation, stated.notation)

    def _decided(self, gold: Words, stated: Node | str, text: str) -> bool:
        if not gold.notation or not stated or not self._allowed_operations(gold, text):
            return False
        return self.decide(gold.notation, stated)


def _is_equal(a: object, b: object) -> bool:
    return a == b


def _number(item: object) -> tuple[Fraction, str, int | None] | None:
    """What finds the partner of a plain number in a list."""
    if not isinstance(item, Quantity) or item.unit:
        return None
    try:
        value = evaluate(item.node).rational
    except NotMathError:
        return None
    return None if value is None else (value, item.unit, item.base)


def _sequence(group: Group) -> bool:
    return any(isinstance(item, Words) and "dots" in item.text for item in group.items)
