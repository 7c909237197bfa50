"""What an answer denotes: numbers with units, lists, sets, tuples, intervals, matrices, equations, words."""

from __future__ import annotations

from dataclasses import dataclass

from reward_workers.math_syntax import Node, walk


@dataclass(frozen=True)
class Quantity:
    """A number or an expression. `base` is that of a number whose base is stated; `text` is what was read."""

    node: Node
    text: str
    unit: str = ""
    base: int | None = None


@dataclass(frozen=True)
class Group:
    """Several values. `brackets` is `{}` for a set, two of `()[]` for a tuple or an interval, `::` for a ratio, `++` for the
    parts of one measure, and empty for a bare list.
    """

    items: tuple[Value, ...]
    brackets: str = ""
    name: str = ""


@dataclass(frozen=True)
class Interval:
    """From `low` to `high`; None is infinite. A closed end belongs to it."""

    low: Node | None
    high: Node | None
    low_closed: bool = False
    high_closed: bool = False


@dataclass(frozen=True)
class Region:
    """A union of intervals, the values that `name` (which may be empty) can have."""

    intervals: tuple[Interval, ...]
    name: str = ""


@dataclass(frozen=True)
class Matrix:
    rows: tuple[tuple[Value, ...], ...]


@dataclass(frozen=True)
class Assignment:
    """`x = 5`, `f(x) = x^2`, `Area = 12`. The node of the left side serves where the whole is an equation."""

    name: str
    left: Node
    value: Value


@dataclass(frozen=True)
class Relation:
    """`left` and `right` stand in a relation: one of = < > leq geq neq. `value` is the right side of `=` as it was read."""

    sign: str
    left: Node
    right: Node
    value: Quantity | None = None


@dataclass(frozen=True)
class Words:
    """Text, compared as it reads. `notation` is its normalised form where it is notation without words that is not
    understood here, such as an integral; empty for other text.
    """

    text: str
    notation: str = ""


Value = Quantity | Group | Region | Matrix | Assignment | Relation | Words


def name_of(node: Node) -> str | None:
    """The name of a lone symbol, `x`, of a function applied to symbols, `f(x)`, or of a derivative, `dy/dx`."""
    if node.kind == "sym":
        return str(node.value)
    if node.kind == "fn" and str(node.value).endswith("()") and all(a.kind == "sym" for a in node.args):
        return str(node.value)
    if node.kind == "div" and all(arg.kind == "mul" and arg.args[0] == Node("sym", "d") for arg in node.args):
        above, below = (arg.args[1] for arg in node.args)
        return f"d{above.value}/d{below.value}" if above.kind == below.kind == "sym" else None
    return None


def symbols_of(node: Node) -> set[str]:
    return {str(n.value) for n in walk(node) if n.kind == "sym"}
