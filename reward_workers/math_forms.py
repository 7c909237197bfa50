"""What the form of a value says: whether it is a result as one writes it, what it names, and what it may be read as besides.

Contract. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from reward_workers.math_algebra import evaluate
from reward_workers.math_families import INTEGER
from reward_workers.math_notation import FAMILY, NotMathError, TooComplexError
from reward_workers.math_syntax import Node
from reward_workers.math_units import unit_of_symbol
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

COUNTERS = frozenset("jklmnpqrst")  # letters that stand for integers where nothing is said of them


def components(value: Matrix | Group) -> Sequence[Value]:
    """Of a row, a column or a tuple; nothing of anything else."""
    if isinstance(value, Group):
        return value.items if value.brackets == "()" else ()
    if len(value.rows) == 1:
        return value.rows[0]
    return [row[0] for row in value.rows] if len(value.rows[0]) == 1 else ()


def with_units(gold: Quantity, stated: Quantity) -> tuple[Quantity, Quantity]:
    r"""Both, the last letter of one of them as its unit where the other has that unit: `0.75m`, which was read as a product,
    and `x m`, for `x \text{ metres}`.
    """
    if gold.unit and not stated.unit:
        return gold, _with_unit(stated, gold.unit)
    return (_with_unit(gold, stated.unit) if stated.unit and not gold.unit else gold), stated


def _with_unit(product: Quantity, unit: str) -> Quantity:
    node = product.node
    letter = unit_of_symbol(str(node.args[1].value)) if node.kind == "mul" and node.args[1].kind == "sym" else None
    return Quantity(node.args[0], product.text, unit) if letter == unit else product


def units(group: Group) -> list[str]:
    return [item.unit if isinstance(item, Quantity) else "" for item in group.items]


def of_integers(gold: Node, stated: Node) -> Node:
    """What is stated for a family with the family's letter, where it does not say of its own that it stands for any integer."""
    names = symbols_of(stated)
    counters = (names & COUNTERS) - symbols_of(gold)
    return rename(stated, {counters.pop(): INTEGER}) if len(counters) == 1 and INTEGER not in names else stated


def is_graph(one: Assignment, other: Assignment) -> bool:
    """Whether `y = ...` and `f(x) = ...` are two names of the same."""
    return one.name == "y" and other.name.endswith("()") and other.left.args == (Node("sym", "x"),)


def half_line(region: Region) -> Relation | None:
    """`y > 2 x` as a relation of both sides; `x > 2` is none."""
    (one, *others) = region.intervals or (Interval(None, None),)
    ends = [end for end in (one.low, one.high) if end is not None]
    if others or not region.name or region.name.endswith("()") or len(ends) != 1 or not symbols_of(ends[0]):
        return None
    name = Node("sym", region.name)
    if one.low is None:
        return Relation("leq" if one.high_closed else "<", name, ends[0])
    return Relation("leq" if one.low_closed else "<", ends[0], name)


def values_by_name(stated: Group) -> list[Value] | None:
    """The values of `x = 1, y = 2` in the order of their names; None for another kind of list."""
    named = [item for item in stated.items if isinstance(item, Assignment)]
    if stated.brackets or len(named) != len(stated.items) or len({item.name for item in named}) != len(named):
        return None
    return [item.value for item in sorted(named, key=lambda item: item.name)]


def is_asked_for(left: Node, right: Node) -> bool:
    r"""Whether the left side of an equation is what a question may ask for: `m + n`, `|AB|`, `\cos A`. An equation in one
    unknown, `2x = 10`, is one to be solved, and `x + y - 5 = 0` is that of a line.
    """
    symbols = symbols_of(left)
    if left.kind == "fn" and FAMILY.get(str(left.value)) == "trigonometry":
        return bool(symbols)
    if (left.kind, left.value) == ("fn", "abs") and left.args[0].kind == "sym":
        return symbols.pop().removeprefix("v_").isupper()  # the size of a set, a determinant, the length of a vector
    is_line = (
        right == Node("num", Fraction(0)) and left.kind == "add" and any(not symbols_of(term) for term in left.args)
    )
    return len(symbols) > 1 and not is_line


def is_closed_form(node: Node) -> bool:
    """Whether an operation stands for a formula that has no other, such as a binomial coefficient of a symbol."""
    return FAMILY.get(str(node.value)) == "counting" and bool(symbols_of(node))


def with_arguments(left: Node, stated: Assignment) -> Value:
    """What `f(t) = t^2` says of `f(x)`: the stated value with the names of the right answer's arguments."""
    ours, theirs = [[str(a.value) for a in n.args] if n.kind == "fn" else [] for n in (left, stated.left)]
    if ours == theirs or not ours or not theirs:
        return stated.value
    free = symbols_of(stated.value.node) - set(theirs) if isinstance(stated.value, Quantity) else set(ours)
    if len(ours) != len(theirs) or len(set(theirs)) != len(theirs) or free & set(ours):
        return Words("")
    assert isinstance(stated.value, Quantity)
    return Quantity(rename(stated.value.node, dict(zip(theirs, ours, strict=True))), "", stated.value.unit)


def is_clock(group: Group) -> bool:
    """Whether `10:30` is written as a time is, with two digits after each colon."""
    texts = [item.text if isinstance(item, Quantity) else "" for item in group.items]
    return bool(group.name) or all(len(text) == 2 and text.isdigit() for text in texts[1:])


def quotient(ratio: Group) -> Node | None:
    nodes = tuple(item.node for item in ratio.items if isinstance(item, Quantity))
    return Node("div", "", nodes) if len(nodes) == len(ratio.items) == 2 else None


def rename(node: Node, names: dict[str, str]) -> Node:
    if node.kind == "sym":
        return Node("sym", names.get(str(node.value), node.value))
    return Node(node.kind, node.value, tuple(rename(arg, names) for arg in node.args))


def bare(node: Node) -> Node:
    """A node without its sign."""
    while node.kind == "neg":
        node = node.args[0]
    return node


def literal(node: Node) -> bool:
    """Whether a tree is a number as one writes it: 3, -0.5, 2/3, 1 1/2, 5 * 10^-6, 10^6."""
    node = bare(node)
    match node.kind:
        case "num" | "mixed":
            return True
        case "div":
            return all(bare(arg).kind == "num" or power_of_ten(bare(arg)) for arg in node.args)
        case "mul":
            return node.args[0].kind == "num" and power_of_ten(node.args[1])
    return power_of_ten(node)


def is_reduced(node: Node) -> bool:
    """Whether a tree is a number as one writes it, and no fraction that could be cancelled."""
    if not literal(node):
        return False
    fraction = bare(node)
    if fraction.kind != "div":
        return True
    top, bottom = (bare(arg).value for arg in fraction.args)
    if not isinstance(top, Fraction) or not isinstance(bottom, Fraction):
        return False  # of powers of ten
    return top.denominator == bottom.denominator == 1 and math.gcd(top.numerator, bottom.numerator) == 1


def power_of_ten(node: Node) -> bool:
    return node.kind == "pow" and node.args[0] == Node("num", Fraction(10)) and bare(node.args[1]).kind == "num"


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
