r"""Answers that hold for every integer: `x = \frac{\pi}{4} + k\pi, k \in \mathbb{Z}`.

Contract. Pure. What says that a letter stands for any integer goes, and the letter has one name in all answers, so that two
families compare as expressions do; the numbers that they run through decide, not where a family is begun to be counted. A letter
that names what is stated, x in `x = 5`, n in `f(n)` or `a_n`, keeps its name: that is no family. Only the right answer's clause
makes one, never that of a stated answer.
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
_ORDER = re.compile(r"[<>]|\\(?:[lg]eq|neq)(?![A-Za-z])")
_BOUNDED = re.compile(r"(?:^|[<>]|\\(?:[lg]eq|neq)) ?\\?([A-Za-z]+) ?(?:$|[<>]|\\(?:[lg]eq|neq)(?![A-Za-z]))")


def without_clause(text: str) -> str:
    r"""A normalised text without `k \in \Z` at its end, its letter renamed, or without `for all x` after `f(x) = ...`."""
    body, letter = _clause(text)
    if not letter or _names(letter, body):
        return body
    return re.sub(_alone(letter), "n_{Z}", body)


def in_form_of(gold: str, text: str) -> str | None:
    r"""Normalised texts: what is stated with the clause of the right answer, `2k + 1` for `2k + 1, k \in \Z`, or without its own
    where the right answer has none; None if nothing is to be changed.
    """
    gold, text = gold.rstrip(" .,;"), text.rstrip(" .,;")
    (ours, our_letter), (body, letter) = _clause(gold), _clause(text)
    is_family = our_letter and not _names(our_letter, ours)
    if is_family and not letter and re.search(_alone(our_letter), text):
        return f"{text}, {our_letter} \\in \\Z"
    return body if letter and not is_family else None


def _clause(text: str) -> tuple[str, str]:
    """The text before a clause at its end, and the letter that the clause says to stand for any integer; the text as it is and
    nothing where there is none.
    """
    for start in [match.start() for match in _START.finditer(text)][-MAX_STARTS:]:
        clause = re.sub(r"\\text ?\{([^{}]*)\}|(\\[A-Za-z]+)|[,;()]", r" \1\2 ", text[start:])
        clause = re.sub(r"\s+", " ", clause).strip()
        function = _FUNCTION.match(text)
        everywhere = _ANY_ARGUMENT.fullmatch(clause)
        if everywhere and function and function[1] == everywhere[1]:
            return text[:start], ""
        any_integer = _ANY_INTEGER.fullmatch(clause)
        if any_integer:
            letter, body = any_integer[1] or any_integer[2], text[:start]
            bounded = [name for name in _BOUNDED.findall(body) if name != letter]
            if re.search(_alone(letter), body) and (bounded or not _ORDER.search(body)):
                return body, letter
            break  # of `n > 2, n \in \Z` the clause is a part
    return text, ""


def _names(letter: str, body: str) -> bool:
    """Whether a letter names what is stated, or is an argument or an index of its name."""
    alone = _alone(letter)
    named = rf"^\s*(?:{letter} ?=|[A-Za-z] ?\([^()=]*{alone}[^()=]*\) ?=)|_ ?(?:\{{ ?)?{letter}(?![A-Za-z])"
    return re.search(named, body) is not None


def _alone(letter: str) -> str:
    """A pattern of the letter where it is no part of a word or a command."""
    return rf"(?<![A-Za-z\\]){letter}(?![A-Za-z])"


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
