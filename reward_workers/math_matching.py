"""Whether a stated value is the right one, under a policy for what notation leaves open.

Contract. `matches` is True or False where that is certain by exact arithmetic, and otherwise asks `decide`, which is
given the notation of the two expressions in doubt. An answer that restates a calculation is not that calculation's
result: against a plain number only a plain number counts, and an operation such as a sine or an integral counts only
where the right answer has one of its family too.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeVar

from reward_workers.math_algebra import add as plus
from reward_workers.math_algebra import (
    divide,
    evaluate,
    negate,
    proportional,
)
from reward_workers.math_equality import approximate, equal
from reward_workers.math_notation import FAMILY, NotMathError, TooComplexError
from reward_workers.math_regions import merged, region_of
from reward_workers.math_syntax import Node, walk
from reward_workers.math_units import known
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
    policy: Policy
    decide: Decide

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
            return _is_asked_for(stated.left) and self._quantity(gold, stated.value)
        if not isinstance(stated, Group):
            return False
        if len(stated.items) == 1 and stated.brackets in ("", "{}", "[]") and not isinstance(gold, Group | Region):
            return self.matches(gold, stated.items[0])
        return False

    # Numbers and expressions

    def _quantity(self, gold: Quantity, stated: Value) -> bool:
        if isinstance(stated, Words) and stated.notation:
            return self._allowed_operations(gold, stated.notation) and self.decide(gold.node, stated.notation)
        if isinstance(stated, Group) and stated.brackets == "::" and len(stated.items) == 2 and not _is_clock(stated):
            node = None if gold.unit or gold.base else _quotient(stated)
            return node is not None and _bare(gold.node).kind == "div" and self._same_ratio(node, gold)
        if not isinstance(stated, Quantity):
            return False
        if gold.base != stated.base and not self.policy.any_base:
            return False
        if not self._same_unit(gold.unit, stated.unit):
            return False
        wanted = [gold.node]
        if gold.unit == "%" or stated.unit == "%":
            wanted = self._percent(gold, stated.unit)
        return any(self._same_number(Quantity(node, gold.text), stated) for node in wanted)

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
            equal(gold, _rename(stated, dict(zip(theirs, names, strict=True))))
            for names in itertools.permutations(ours)
        )

    def _evaluated(self, gold: Node, stated: Node) -> bool:
        """Whether the stated form is a result and not a calculation, as far as the right answer's form can tell."""
        if self.policy.allow_unevaluated:
            return True
        families = {FAMILY[str(n.value)] for n in walk(stated) if str(n.value) in FAMILY and not _is_closed_form(n)}
        if families - {FAMILY[str(n.value)] for n in walk(gold) if str(n.value) in FAMILY}:
            return False
        if not _literal(gold):
            return True
        if not _literal(stated):
            return False
        value = evaluate(gold).rational
        fraction = _bare(stated)
        if value is None or value.denominator != 1 or fraction.kind != "div":
            return True
        return _bare(gold).kind == "div"

    def _allowed_operations(self, gold: Quantity | Words, notation: str) -> bool:
        """The same rule for notation that is not understood here: it needs its operations in the right answer."""
        if self.policy.allow_unevaluated:
            return True
        text = gold.notation if isinstance(gold, Words) else gold.text
        return all(f"\\{name}" not in notation or f"\\{name}" in text for name in FAMILY)

    # Equations and regions

    def _assignment(self, gold: Assignment, stated: Value) -> bool:
        if isinstance(stated, Assignment) and stated.name.removesuffix("()") == gold.name.removesuffix("()"):
            if self.matches(gold.value, _with_arguments(gold.left, stated)):
                return True
        elif not isinstance(stated, Assignment | Relation):
            return self.matches(gold.value, stated)
        if isinstance(gold.value, Quantity) and symbols_of(gold.value.node):
            return self._relation(Relation("=", gold.left, gold.value.node), stated)
        return False

    def _relation(self, gold: Relation, stated: Value) -> bool:
        if isinstance(stated, Assignment) and isinstance(stated.value, Quantity):
            stated = Relation("=", stated.left, stated.value.node)
        if not isinstance(stated, Relation) or stated.sign != gold.sign:
            return False
        try:
            ours = plus(evaluate(gold.left), negate(evaluate(gold.right)))
            theirs = plus(evaluate(stated.left), negate(evaluate(stated.right)))
            if not proportional(ours, theirs):
                return False
            factor = divide(theirs, ours).rational if ours.top else None
        except NotMathError:
            return False
        return gold.sign in ("=", "neq") or factor is None or factor > 0

    def _region(self, gold: Region, stated: Value) -> bool:
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
        return self._same_number(Quantity(gold, ""), Quantity(stated, ""))

    # Collections

    def _group(self, gold: Group, stated: Value) -> bool:
        if isinstance(stated, Region):
            region = region_of(gold)
            return region is not None and self._region(region, stated)
        if isinstance(stated, Matrix) and gold.brackets == "()":
            return len(stated.rows[0]) == 1 and self._ordered(gold.items, [row[0] for row in stated.rows])
        if gold.brackets == "::":
            return self._ratio(gold, stated)
        if not isinstance(stated, Group):
            return len(gold.items) == 1 and gold.brackets in ("", "{}") and self.matches(gold.items[0], stated)
        if gold.name and stated.name and gold.name != stated.name:
            return False
        if _sequence(gold) or _sequence(stated):
            return gold.brackets == stated.brackets and self._ordered(gold.items, stated.items)
        unordered = ("", "{}")
        if gold.brackets == stated.brackets == "{}" and len(gold.items) != len(stated.items):
            return self._covers(gold.items, stated.items) and self._covers(stated.items, gold.items)
        if gold.brackets in unordered and stated.brackets in unordered:
            return self._unordered(gold.items, stated.items, self.matches)
        values = _values_by_name(stated) if gold.brackets == "()" else None
        if values is not None:
            return self._ordered(gold.items, values)
        alike = gold.brackets == stated.brackets or "" in (gold.brackets, stated.brackets)
        alike = alike or (len(gold.items) != 2 and {gold.brackets, stated.brackets} == {"()", "[]"})
        if gold.brackets in ("[]", "[)", "(]") and not stated.brackets and len(gold.items) == 2:
            return False  # an interval is more than its ends
        # A set never is a tuple, and `::` is a ratio.
        if not alike or (gold.brackets != stated.brackets and {"{}", "::"} & {gold.brackets, stated.brackets}):
            return False
        return self._ordered(gold.items, stated.items)

    def _covers(self, some: Sequence[Value], others: Sequence[Value]) -> bool:
        """Whether each of the others is among some: of sets that name an element twice."""
        if len(some) * len(others) > MAX_PAIRS:
            raise TooComplexError(f"sets of {len(some)} and {len(others)} elements, some of them twice")
        return all(any(self.matches(one, other) for one in some) for other in others)

    def _ratio(self, gold: Group, stated: Value) -> bool:
        """3:4 is 6:8 and, of two numbers, 3/4. A time of the day is that time only."""
        if isinstance(stated, Quantity):
            return not _is_clock(gold) and (node := _quotient(gold)) is not None and self._same_ratio(node, stated)
        if not isinstance(stated, Group) or stated.brackets != "::" or len(gold.items) != len(stated.items):
            return False
        if _is_clock(gold):
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
        return len(gold) == len(stated) and all(self.matches(a, b) for a, b in zip(gold, stated, strict=True))

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
        if isinstance(stated, Group) and stated.brackets == "()" and len(gold.rows[0]) == 1:
            return self._ordered([row[0] for row in gold.rows], stated.items)
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


def _values_by_name(stated: Group) -> list[Value] | None:
    """The values of `x = 1, y = 2` in the order of their names; None for another kind of list."""
    named = [item for item in stated.items if isinstance(item, Assignment)]
    if stated.brackets or len(named) != len(stated.items) or len({item.name for item in named}) != len(named):
        return None
    return [item.value for item in sorted(named, key=lambda item: item.name)]


def _is_asked_for(left: Node) -> bool:
    r"""Whether the left side of an equation is what a question may ask for: `m + n`, `|AB|`, `\cos A`. An equation in one
    unknown, `2x = 10`, is one to be solved.
    """
    symbols = symbols_of(left)
    if left.kind == "fn" and FAMILY.get(str(left.value)) == "trigonometry":
        return bool(symbols)
    if (left.kind, left.value) == ("fn", "abs") and left.args[0].kind == "sym":
        return symbols.pop().isupper()  # the size of a set, a determinant
    return len(symbols) > 1


def _is_closed_form(node: Node) -> bool:
    """Whether an operation stands for a formula that has no other, such as a binomial coefficient of a symbol."""
    return FAMILY.get(str(node.value)) == "counting" and bool(symbols_of(node))


def _with_arguments(left: Node, stated: Assignment) -> Value:
    """What `f(t) = t^2` says of `f(x)`: the stated value with the names of the right answer's arguments."""
    ours, theirs = [[str(a.value) for a in n.args] if n.kind == "fn" else [] for n in (left, stated.left)]
    if ours == theirs or not ours or not theirs:
        return stated.value
    free = symbols_of(stated.value.node) - set(theirs) if isinstance(stated.value, Quantity) else set(ours)
    if len(ours) != len(theirs) or len(set(theirs)) != len(theirs) or free & set(ours):
        return Words("")
    assert isinstance(stated.value, Quantity)
    return Quantity(_rename(stated.value.node, dict(zip(theirs, ours, strict=True))), "", stated.value.unit)


def _is_clock(group: Group) -> bool:
    """Whether `10:30` is written as a time is, with two digits after each colon."""
    texts = [item.text if isinstance(item, Quantity) else "" for item in group.items]
    return bool(group.name) or all(len(text) == 2 and text.isdigit() for text in texts[1:])


def _quotient(ratio: Group) -> Node | None:
    nodes = tuple(item.node for item in ratio.items if isinstance(item, Quantity))
    return Node("div", "", nodes) if len(nodes) == len(ratio.items) == 2 else None


def _rename(node: Node, names: dict[str, str]) -> Node:
    if node.kind == "sym":
        return Node("sym", names.get(str(node.value), node.value))
    return Node(node.kind, node.value, tuple(_rename(arg, names) for arg in node.args))


def _bare(node: Node) -> Node:
    """A node without its sign."""
    while node.kind == "neg":
        node = node.args[0]
    return node


def _literal(node: Node) -> bool:
    """Whether a tree is a number as one writes it: 3, -0.5, 2/3, 1 1/2, 5 * 10^-6, 10^6."""
    node = _bare(node)
    match node.kind:
        case "num" | "mixed":
            return True
        case "div":
            return all(_bare(arg).kind == "num" for arg in node.args)
        case "mul":
            return node.args[0].kind == "num" and _power_of_ten(node.args[1])
    return _power_of_ten(node)


def is_reduced(node: Node) -> bool:
    """Whether a tree is a number as one writes it, and no fraction that could be cancelled."""
    if not _literal(node):
        return False
    fraction = _bare(node)
    if fraction.kind != "div":
        return True
    top, bottom = (_bare(arg).value for arg in fraction.args)
    assert isinstance(top, Fraction)
    assert isinstance(bottom, Fraction)
    return top.denominator == bottom.denominator == 1 and math.gcd(top.numerator, bottom.numerator) == 1


def _power_of_ten(node: Node) -> bool:
    return node.kind == "pow" and node.args[0] == Node("num", Fraction(10)) and _bare(node.args[1]).kind == "num"


def vote(value: Value) -> str | None:
    """One text for all ways to write a plain rational number or the same words; None for other values."""
    while isinstance(value, Assignment):
        value = value.value
    if isinstance(value, Words):
        return value.text or None
    if not isinstance(value, Quantity) or value.base is not None:
        return None
    try:
        number = evaluate(value.node).rational
    except (NotMathError, TooComplexError):
        return None
    if number is None or math.log10(max(abs(number.numerator), number.denominator)) > 100:
        return None
    return str(number)
