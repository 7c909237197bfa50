"""Reading an answer's text as a value.

Contract. `read` is pure and bounded, and gives one of the kinds of `math_values` for any text: what is not understood whole is
`Words`, which equals only what reads the same. Nothing is guessed from a part of a text.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from reward_workers.math_equality import approximate, equal
from reward_workers.math_notation import (
    CONSTANTS,
    FAMILY,
    FUNCTIONS,
    GREEK,
    NotMathError,
    Token,
    TooComplexError,
    normalise,
    tokens_of,
    word_set,
)
from reward_workers.math_syntax import OPEN, Node, parse
from reward_workers.math_units import is_unit, unit_of
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
    interval,
    name_of,
    region_of,
    symbols_of,
)

MAX_ITEMS = 1_000  # of a list, a set or a matrix
_AROUND = ' ,;:`*"'  # what may stand around an answer and is none of it
MAX_NESTING = 12  # of lists in lists

EMPTY = Group((), "{}")
_EMPTY_WORDS = re.compile(
    r"(there (is|are) )?(no|empty|null)( real| integer| such)?( solutions?| roots?| values?| set)( exists?)?"
)
_REALS = re.compile(r"(all|any|every)( of the)? (real|reals|real numbers?)")
_RELATIONS = {"=": "=", "==": "=", "<": "<", ">": ">", "<=": "leq", ">=": "geq", "!=": "neq"}
_RELATION_COMMANDS = {"leq": "leq", "geq": "geq", "neq": "neq", "in": "in", "approx": "="}
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
_MATH_COMMANDS = (
    word_set(
        "frac sqrt int iint oint sum prod lim to log ln lg sin cos tan cot sec csc arcsin arccos arctan "
        "sinh cosh tanh binom exp infty pi left right cr begin end det max min gcd lcm overline lfloor "
        "rfloor lceil rceil partial pmod bmod"
    )
    | GREEK
)


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
    plain = re.sub(r"(?<![\d,.])\d{1,3}(?: \d{3})+(?![\d,.]|/)", lambda match: match[0].replace(" ", ""), plain)
    plain = re.sub(r"(?<![\d./])(\d+) (\d+)/(\d+)(?![\d./])", r"\1\\frac{\2}{\3}", plain)  # 1 1/2
    try:
        tokens = tokens_of(plain)
    except NotMathError:
        return Words(_words(plain))
    return _value(_Text(plain, tuple(tokens)), 0)


@dataclass(frozen=True)
class _Text:
    """A part of a normalised text, with its tokens."""

    source: str
    tokens: tuple[Token, ...]

    def __getitem__(self, part: slice) -> _Text:
        return _Text(self.source, self.tokens[part])

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def text(self) -> str:
        if not self.tokens:
            return ""
        start = self.tokens[0].start
        if self.tokens[0].kind in ("cmd", "text"):
            start = self.source.rfind("\\", 0, start)
        end = self.tokens[-1].end
        return self.source[start:end]

    def node(self) -> Node:
        return parse(list(self.tokens))

    def split(self, is_separator: Callable[[Token], bool]) -> tuple[list[_Text], list[Token]]:
        """The parts between the separators that are outside of all brackets, and the separators."""
        parts: list[_Text] = []
        separators: list[Token] = []
        depth = start = 0
        for index, token in enumerate(self.tokens):
            if token.kind == "op" and token.text in OPEN:
                depth += 1
            elif token.kind == "op" and token.text in (")", "]", "}", "\\}"):
                depth -= 1
            elif token.kind == "cmd" and token.text in ("begin", "end"):
                depth += 1 if token.text == "begin" else -1
            elif depth == 0 and is_separator(token):
                parts.append(self[start:index])
                separators.append(token)
                start = index + 1
        parts.append(self[start : len(self)])
        return parts, separators


def _words(text: str) -> str:
    """Text as it is compared: lower case for words, no fonts, no spaces in notation, no article, no punctuation at its ends."""
    plain = re.sub(r"\\text ?\{([^{}]*)\}", r" \1 ", text)
    plain = re.sub(r"\\([{}%])", r"\1", plain)
    plain = re.sub(r"\s+", " ", plain).strip(" .,;:!?\"'`*")
    if not re.search(r"[A-Za-z]{2}", plain):
        return plain.replace(" ", "")
    plain = re.sub(r" ?([^\w\s]) ?", r"\1", plain)
    return re.sub(r"^(the|a|an) ", "", plain.casefold() if not re.search(r"[\\^_=<>{]", plain) else plain)


def _opaque(text: _Text) -> Words:
    source = text.text
    notation = all(
        (t.kind != "cmd" or t.text in _MATH_COMMANDS)
        and t.kind != "text"
        and (t.kind != "word" or len(t.text) <= 2 or t.text in ("matrix", "pmatrix", "bmatrix", "vmatrix", "dx", "dy"))
        for t in text.tokens
    )
    return Words(_words(source), source if notation and any(t.kind == "cmd" for t in text.tokens) else "")


def _value(text: _Text, depth: int) -> Value:
    if depth > MAX_NESTING:
        raise TooComplexError(f"lists nested deeper than {MAX_NESTING}")
    if not text.tokens:
        return Words("")
    if text.tokens[0].kind in ("text", "word"):
        words = _words(text.text)
        if _EMPTY_WORDS.fullmatch(words):
            return EMPTY
        if _REALS.fullmatch(words):
            return Region((Interval(None, None),))
    if len(text) == 1 and text.tokens[0].kind == "cmd":
        if text.tokens[0].text == "emptyset":
            return EMPTY
        if text.tokens[0].text == "R":
            return Region((Interval(None, None),))
    based = _based(text.text)
    if based is not None:
        return based
    return (
        _union(text, depth)
        or _list(text, depth)
        or _related(text, depth)
        or _plus_minus(text, depth)
        or _matrix(text, depth)
        or _bracketed(text, depth)
        or _ratio(text, depth)
        or _quantity(text)
        or _opaque(text)
    )


def _based(text: str) -> Quantity | None:
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


def _union(text: _Text, depth: int) -> Value | None:
    parts, separators = text.split(lambda t: t.text == "cup" or (t.kind == "word" and t.text == "U"))
    if not separators or len(parts) > MAX_ITEMS:
        return None
    intervals: list[Interval] = []
    name = ""
    first, _ = parts[0].split(lambda t: t.kind == "cmd" and t.text == "in")
    if len(first) == 2 and len(first[0]) == 1:
        name, parts[0] = first[0].tokens[0].text, first[1]
    for part in parts:
        region = region_of(_value(part, depth + 1))
        if region is None:
            return None
        intervals.extend(region.intervals)
    return Region(tuple(intervals), name)


def _is_word(token: Token, *words: str) -> bool:
    return token.kind in ("word", "text") and token.text.strip().lower() in words


def _list(text: _Text, depth: int, bracketed: bool = False) -> Value | None:
    """A bare list: `1, 2`, `x = 1 or x = 2`, `1331 and 1728`, `x > 1 and x < 3`."""
    parts, separators = _items(text, bracketed)
    if not separators:
        return None
    if len(parts) > MAX_ITEMS:
        raise TooComplexError(f"a list of more than {MAX_ITEMS}")
    values = [_value(part, depth + 1) for part in parts if part.tokens]
    if not values:
        return None
    if bracketed:
        return Group(tuple(values))
    if any(isinstance(v, Words) and not v.notation and re.search("[a-z]{3}", v.text) for v in values) and not all(
        isinstance(v, Words) for v in values
    ):
        return None if any(_is_word(t, "or", "and") for t in separators) else Group(tuple(values))
    if all(isinstance(v, Region) for v in values):
        return _joined([v for v in values if isinstance(v, Region)], any(_is_word(t, "or") for t in separators))
    if isinstance(values[0], Assignment):
        name = values[0].name
        if all(isinstance(v, Assignment) and v.name == name for v in values):
            return Group(tuple(v.value for v in values if isinstance(v, Assignment)), name=name)
        if all(isinstance(v, Quantity | Words) for v in values[1:]):
            return Group((values[0].value, *values[1:]), name=name)
    if all(isinstance(v, Group) and v.name for v in values):  # x = ±1, x = ±2
        groups = [v for v in values if isinstance(v, Group)]
        if len({g.name for g in groups}) == 1:
            return Group(tuple(item for g in groups for item in g.items), name=groups[0].name)
    if any(isinstance(v, Group) and not v.brackets for v in values):
        values = [i for v in values for i in (v.items if isinstance(v, Group) and not v.brackets else (v,))]
    return Group(tuple(values))


def _items(text: _Text, bracketed: bool) -> tuple[list[_Text], list[Token]]:
    """The items of a list. Commas inside a number, `1,000`, are no separators, unless brackets suggest a pair."""
    semicolons = any(t.kind == "op" and t.text == ";" for t in text.tokens)
    commas = [(i, t) for i, t in enumerate(text.tokens) if t.kind == "op" and t.text == ","]
    inside: set[int] = set()  # where commas of numbers end
    if commas:
        spaced = any(i + 1 < len(text) and text.tokens[i + 1].space for i, _ in commas)
        numbers = {
            t.start
            for i, t in commas
            if 0 < i < len(text) - 1
            and (left := text.tokens[i - 1]).kind == (right := text.tokens[i + 1]).kind == "num"
            and not (t.space or right.space)
            and left.text.isdigit()
            and len(left.text) <= 3
            and (left.text[0] != "0" or (i > 1 and text.tokens[i - 2].text == ","))
            and re.fullmatch(r"\d{3}(\.\d+)?", right.text)
        }
        if semicolons or spaced or (not bracketed and len(numbers) == len(commas)):
            inside = numbers
    return text.split(
        lambda t: (
            (t.kind == "op" and (t.text == ";" or (t.text == "," and t.start not in inside)))
            or _is_word(t, "or", "and", ", and", ", or", "and/or", "and also")
        )
    )


def _joined(regions: list[Region], union: bool) -> Region | None:
    names = {r.name for r in regions}
    if len(names) > 1:
        return None
    intervals = [i for r in regions for i in r.intervals]
    if union:
        return Region(tuple(intervals), regions[0].name)
    if len(intervals) == 2:
        low = next((i for i in intervals if i.high is None and i.low is not None), None)
        high = next((i for i in intervals if i.low is None and i.high is not None), None)
        if low is not None and high is not None:
            start, end = (approximate(bound, {}) for bound in (low.low, high.high) if bound is not None)
            if start is not None and end is not None and start.real > end.real:
                return Region(tuple(intervals), regions[0].name)  # `x < 1, x > 3` can only mean either
            return Region((Interval(low.low, high.high, low.low_closed, high.high_closed),), regions[0].name)
    return None


def _related(text: _Text, depth: int) -> Value | None:
    def is_relation(token: Token) -> bool:
        return (token.kind == "op" and token.text in _RELATIONS) or (
            token.kind == "cmd" and token.text in _RELATION_COMMANDS
        )

    parts, separators = text.split(is_relation)
    if not separators:
        return None
    signs = [_RELATIONS.get(t.text) or _RELATION_COMMANDS[t.text] for t in separators]
    if not parts[-1].tokens or len(parts) > 8:
        return None
    if not parts[0].tokens:
        return _value(parts[1], depth + 1) if signs == ["="] else None
    if signs[-1] == "=" and separators[-1].text == "approx" and (len(parts) > 2 or not _is_name(parts[0])):
        parts, signs = parts[:-1], signs[:-1]  # an exact value, and what it is about
        if not signs:
            return _value(parts[0], depth + 1)
    try:
        if set(signs) == {"="}:
            return _equation(parts, depth)
        if signs == ["in"]:
            return _member(parts[0], _value(parts[1], depth + 1))
        if set(signs) <= {"<", ">", "leq", "geq"}:
            return _inequality([part.node() for part in parts], signs)
        if signs == ["neq"]:
            return Relation("neq", parts[0].node(), parts[1].node())
    except NotMathError:
        return None
    return None


def _equation(parts: list[_Text], depth: int) -> Value | None:
    value = _value(parts[-1], depth + 1)
    if len(parts) == 2 and isinstance(value, Group) and value.brackets == "()":
        names = _value(parts[0], depth + 1)  # (x, y) = (1, 2)
        if isinstance(names, Group) and names.brackets == "()" and len(names.items) == len(value.items):
            return value if all(isinstance(n, Quantity) and name_of(n.node) for n in names.items) else None
    left = parts[0].node()
    nodes = [part.node() for part in parts[1:-1]]
    last = value.node if isinstance(value, Quantity) else None
    name = name_of(left)
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
        return value
    if len(parts) == 2 and last is not None:
        return Relation("=", left, last)
    return None


def _is_name(text: _Text) -> bool:
    try:
        return name_of(text.node()) is not None
    except NotMathError:
        return False


def _member(left: _Text, value: Value) -> Value | None:
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
        if (name := names[0]) and name not in symbols_of(nodes[1]):
            return Region((interval(None, nodes[1], False, signs[0] == "leq"),), name)
        if (name := names[1]) and name not in symbols_of(nodes[0]):
            return Region((interval(nodes[0], None, signs[0] == "leq", False),), name)
        return Relation(signs[0], nodes[0], nodes[1])
    if len(nodes) == 3 and names[1]:
        return Region((interval(nodes[0], nodes[2], signs[0] == "leq", signs[1] == "leq"),), names[1])
    return None


def _plus_minus(text: _Text, depth: int) -> Value | None:
    signs = [i for i, t in enumerate(text.tokens) if t.kind == "cmd" and t.text in ("pm", "mp")]
    if not signs or len(signs) > 4:
        return None
    items: list[Value] = []
    for upper in ("+", "-"):
        tokens = list(text.tokens)
        for index in signs:
            sign = upper if tokens[index].text == "pm" else "-" if upper == "+" else "+"
            tokens[index] = Token("op", sign, tokens[index].space, tokens[index].start, tokens[index].end)
        value = _value(_Text(text.source, tuple(tokens)), depth + 1)
        if not isinstance(value, Quantity):
            return None
        items.append(Quantity(value.node, "", value.unit))
    return Group(tuple(items))


def _matrix(text: _Text, depth: int) -> Value | None:
    tokens = text.tokens
    if len(tokens) < 8 or (tokens[0].kind, tokens[0].text) != ("cmd", "begin") or tokens[-4].text != "end":
        return None
    if tokens[2].text not in ("matrix", "pmatrix", "bmatrix", "Bmatrix", "smallmatrix", "array"):
        return None
    body = text[4 : len(text) - 4]
    if tokens[2].text == "array" and body.tokens and body.tokens[0].text == "{":
        while body.tokens and body.tokens[0].text != "}":
            body = body[1 : len(body)]
        body = body[1 : len(body)]
    rows = []
    for row in body.split(lambda t: t.kind == "cmd" and t.text == "cr")[0]:
        if row.tokens and not (len(row) == 1 and row.tokens[0].text == "hline"):
            cells = row.split(lambda t: t.kind == "op" and t.text == "&")[0]
            rows.append(tuple(_value(cell, depth + 1) for cell in cells))
    if sum(map(len, rows)) > MAX_ITEMS:
        raise TooComplexError(f"a matrix of more than {MAX_ITEMS} entries")
    return Matrix(tuple(rows)) if rows and len({len(row) for row in rows}) == 1 else None


def _bracketed(text: _Text, depth: int) -> Value | None:
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
    listed = _list(inner, depth + 1, bracketed=True)
    if isinstance(listed, Group):
        return Group(listed.items, pair)
    if pair == "()":
        return _value(inner, depth + 1)
    return Group((_value(inner, depth + 1),), pair)


def _set_builder(inner: _Text, depth: int) -> Value | None:
    """`\\{ x | x > 3 \\}`, `\\{ x \\in \\R : x > 3 \\}`."""
    parts, separators = inner.split(lambda t: t.kind == "op" and t.text in ("|", ":", "\\|"))
    if len(separators) != 1:
        return None
    head = parts[0].tokens
    plain = len(head) == 1 or (len(head) == 3 and (head[1].text, head[2].text) == ("in", "R"))
    value = _value(parts[1], depth + 1) if plain else None
    return value if isinstance(value, Region) and value.name == head[0].text else None


def _ratio(text: _Text, depth: int) -> Value | None:
    parts, separators = text.split(lambda t: t.kind == "op" and t.text == ":")
    if not 1 <= len(separators) <= 4:
        return None
    values = [_value(part, depth + 1) for part in parts]
    return Group(tuple(values), "::") if all(isinstance(v, Quantity) for v in values) else None


def _quantity(text: _Text) -> Quantity | None:
    tokens = list(text.tokens)
    source = text.text
    unit = ""
    sign = tokens[:1] if tokens[0].text in ("-", "+") else []
    rest = tokens[len(sign) :]
    if rest and (
        rest[0].text in ("dollar", "€", "£", "¥") or (rest[0].text in ("USD", "EUR", "Rs", "US") and len(rest) > 1)
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
    if token.kind == "text" or token.text in ("degree", "%", "\\%"):
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
