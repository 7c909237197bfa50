"""Whether two expressions have the same value.

Contract. True and False are certain, or by far; None means that it was not found out. Floats serve only to tell that two values
differ by far, never that they are equal.
"""

from __future__ import annotations

import cmath
import math
import random
import re
from collections.abc import Mapping
from fractions import Fraction

from reward_workers.math_algebra import Ratio, add, evaluate, negate, same
from reward_workers.math_syntax import Node, walk

SAMPLES = 4  # random points at which two expressions with symbols are compared
_VECTOR = re.compile("v_[A-Z][A-Z]")  # as notation is normalised
FAR = 1e-7  # relative difference of two floats beyond which the exact values differ


def equal(a: Node, b: Node) -> bool | None:
    """Whether two trees have the same value: True, False, or None if that was not found out.

    Raises NotMathError or TooComplexError as `evaluate` does.
    """
    a, b = _oriented(a), _oriented(b)
    left, right = evaluate(a), evaluate(b)
    if left.rational is not None and right.rational is not None:
        return left.rational == right.rational
    if same(left, right):
        return True
    nodes = [*walk(a), *walk(b)]
    names = sorted({str(n.value) for n in nodes if n.kind == "sym"})
    if Node("const", "oo") in nodes:
        return False
    if _independent(left, names) and _independent(right, names) and not _two_constants(left, right):
        return False  # both in the one form that such values have
    if left.bottom == right.bottom and add(left, negate(right)).rational:
        return False  # they differ by that number
    source = random.Random(20_261_129)
    for _ in range(SAMPLES if names else 1):
        point = {name: source.uniform(0.4, 2.6) for name in names}
        x, y = approximate(a, point), approximate(b, point)
        if x is None or y is None:
            continue
        if abs(x - y) > FAR * max(abs(x), abs(y)):
            return False
    return None


def _oriented(node: Node) -> Node:
    """A tree whose vectors from B to A are the opposite of those from A to B, of the same length."""
    name = str(node.value)
    if node.kind == "sym" and _VECTOR.fullmatch(name):
        return node if name[2] <= name[3] else Node("neg", "", (Node("sym", f"v_{name[3]}{name[2]}"),))
    args = tuple(map(_oriented, node.args))
    if (node.kind, node.value) == ("fn", "abs") and args[0].kind == "neg":
        args = args[0].args
    return node if args == node.args else Node(node.kind, node.value, args)


def _independent(value: Ratio, symbols: list[str]) -> bool:
    """Whether a value is a quotient of sums of rational multiples of roots of primes, whole powers of symbols, pi, e and i.

    Over the rationals their products are linearly independent as long as only one of pi and e is among them, so that
    quotients that differ when multiplied out are different values.
    """
    known = {*symbols, "pi", "e", "i"}
    return all(
        name[0] == "#" or (name in known and exponent.denominator == 1)
        for monomial in (*value.top, *value.bottom)
        for name, exponent in monomial
    )


def _two_constants(*values: Ratio) -> bool:
    """Whether both pi and e occur: nobody knows whether they are independent."""
    names = {name for value in values for monomial in (*value.top, *value.bottom) for name, _ in monomial}
    return {"pi", "e"} <= names


_REAL = {
    "sin": cmath.sin,
    "cos": cmath.cos,
    "tan": cmath.tan,
    "sinh": cmath.sinh,
    "cosh": cmath.cosh,
    "tanh": cmath.tanh,
    "arcsin": cmath.asin,
    "arccos": cmath.acos,
    "arctan": cmath.atan,
    "exp": cmath.exp,
    "ln": cmath.log,
    "sqrt": cmath.sqrt,
    "cot": lambda z: 1 / cmath.tan(z),
    "sec": lambda z: 1 / cmath.cos(z),
    "csc": lambda z: 1 / cmath.sin(z),
    "abs": lambda z: complex(abs(z)),
}
_CONSTANT = {"pi": complex(math.pi), "e": complex(math.e), "i": 1j}


def approximate(node: Node, point: Mapping[str, float]) -> complex | None:
    """The value in floats with the symbols at `point`; None where there is none, or none that is known."""
    try:
        value = _approximate(node, point)
    except (ArithmeticError, ValueError, KeyError):
        return None
    return value if cmath.isfinite(value) else None


def _approximate(node: Node, point: Mapping[str, float]) -> complex:
    if node.kind == "num":
        assert isinstance(node.value, Fraction)
        return complex(float(node.value))
    if node.kind == "sym":
        return complex(point[str(node.value)])
    if node.kind == "const":
        return _CONSTANT[str(node.value)]
    args = [_approximate(arg, point) for arg in node.args]
    match node.kind:
        case "add" | "mixed":
            return sum(args)
        case "mul":
            return args[0] * args[1]
        case "div":
            return args[0] / args[1]
        case "neg":
            return -args[0]
        case "pow":
            real_root = args[0].imag == 0 and args[0].real < 0 and node.args[1].kind == "div"
            if real_root and round((1 / args[1]).real) % 2 and abs((1 / args[1]).real % 1) < 1e-9:
                return complex(-((-args[0].real) ** args[1].real))
            return args[0] ** args[1]
    if len(args) == 2 and node.value == "log":
        return cmath.log(args[0]) / cmath.log(args[1])
    if len(args) != 1:
        raise KeyError(node.value)
    return _REAL[str(node.value)](args[0])
