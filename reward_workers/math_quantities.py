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
from reward_workers.math_words import SCALES, clock_of, date_of

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
    r"(-?)\(?([0-9A-Z ]+)\)?\s*(?:_ ?(?:\{ ?)?\(? ?(?:\\text ?\{)? ?(?:base ?)?(\d+|[a-z]+) ?\}? ?\)? ?\}?"
    r"|,? ?\(?(?:in )?base[- ]?(\d+|[a-z]+)\)?)"
)
_SCALES_OF_UNITS = [  # whose units may be parts of one measure
    scale.split()
    for scale in (
        "year month week day h min s ms",
        "mi yd ft in",
        "km m cm mm",
        "t kg g mg",
        "lb oz",
        "l ml",
        *(f"{currency} cent" for currency in ("dollar", "euro")),
    )
]
_UNKNOWNS = frozenset("abxyz")  # of `x m` the m is metres
_COMPOUND_UNITS = frozenset(("N m", "W h", "A h", "J s", "V s", "A s", "N s", "W s", "V A", "C m", "N m s"))
_PREFIXED = re.compile(r"(-?)0([xbo])([0-9A-Fa-f]+)")


def based(text: str) -> Quantity | None:
    """`52_8`, `1A_{16}`, `101 (base 2)`, `0xff`."""
    if len(text) > 400:
        return None
    text = re.sub(" +", " ", re.sub(r"\\text ?\{([^{}]*)\}", r"\1", text))
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
    plain = re.sub(r" +", " ", re.sub(r"\\text ?\{([^{}]*)\}", r"\1", text.text)).strip()
    if (clock := clock_of(plain)) is not None:
        items = tuple(Quantity(Node("num", Fraction(part)), f"{part:02}") for part in clock[0])
        return Group(items, "::", name=clock[1])
    date = date_of(plain)
    return Words(date) if date is not None else None


def compound(text: Part) -> Group | None:
    """`2 hours 30 minutes`, `2 hours and 30 minutes`: the parts of one measure, the largest unit first. Nothing is added up."""
    starts = [i for i, token in enumerate(text.tokens) if token.kind == "num"]
    if not 2 <= len(starts) <= 4 or starts[0] != 0:
        return None
    items: dict[str, Value] = {}
    for start, end in zip(starts, [*starts[1:], len(text)], strict=True):
        words = " ".join(token.text for token in text.tokens[start + 1 : end])
        unit = unit_of([Token("text", re.sub(r",? (?:and )?$|,$", "", f"{words} ".replace("  ", " ")))])
        if not unit or unit in items:
            return None
        items[unit] = Quantity(parse([text.tokens[start]]), "", unit)
    scale = next((scale for scale in _SCALES_OF_UNITS if items.keys() <= set(scale)), None)
    return None if scale is None else Group(tuple(items[unit] for unit in scale if unit in items), "++")


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
    if start is None and unit and len(tokens) > 2 and tokens[-2].text == "/" and is_unit(tokens[-1].text):
        start = len(tokens) - 2  # $18/day
    if start and tokens[start].text == "degree" and any(FAMILY.get(t.text) == "trigonometry" for t in tokens[:start]):
        start = None  # the degrees are the function's
    scale = ""
    if start is not None:
        scale, named = _scaled(tokens[start:])
        found = unit_of(named)
        if _are_letters(tokens[:start], named, found):
            scale, found, start = "", "", len(tokens)
        if found is None:
            return None
        if unit and found.endswith("^-1"):
            unit += f" {found}"  # $18 per day
        elif unit and found and found != unit:
            return None
        unit, tokens = unit or found, tokens[:start]
    if not tokens:
        return None
    try:
        node = parse(_without_commas(tokens))
    except NotMathError:
        return None
    if scale:
        power = Node("pow", "", (Node("num", Fraction(10)), Node("num", Fraction(len(str(SCALES[scale])) - 1))))
        node = Node("mul", "", (node, power))
    return Quantity(node, source, unit)


def _are_letters(before: list[Token], named: list[Token], unit: str | None) -> bool:
    r"""Whether bare letters that units have, too, are symbols: `v t + s`, `\\rho g h`, `2 m n`."""
    if not named or named[0].kind != "word" or len(named[0].text) != 1:
        return False
    if unit is None:
        return True
    symbols = any(
        (t.kind == "word" and t.text not in CONSTANTS) or (t.kind == "cmd" and t.text in GREEK - {"pi"}) for t in before
    )
    if [t.text for t in named] == ["m"] and before[-1].text in _UNKNOWNS and all(t.kind == "num" for t in before[:-1]):
        return False
    letters = [token.text for token in named if token.kind == "word"]
    if (
        len(letters) > 1
        and len("".join(letters)) == len(letters)
        and all(t.kind == "word" or t.text == "*" for t in named)
    ):
        return symbols or " ".join(letters) not in _COMPOUND_UNITS
    return max(map(len, letters)) == 1 and (symbols or not all(map(is_unit, letters)))


def _scaled(tokens: list[Token]) -> tuple[str, list[Token]]:
    """The word at the beginning that says what to multiply by, `million`, and the tokens after it."""
    first, _, rest = tokens[0].text.strip().partition(" ")
    if tokens[0].kind not in ("word", "text") or first.lower() not in SCALES:
        return "", tokens
    return first.lower(), [Token(tokens[0].kind, rest), *tokens[1:]] if rest else tokens[1:]


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
    depth = 0  # of brackets, whose commas are between arguments
    for token in tokens:
        if token.kind == "op":
            depth += (token.text in ("(", "[")) - (token.text in (")", "]"))
        grouped = not depth and token.kind == "num" and not token.space and re.fullmatch(r"\d{3}(\.\d+)?", token.text)
        if grouped and len(joined) > 1 and joined[-1].text == "," and joined[-2].kind == "num":
            before = joined[-2]
            joined[-2:] = [Token("num", before.text + token.text, before.space, before.start, token.end)]
        else:
            joined.append(token)
    return joined
