"""A part of an answer: its normalised text with its tokens, and the words by which parts are told apart.

Contract. Pure. Parts are cut at separators outside of all brackets only.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from reward_workers.math_notation import GREEK, Token, word_set
from reward_workers.math_syntax import OPEN, Node, parse
from reward_workers.math_values import Value

MAX_ITEMS = 1_000  # of a list, a set or a matrix
MAX_NESTING = 12  # of lists in lists
RELATIONS = {"=": "=", "==": "=", "<": "<", ">": ">", "<=": "leq", ">=": "geq", "!=": "neq"}
RELATION_COMMANDS = {"leq": "leq", "geq": "geq", "neq": "neq", "in": "in", "approx": "="}
NOTATION = (
    word_set(
        "frac sqrt int iint oint sum prod lim to log ln lg sin cos tan cot sec csc arcsin arccos arctan "
        "sinh cosh tanh binom exp infty pi left right cr begin end det max min gcd lcm overline lfloor "
        "rfloor lceil rceil bmod"
    )
    | GREEK
)


@dataclass(frozen=True)
class Part:
    """A part of a normalised text, with its tokens."""

    source: str
    tokens: tuple[Token, ...]

    def __getitem__(self, part: slice) -> Part:
        return Part(self.source, self.tokens[part])

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

    def split(self, is_separator: Callable[[Token], bool]) -> tuple[list[Part], list[Token]]:
        """The parts between the separators that are outside of all brackets, and the separators."""
        parts: list[Part] = []
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


def words_of(text: str) -> str:
    """Text as it is compared: lower case for words, no fonts, no spaces in notation, no article, no punctuation at its ends."""
    plain = re.sub(r"\\text ?\{([^{}]*)\}", r" \1 ", text)
    plain = re.sub(r"(?<!\\)\{ ?([\w+*-]) ?\}", r" \1 ", plain)
    plain = re.sub(r"\\([{}%])", r"\1", plain)
    plain = re.sub(r"^\.+(?!\d)", "", re.sub(r"\s+", " ", plain).strip(" ,;:!?\"'`*")).rstrip(" .,;:!?\"'`*")
    if not re.search(r"[A-Za-z]{2}", plain):
        return plain.replace(" ", "")
    plain = re.sub(r" ?([^\w\s]) ?", r"\1", plain)
    return re.sub(r"^(the|a|an) ", "", plain.casefold() if not re.search(r"[\\^_=<>{]", plain) else plain)


def is_word(token: Token, *words: str) -> bool:
    return token.kind in ("word", "text") and token.text.strip().lower() in words


def is_relation(token: Token) -> bool:
    known = RELATIONS if token.kind == "op" else RELATION_COMMANDS if token.kind == "cmd" else ()
    return token.text in known


def number_node(value: Fraction) -> Node:
    if value.denominator == 1:
        return Node("num", value)
    top, bottom = Fraction(abs(value.numerator)), Fraction(value.denominator)
    fraction = Node("div", "", (Node("num", top), Node("num", bottom)))
    return Node("neg", "", (fraction,)) if value < 0 else fraction


Read = Callable[[Part, int], Value]  # reads a part, at a depth of nesting
