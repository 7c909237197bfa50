"""Reading numbers: with units and currencies, in a stated base, as a time or a date.

Contract. Pure. What is not a number as a whole is None.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

from reward_workers.math_notation import CONSTANTS, FAMILY, FUNCTIONS, GREEK, NotMathError, Token
from reward_workers.math_part import Part
from reward_workers.math_syntax import Node, parse
from reward_workers.math_units import is_unit, unit_of
from reward_workers.math_values import Group, Quantity, Value, Words
from reward_workers.math_words import clock_of, date_of

_BASE_WORDS = {
    "two": 2,
    "three": 3,
    "four": 4,
    "five": 5,
    "six": 6,
    "seven": 7,
    "eight": 8,
    "nine": 9,
    "ten": 10,
    "twelve": 12,
}
_BASE_WORDS |= {"sixteen": 16, "binary": 2, "octal": 8, "hex": 16}
_BASED = re.compile(
    r"(-?)\(?([0-9A-Z ]+)\)?\s*(?:_ ?(?:\{ ?)?\(? ?(?:\\text ?\{)? ?(\d+|[a-z]+) ?\}? ?\)? ?\}?"
    r"|,? ?\(?(?:in )?base[- ]?(\d+|[a-z]+)\)?)"
)
_PREFIXED = re.compile(r"(-?)0([xbo])([0-9A-Fa-f]+)")


def based(text: str) -> Quantity | None:
    """`52_8`, `1A_{16}`, `101 (base 2)`, `0xff`."""
    if len(text) > 400:
        return None
    text = re.sub(r"\\text ?\{([^{}]*)\}", r"\1", text)
    match = _PREFIXED.fullmatch(text)
    if match:
        minus, digits, base = match[1], match[3], {"x": 16, "b": 2, "o": 8}[match[2]]
    else:
        match = _BASED.fullmatch(text)
        if not match or (not any(c.isdigit() for c in match[2]) and match[3] != "16"):
            return None
        minus, digits = match[1], match[2].replace(" ", "")
        stated = match[3] or match[4]
        base = int(stated) if stated.isdigit() else _BASE_WORDS.get(stated, 0)
    if not 2 <= base <= 36:
        return None
    try:
        value = int(digits, base)
    except ValueError:
        return None
    node = Node("num", Fraction(-value if minus else value))
    return Quantity(node, text, base=None if base == 10 else base)


def in_time(text: Part) -> Value | None:
    """A time of the day, or a date in digits."""
    if len(text) > 20:
        return None
    plain = re.sub(r"\\text ?\{([^{}]*)\}", r"\1", text.text).strip()
    if (clock := clock_of(plain)) is not None:
        items = tuple(Quantity(Node("num", Fraction(part)), f"{part:02}") for part in clock[0])
        return Group(items, "::", name=clock[1])
    date = date_of(plain)
    return Words(date) if date is not None else None


def quantity(text: Part) -> Quantity | None:
    """A number or an expression, with its unit: `5 cm`, `$12`, `x + 1`."""
    tokens = list(text.tokens)
    source = text.text
    unit = ""
    sign = tokens[:1] if tokens[0].text in ("-", "+") else []
    rest = tokens[len(sign) :]
    if rest and (
        rest[0].text in ("dollar", "€", "£", "¥", "₹") or (rest[0].text in ("USD", "EUR", "Rs", "US") and len(rest) > 1)
    ):
        unit = unit_of([rest[0]]) or ""
        rest = rest[1:]
        if rest and rest[0].text in (".", "dollar"):
            rest = rest[1:]
        tokens = sign + rest
    start = next((i for i, t in enumerate(tokens) if i and _starts_unit(t, tokens[i - 1])), None)
    if start and tokens[start].text == "degree" and any(FAMILY.get(t.text) == "trigonometry" for t in tokens[:start]):
        start = None  # the degrees are the function's
    if start is not None:
        found = unit_of(tokens[start:])
        if found is None:
            return None
        if unit and found and found != unit and found not in ("dollar", "usd"):
            return None
        unit, tokens = unit or found, tokens[:start]
    if not tokens:
        return None
    try:
        return Quantity(parse(_without_commas(tokens)), source, unit)
    except NotMathError:
        return None


def _starts_unit(token: Token, before: Token) -> bool:
    if before.kind == "op" and before.text in ("+", "-", "*", "/", "^", "_", "(", "[", "{", "|", "=", "**"):
        return False
    if token.kind == "text" or token.text in ("degree", "%", "\\%", "¢", "€", "£", "¥", "₹"):
        return True
    if (
        token.kind != "word"
        or (token.text in FUNCTIONS and token.text != "min")
        or token.text in CONSTANTS
        or token.text in GREEK
    ):
        return False
    if is_unit(token.text):
        return len(token.text) > 2 or token.space or (len(token.text) == 2 and before.kind == "num")
    return len(token.text) >= 3 and before.kind != "cmd"


def _without_commas(tokens: Sequence[Token]) -> list[Token]:
    """`1,234.5` becomes one number."""
    joined: list[Token] = []
    for token in tokens:
        if len(joined) > 1 and token.kind == "num" and joined[-1].text == "," and joined[-2].kind == "num":
            before = joined[-2]
            joined[-2:] = [Token("num", before.text + token.text, before.space, before.start, token.end)]
        else:
            joined.append(token)
    return joined
