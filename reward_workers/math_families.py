r"""Answers that hold for every integer: `x = \frac{\pi}{4} + k\pi, k \in \mathbb{Z}`.

Contract. Pure. What says that a letter stands for any integer goes, and the letter has one name in all answers, so that two
families compare as expressions do; the numbers that they run through decide, not where a family is begun to be counted.
"""

from __future__ import annotations

import itertools
import re
from fractions import Fraction

from reward_workers.math_algebra import Ratio, add, divide, evaluate, negate
from reward_workers.math_notation import NotMathError
from reward_workers.math_syntax import Node
from reward_workers.math_values import symbols_of

INTEGER = "n_Z"  # the name of the letter
MAX_STARTS = 6  # of what may be a clause

_START = re.compile(r"[,;(]|\\text|\\forall|\b(?:where|with|for)\b| [a-zA-Z] ?\\in")
_EACH = r"(?:all |any |every |each |some )?"
_ANY_INTEGER = re.compile(
    rf"(?:(?:where |with |for |and |\\forall ){_EACH})?([a-zA-Z]) (?:\\in \\Z|(?:is )?an? (?:arbitrary )?integer|is any integer)"
    rf"|(?:where |for ){_EACH}integers? ([a-zA-Z])"
)
_NUMBERS = r"(?:(?:positive |nonnegative |natural |real |rational )?(?:numbers? |reals? |integers? )|real |values of )?"
_ANY_ARGUMENT = re.compile(rf"(?:for (?:all|any|every|each) |\\forall ){_NUMBERS}([a-zA-Z])(?: \\in \\[RQZN])?")
_FUNCTION = re.compile(r"[a-zA-Z] ?\( ?([a-zA-Z]) ?\) ?=")


def without_clause(text: str) -> str:
    r"""A normalised text without `k \in \Z` at its end, its letter renamed, or without `for all x` after `f(x) = ...`."""
    for start in [match.start() for match in _START.finditer(text)][-MAX_STARTS:]:
        clause = re.sub(r"\\text ?\{([^{}]*)\}|(\\[A-Za-z]+)|[,;()]", r" \1\2 ", text[start:])
        clause = re.sub(r"\s+", " ", clause).strip()
        function = _FUNCTION.match(text)
        everywhere = _ANY_ARGUMENT.fullmatch(clause)
        if everywhere and function and function[1] == everywhere[1]:
            return text[:start]
        any_integer = _ANY_INTEGER.fullmatch(clause)
        if any_integer:
            letter = any_integer[1] or any_integer[2]
            body, times = re.subn(rf"(?<![A-Za-z\\]){letter}(?![A-Za-z])", "n_{Z}", text[:start])
            return body if times else text
    return text


def same_family(gold: Node, stated: Node) -> bool:
    """Whether two families of the form a + n d run through the same numbers: 1 + 2n and 2n - 1."""
    try:
        ours, theirs = _progression(gold), _progression(stated)
        if ours is None or theirs is None:
            return False
        steps = divide(theirs[1], ours[1]).rational
        shift = divide(add(theirs[0], negate(ours[0])), ours[1]).rational
    except NotMathError:
        return False
    return steps is not None and abs(steps) == 1 and shift is not None and shift.denominator == 1


def _progression(node: Node) -> tuple[Ratio, Ratio] | None:
    """The number at 0, and the difference of neighbours where it is the same everywhere."""
    if INTEGER not in symbols_of(node):
        return None
    terms = [evaluate(_at(node, place)) for place in range(4)]
    steps = [add(b, negate(a)) for a, b in itertools.pairwise(terms)]
    return (terms[0], steps[0]) if steps[0].top and all(step == steps[0] for step in steps) else None


def _at(node: Node, place: int) -> Node:
    if node.kind == "sym" and node.value == INTEGER:
        return Node("num", Fraction(place))
    return Node(node.kind, node.value, tuple(_at(arg, place) for arg in node.args))
