"""Reading equations and inequalities, and what they say of a value.

Contract. Pure. An equation that names a value states it; one that is false as it stands, `2 = 7`, states nothing.
"""

from __future__ import annotations

import itertools
import re
from fractions import Fraction

from reward_workers.math_equality import approximate, equal
from reward_workers.math_notation import GREEK, NotMathError, Token, word_set
from reward_workers.math_part import NOTATION, RELATION_COMMANDS, RELATIONS, Part, Read, is_relation, words_of
from reward_workers.math_regions import REALS, interval, region_of, without
from reward_workers.math_syntax import Node
from reward_workers.math_values import (
    Assignment,
    Group,
    Interval,
    Matrix,
    Quantity,
    Region,
    Relation,
    Value,
    name_of,
    symbols_of,
)

_NAMING_COMMANDS = word_set(
    "angle triangle overline overrightarrow overleftrightarrow cup cap vec hat bar widehat measuredangle R Z Q N C degree "
    "circ mid parallel perp Pr prime star deg arg dim mathbb mathcal E Var Cov Corr rank tr trace Re Im ker"
)
_NOT_NAMING = word_set(
    "if when where whenever for let suppose assume unless not no never isn cannot without except or and maybe perhaps wrong "
    "incorrect than least most over under about false nor neither"
)


def related(text: Part, depth: int, read: Read) -> Value | None:
    r"""`x = 5`, `m + n = 7`, `2 < x \leq 3`, `x \in A`."""
    parts, separators = text.split(is_relation)
    if not separators:
        return None
    signs = [RELATIONS.get(t.text) or RELATION_COMMANDS[t.text] for t in separators]
    if not parts[-1].tokens or len(parts) > 8:
        return None
    if not parts[0].tokens:
        return read(parts[1], depth + 1) if signs == ["="] else None
    if signs[-1] == "=" and separators[-1].text == "approx" and (len(parts) > 2 or not _is_name(parts[0])):
        parts, signs = parts[:-1], signs[:-1]  # an exact value, and what it is about
        if not signs:
            return read(parts[0], depth + 1)
    try:
        if set(signs) == {"="}:
            return _equation(parts, depth, read)
        if signs == ["in"]:
            return _member(parts[0], read(parts[1], depth + 1))
        if set(signs) <= {"<", ">", "leq", "geq"}:
            return _inequality([part.node() for part in parts], signs)
        if signs == ["neq"]:
            return _unequal(parts[0], parts[1], depth, read)
    except NotMathError:
        return None
    return None


def _equation(parts: list[Part], depth: int, read: Read) -> Value | None:
    value = read(parts[-1], depth + 1)
    if len(parts) == 2 and isinstance(value, Group) and value.brackets == "()":
        names = read(parts[0], depth + 1)  # (x, y) = (1, 2)
        if isinstance(names, Group) and names.brackets == "()" and len(names.items) == len(value.items):
            return value if all(isinstance(n, Quantity) and name_of(n.node) for n in names.items) else None
    function = _function_of(parts[0])
    try:
        left = function or parts[0].node()
    except NotMathError:
        if not isinstance(value, Quantity | Group | Matrix | Region) or not _names_something(parts[0]):
            raise
        left = Node("sym", words_of(parts[0].text))
    nodes = [part.node() for part in parts[1:-1]]
    last = value.node if isinstance(value, Quantity) else None
    name = name_of(left)
    if (
        name is None
        and len(parts) == 2
        and (isinstance(value, Matrix | Region) or (isinstance(value, Group) and value.brackets))
    ):
        return Assignment(words_of(parts[0].text), left, value)  # A^{-1} = ..., a vector with an arrow
    if name is None and len(parts) == 2 and last is not None and (swapped := name_of(last)) and not symbols_of(left):
        return Assignment(swapped, last, Quantity(left, parts[0].text))
    if name is not None and last is not None and name in symbols_of(last):
        name = None
    # What is claimed to be equal on the way must be so: `2 = 7` says nothing.
    chain = [*nodes, last] if name is not None else [left, *nodes, last]
    known = [node for node in chain if node is not None]
    if name is not None or not any(symbols_of(node) for node in known):
        if any(equal(a, b) is False for a, b in itertools.pairwise(known)):
            return None
        if name is not None:
            return Assignment(name, left, value)
        if function is not None and len(parts) == 2:
            return Assignment(words_of(parts[0].text), left, value)  # f(1) = 0 is not f(x) = 0
        # `42 = 6 * 7` states 42
        return (
            Quantity(left, parts[0].text) if left.kind == "num" and last is not None and last.kind != "num" else value
        )
    if last is None or any(equal(node, last) is False for node in nodes if not symbols_of(node)):
        return None
    return Relation("=", left, last, value if isinstance(value, Quantity) else None)


def _function_of(text: Part) -> Node | None:
    """`y(t)`, `u(x, t)`, `y(0)`, `f^{-1}(x)`: on the left of an equation that is no product."""
    tokens = text.tokens
    if [t.text for t in tokens[1:6]] == ["^", "{", "-", "1", "}"]:
        inverse = _function_of(Part(text.source, (tokens[0], *tokens[6:])))
        return inverse and Node("fn", f"{tokens[0].text}^-1()", inverse.args)
    if len(tokens) < 4 or len(tokens) > 12 or tokens[1].text != "(" or tokens[-1].text != ")":
        return None
    arguments, between = tokens[2:-1:2], tokens[3:-1:2]
    if not _is_letter(tokens[0]) or any(t.text != "," for t in between):
        return None
    if not all(_is_letter(t) or (t.kind == "num" and t.text.isdigit()) for t in arguments):
        return None
    nodes = (Node("num", Fraction(t.text)) if t.kind == "num" else Node("sym", t.text) for t in arguments)
    return Node("fn", f"{tokens[0].text}()", tuple(nodes))


def _is_letter(token: Token) -> bool:
    return (token.kind == "word" and len(token.text) == 1) or (token.kind == "cmd" and token.text in GREEK)


def _names_something(text: Part) -> bool:
    """Whether notation or words that are not understood can be the name of a quantity: `Area`, `\angle ABC`, `f^{-1}(x)`."""
    words = 0
    for token in text.tokens:
        if token.kind == "cmd" and token.text not in NOTATION and token.text not in _NAMING_COMMANDS:
            return False
        if token.kind in ("word", "text"):
            said = re.findall(r"[a-z]+", token.text.lower())
            if _NOT_NAMING & set(said):
                return False
            words += sum(len(word) > 1 for word in said)
    return words <= 6 and len(text) <= 40 and not any(t.text == "?" for t in text.tokens)


def _unequal(left: Part, right: Part, depth: int, read: Read) -> Value | None:
    r"""`x \neq 1`, `x \neq \pm 1` are all numbers but these; `a \neq b` is a relation."""
    node = left.node()
    name = name_of(node)
    value = read(right, depth + 1)
    items = value.items if isinstance(value, Group) and not value.brackets else (value,)
    points = [item.node for item in items if isinstance(item, Quantity)]
    if len(points) == len(items) and name is not None and not any(map(symbols_of, points)):
        region = without(REALS, points)
        return region and Region(region.intervals, name)
    return Relation("neq", node, right.node())


def _is_name(text: Part) -> bool:
    try:
        return name_of(text.node()) is not None
    except NotMathError:
        return False


def _member(left: Part, value: Value) -> Value | None:
    name = name_of(left.node())
    if name is None:
        return None
    if isinstance(value, Group) and value.brackets == "{}":
        return Group(value.items, value.brackets, name)
    region = region_of(value)
    return Region(region.intervals, name) if region else None


def _inequality(nodes: list[Node], signs: list[str]) -> Value | None:
    names = [name_of(node) for node in nodes]
    if signs[0] in (">", "geq"):
        flip = {"<": ">", ">": "<", "leq": "geq", "geq": "leq"}
        nodes, names, signs = nodes[::-1], names[::-1], [flip[s] for s in reversed(signs)]
    if not set(signs) <= {"<", "leq"}:
        return None
    if len(nodes) == 2:
        bounded = [_symbol_inside(node) for node in nodes]
        if (name := bounded[0]) and _is_positive(nodes[1]):  # |x| < 3
            low, closed = Node("neg", "", (nodes[1],)), signs[0] == "leq"
            return Region((Interval(low, nodes[1], closed, closed),), name)
        if (name := bounded[1]) and _is_positive(nodes[0]):
            low, closed = Node("neg", "", (nodes[0],)), signs[0] == "leq"
            return Region((Interval(None, low, False, closed), Interval(nodes[0], None, closed)), name)
        if (name := names[0]) and name not in symbols_of(nodes[1]):
            return Region((interval(None, nodes[1], False, signs[0] == "leq"),), name)
        if (name := names[1]) and name not in symbols_of(nodes[0]):
            return Region((interval(nodes[0], None, signs[0] == "leq", False),), name)
        return Relation(signs[0], nodes[0], nodes[1])
    if len(nodes) == 3 and names[1]:
        return Region((interval(nodes[0], nodes[2], signs[0] == "leq", signs[1] == "leq"),), names[1])
    return None


def _symbol_inside(node: Node) -> str | None:
    """The name of x in |x|."""
    is_abs = (node.kind, node.value) == ("fn", "abs")
    return str(node.args[0].value) if is_abs and node.args[0].kind == "sym" else None


def _is_positive(node: Node) -> bool:
    value = None if symbols_of(node) else approximate(node, {})
    return value is not None and value.imag == 0 and value.real > 0
