"""Reading matrices, columns, and systems of equations in braces.

Contract. Pure. Rows of different lengths are no matrix.
"""

from __future__ import annotations

from reward_workers.math_algebra import evaluate
from reward_workers.math_notation import NotMathError, Token, TooComplexError, word_set
from reward_workers.math_part import MAX_ITEMS, RELATIONS, Part, Read, number_node
from reward_workers.math_syntax import Node, parse
from reward_workers.math_values import Assignment, Group, Matrix, Quantity, Relation, Value

_ENVIRONMENTS = word_set("matrix pmatrix bmatrix Bmatrix smallmatrix array")
_SYSTEMS = word_set("cases aligned align gathered")


def matrix(text: Part, depth: int, read: Read) -> Value | None:
    """A matrix, perhaps after a factor; the lines of a system of equations are a list."""
    tokens = text.tokens
    start = next((i for i, t in enumerate(tokens) if (t.kind, t.text) == ("cmd", "begin")), None)
    if start is None or len(tokens) < start + 8 or tokens[-4].text != "end":
        return None
    environment = tokens[start + 2].text
    if environment not in _ENVIRONMENTS | _SYSTEMS or environment != tokens[-2].text:
        return None
    body = text[start + 4 : len(text) - 4]
    if any(t.kind == "cmd" and t.text in ("begin", "end") for t in body.tokens):
        return None
    if environment in _SYSTEMS:
        return _system(body, depth, read) if not start else None
    if environment == "array" and body.tokens and body.tokens[0].text == "{":
        while body.tokens and body.tokens[0].text != "}":
            body = body[1 : len(body)]
        body = body[1 : len(body)]
    rows = []
    for row in body.split(lambda t: t.kind == "cmd" and t.text == "cr")[0]:
        if row.tokens and not (len(row) == 1 and row.tokens[0].text == "hline"):
            cells = row.split(lambda t: t.kind == "op" and t.text == "&")[0]
            rows.append(tuple(read(cell, depth + 1) for cell in cells))
    if sum(map(len, rows)) > MAX_ITEMS:
        raise TooComplexError(f"a matrix of more than {MAX_ITEMS} entries")
    if not rows or len({len(row) for row in rows}) > 1:
        return None
    return _scaled(text[:start], rows) if start else Matrix(tuple(rows))


def _system(body: Part, depth: int, read: Read) -> Value | None:
    """The lines of `cases` or `aligned` as a list; of a function that differs from case to case nothing."""
    lines = [line for line in body.split(lambda t: t.kind == "cmd" and t.text == "cr")[0] if line.tokens]
    values: list[Value] = []
    for line in lines:
        tokens = [t for i, t in enumerate(line.tokens) if t.text != "&" or line.tokens[i + 1 : i + 2] == ()]
        aligned = all(line.tokens[i + 1].text in RELATIONS for i, t in enumerate(line.tokens[:-1]) if t.text == "&")
        if not aligned:
            return None
        if tokens and tokens[-1].text in (",", ";", "."):
            tokens = tokens[:-1]
        value = read(Part(line.source, tuple(tokens)), depth + 1)
        if not isinstance(value, Assignment | Relation):
            return None
        values.append(value)
    return Group(tuple(values)) if len(values) > 1 else None


def _scaled(factor: Part, rows: list[tuple[Value, ...]]) -> Value | None:
    """A matrix times a number."""
    tokens = [t for i, t in enumerate(factor.tokens) if t.text != "*" or i < len(factor.tokens) - 1]
    if len(tokens) == 1 and tokens[0].text in ("-", "+"):
        tokens.append(Token("num", "1"))
    try:
        node = parse(tokens)
        scaled = []
        for row in rows:
            cells = [Node("mul", "", (node, cell.node)) for cell in row if isinstance(cell, Quantity)]
            if len(cells) < len(row):
                return None
            numbers = [evaluate(cell).rational for cell in cells]
            nodes = [cell if n is None else number_node(n) for cell, n in zip(cells, numbers, strict=True)]
            scaled.append(tuple(Quantity(cell, "") for cell in nodes))
    except NotMathError:
        return None
    return Matrix(tuple(scaled))


def transposed(text: Part, depth: int, read: Read) -> Value | None:
    """`(1, 2)^T`, and a matrix with that exponent."""
    tail = [t.text for t in text.tokens[-4:]]
    size = 2 if tail[-2:] == ["^", "T"] else 4 if tail == ["^", "{", "T", "}"] else 0
    if not size or len(text) <= size:
        return None
    value = read(text[: len(text) - size], depth + 1)
    if isinstance(value, Matrix):
        return Matrix(tuple(zip(*value.rows, strict=True)))
    if isinstance(value, Group) and value.brackets in ("()", "[]"):
        return Matrix(tuple((item,) for item in value.items))
    return None
