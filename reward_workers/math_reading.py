"""Reading an answer's text as a value.

Contract. `read` is pure and bounded, and gives one of the kinds of `math_values` for any text: what is not understood whole is
`Words`, which equals only what reads the same. Nothing is guessed from a part of a text.
"""

from __future__ import annotations

import functools
import re
from fractions import Fraction

from reward_workers.math_families import without_clause
from reward_workers.math_lists import difference, listed, union
from reward_workers.math_matrices import matrix, transposed
from reward_workers.math_notation import NotMathError, Token, TooComplexError, normalise, tokens_of
from reward_workers.math_part import MAX_NESTING, NOTATION, Part, is_relation, is_word, number_node, words_of
from reward_workers.math_quantities import based, compound, in_time, quantity
from reward_workers.math_regions import REALS, interval
from reward_workers.math_relations import related
from reward_workers.math_syntax import OPEN, Node
from reward_workers.math_units import unit_of
from reward_workers.math_values import Group, Matrix, Quantity, Region, Value, Words
from reward_workers.math_words import number_in_words

_AROUND = ' ,;:`*"'  # what may stand around an answer and is none of it
EMPTY = Group((), "{}")
_EMPTY_WORDS = re.compile(
    r"((there (is|are) )?(no|empty|null)( real| integer| such)?( solutions?| roots?| values?| set)( exists?)?"
    r"|(there (is|are) )?none( exists?)?)"
)
_REALS = re.compile(r"((set of )?(all|any|every)( of the)? (real|reals|real numbers?)|(set of )?real numbers)")
_INTEGERS = re.compile(r"(set of )?(all )?(the )?integers")
_INFINITY = re.compile(r"(positive |plus |negative |minus )?infinity")
_EXCEPT = re.compile(
    r"^(\\text ?\{ ?)?(?:all|any|every) real (?:numbers? |values )?(?:[a-z] )?except(?: for)? ?(\})? ?(?:[a-z] ?= ?)?(.+)$",
    re.IGNORECASE,
)
_MINUS = re.compile(r"^(\\text ?\{ ?)?(?:minus|negative) ?(\})? ?(?=[\d.\\])", re.IGNORECASE)
_SIGNED_TEXT = re.compile(r"^\\text ?\{ ?(?:minus|negative) (\d[\d.,/]*) ?\}", re.IGNORECASE)
_ABOUT = re.compile(
    r"^(\\text ?\{ ?)?(?:approximately|approx\.?|about|roughly|around)(?![A-Za-z]) ?(\})? ?", re.IGNORECASE
)
_HALF_LINES = {  # of the real numbers, by the notation after \\R, and in words
    "^+": (True, False),
    "_{>0}": (True, False),
    "_{\\geq 0}": (True, True),
    "^{+}": (True, False),
    "_+": (True, False),
    "_{+}": (True, False),
    "^{-}": (False, False),
    "_-": (False, False),
    "_{-}": (False, False),
    "^-": (False, False),
    "_{<0}": (False, False),
    "_{\\leq 0}": (False, True),
}
_SIGNED = {
    "positive": (True, False),
    "nonnegative": (True, True),
    "negative": (False, False),
    "nonpositive": (False, True),
}
_SIGNED_WORDS = re.compile(r"(?:all |any )?(positive|nonnegative|negative|nonpositive) (?:reals|real numbers)")
_ORDINAL = re.compile(r"^(\d+) ?(?:\^ ?\{? ?)?(?:\\text ?\{ ?)?(?:st|nd|rd|th) ?\}? ?\}?$")
_REVERSED = re.compile(r"^\]|\[$|\\(?:cup|in) ?\]")
_BRACKETS = re.compile(r"([\[\]])([^\[\],;]*[,;][^\[\]]*)([\[\]])")
_PERIOD = re.compile(r"(?<![\d.])(\d+\.\d*)\((\d+)\)$")  # 0.1(6)
_DOTS = re.compile(
    r"(?<![\d.])(\d{1,40}\.\d{0,40}?)(?:(\d)\2{2,40}|(\d{2,6}?)\3{1,20}) ?\\ldots ?(?=$|\\?%$)"
)  # 0.1666..., 0.1212...


_SET = re.compile(r"^(\\\{[^|:]*?) ?\|([^|]*\\\})$")  # such that: a bar or a colon


def read(text: str, decimal_comma: bool = False) -> Value:
    """The value of an answer's text. Raises TooComplexError beyond the limits."""
    return _read(text, decimal_comma)


@functools.lru_cache(maxsize=1024)
def _read(text: str, decimal_comma: bool) -> Value:
    plain = normalise(text)
    if decimal_comma:
        plain = re.sub(r"(?<=\d)\.(?=\d{3}(?!\d))", "", plain)
        plain = re.sub(r"(?<=\d),(?=\d)", ".", plain)
    plain = plain.strip(_AROUND).removesuffix("\\cr").rstrip(".").strip(_AROUND)
    if len(plain) > 1 and plain[0] == plain[-1] == "'":
        plain = plain[1:-1]
    plain = _ORDINAL.sub(r"\1", plain)
    if _REVERSED.search(plain):  # ]1, 2[ is (1, 2)
        plain = _BRACKETS.sub(lambda match: f"{'[('[match[1] == ']']}{match[2]}{'])'[match[3] == '[']}", plain)
    plain = _PERIOD.sub(r"\1\\overline {\2}", plain)
    plain = _DOTS.sub(lambda match: f"{match[1]}\\overline {{{match[2] or match[3]}}}", plain)
    plain = without_clause(_SET.sub(r"\1:\2", plain))
    plain = _SIGNED_TEXT.sub(r"-\1", plain)
    plain = _MINUS.sub(lambda match: f"{'' if match[2] else match[1] or ''}-", plain)
    plain = _ABOUT.sub(lambda match: match[1] if match[1] and not match[2] else "", plain)
    plain = _EXCEPT.sub(_excepted, plain)
    plain = re.sub(
        r"(?<![\d,._^])(?<!frac )\d{1,3}(?: \d{3})+(?![\d,.]|/)", lambda match: match[0].replace(" ", ""), plain
    )
    plain = re.sub(r"(?<![\d./])(\d+) (\d+)/(\d+)(?![\d./])", r"\1\\frac{\2}{\3}", plain)  # 1 1/2
    try:
        tokens = tokens_of(plain)
    except NotMathError:
        return Words(words_of(plain))
    return _value(Part(plain, tuple(tokens)), 0)


def _excepted(match: re.Match[str]) -> str:
    points = match[3].removesuffix("}") if match[1] and not match[2] else match[3]
    return rf"\R \setminus \{{{points}\}}"


def _opaque(text: Part) -> Words:
    source = text.text
    notation = all(
        (t.kind != "cmd" or t.text in NOTATION)
        and t.kind != "text"
        and (t.kind != "word" or len(t.text) <= 2 or t.text in ("matrix", "pmatrix", "bmatrix", "vmatrix", "dx", "dy"))
        for t in text.tokens
    )
    # Computer algebra takes `sqrt(49) = 8` for 8: what states a relation is compared as it reads.
    notation = notation and any(t.kind == "cmd" for t in text.tokens) and not text.split(is_relation)[1]
    return Words(words_of(source), source if notation else "")


def _value(text: Part, depth: int) -> Value:
    if depth > MAX_NESTING:
        raise TooComplexError(f"lists nested deeper than {MAX_NESTING}")
    if not text.tokens:
        return Words("")
    if text.tokens[0].kind in ("text", "word"):
        words = words_of(text.text)
        if _EMPTY_WORDS.fullmatch(words):
            return EMPTY
        if _REALS.fullmatch(words):
            return REALS
        if _INTEGERS.fullmatch(words):
            return Words("\\Z")
        if infinite := _INFINITY.fullmatch(words):
            endless = Node("const", "oo")
            return Quantity(Node("neg", "", (endless,)) if infinite[1] in ("negative ", "minus ") else endless, words)
        if signed := _SIGNED_WORDS.fullmatch(words):
            return _half_line(*_SIGNED[signed[1]])
        number = number_in_words(words)
        if number is not None and (unit := unit_of([Token("text", number[1])])) is not None:
            return Quantity(number_node(number[0]), words, unit)
        if words != text.text.strip() and re.match(r"(?:an?|the) [a-z]{3,}$", text.text.strip(), re.IGNORECASE):
            return Words(words)
    if len(text) == 1 and text.tokens[0].kind == "cmd":
        if text.tokens[0].text == "emptyset":
            return EMPTY
        if text.tokens[0].text == "R":
            return REALS
    if text.text.startswith("\\R") and (side := _HALF_LINES.get(text.text[2:].replace(" {", "{").strip())):
        return _half_line(*side)
    number_in_base = based(text.text)
    if number_in_base is not None:
        return number_in_base
    return (
        in_time(text)
        or compound(text)
        or union(text, depth, _value)
        or listed(text, depth, _value)
        or difference(text, depth, _value)
        or related(text, depth, _value)
        or _plus_minus(text, depth)
        or matrix(text, depth, _value)
        or transposed(text, depth, _value)
        or _bracketed(text, depth)
        or _point(text, depth)
        or _ratio(text, depth)
        or quantity(text)
        or _opaque(text)
    )


def _half_line(positive: bool, closed: bool) -> Region:
    zero = Node("num", Fraction(0))
    return Region((interval(zero, None, closed, False) if positive else interval(None, zero, False, closed),))


def _plus_minus(text: Part, depth: int) -> Value | None:
    signs = [i for i, t in enumerate(text.tokens) if t.kind == "cmd" and t.text in ("pm", "mp")]
    if not signs or len(signs) > 4:
        return None
    items: list[Value] = []
    for upper in ("+", "-"):
        tokens = list(text.tokens)
        for index in signs:
            sign = upper if tokens[index].text == "pm" else "-" if upper == "+" else "+"
            tokens[index] = Token("op", sign, tokens[index].space, tokens[index].start, tokens[index].end)
        value = _value(Part(text.source, tuple(tokens)), depth + 1)
        if not isinstance(value, Quantity):
            return None
        items.append(Quantity(value.node, "", value.unit))
    return Group(tuple(items))


def _point(text: Part, depth: int) -> Value | None:
    """`P(1, 2)`: a point with its name."""
    tokens = text.tokens
    if len(tokens) < 6 or tokens[0].kind != "word" or not re.fullmatch("[A-Z]", tokens[0].text) or tokens[1].space:
        return None
    value = _bracketed(text[1 : len(text)], depth + 1)
    is_point = isinstance(value, Group) and value.brackets == "()" and all(isinstance(i, Quantity) for i in value.items)
    return value if is_point else None


def _bracketed(text: Part, depth: int) -> Value | None:
    tokens = text.tokens
    first, last = tokens[0], tokens[-1]
    if first.kind == last.kind == "op" and first.text in OPEN and last.text in (")", "]", "}", "\\}"):
        pair = first.text.strip("\\") + last.text.strip("\\")
    else:
        return None
    depths = 0
    for index, token in enumerate(tokens):
        if token.kind == "op":
            depths += (token.text in OPEN) - (token.text in (")", "]", "}", "\\}"))
        if depths == 0 and index < len(tokens) - 1:
            return None  # the first bracket is closed before the end
    if pair not in ("()", "[]", "(]", "[)", "{}"):
        return None
    inner = text[1 : len(text) - 1]
    if not inner.tokens:
        return EMPTY if pair == "{}" and first.text == "\\{" else None
    if first.text == "{":
        return _value(inner, depth + 1)
    if first.text == "\\{" and (built := _set_builder(inner, depth)):
        return built
    such_that = inner.split(lambda t: t.text in (":", "|"))[0]
    if first.text == "\\{" and len(such_that) > 1 and len(such_that[0]) > 1:
        return Words(words_of(text.text))
    items = listed(inner, depth + 1, _value, bracketed=True)
    if isinstance(items, Group):
        return Group(_spread(items.items) if pair == "{}" else items.items, pair)
    value = _value(inner, depth + 1)
    if pair == "()" or (pair == "[]" and isinstance(value, Matrix)):
        return value
    return Group(_spread((value,)) if pair == "{}" else (value,), pair)


def _spread(items: tuple[Value, ...]) -> tuple[Value, ...]:
    r"""The elements of a set, of which `\pm 1` is two."""
    return tuple(
        part
        for item in items
        for part in (item.items if isinstance(item, Group) and not item.brackets and not item.name else (item,))
    )


def _set_builder(inner: Part, depth: int) -> Value | None:
    """`\\{ x | x > 3 \\}`, `\\{ x \\in \\R : x > 3 \\}`."""
    parts, separators = inner.split(lambda t: t.kind == "op" and t.text in ("|", ":", "\\|"))
    if not separators:
        return None
    head, condition = parts[0].tokens, inner[len(parts[0]) + 1 : len(inner)]
    plain = len(head) == 1 or (len(head) == 3 and (head[1].text, head[2].text) == ("in", "R"))
    value = _value(condition, depth + 1) if plain else None
    return value if isinstance(value, Region) and value.name == head[0].text else None


def _ratio(text: Part, depth: int) -> Value | None:
    """`3:4`, `3 to 4`."""
    parts, separators = text.split(lambda t: (t.kind == "op" and t.text == ":") or is_word(t, "to"))
    if not 1 <= len(separators) <= 4:
        return None
    values = [_value(part, depth + 1) for part in parts]
    return Group(tuple(values), "::") if all(isinstance(v, Quantity) for v in values) else None
