"""Syntax trees of expressions.

Contract. Pure and bounded: what is deeper or of more parts than the limits here raises TooComplexError. Nothing is evaluated.
What is not wholly understood raises NotMathError: no part of a text is dropped to make the rest readable.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from reward_workers.math_notation import (
    CONSTANTS,
    FUNCTIONS,
    GREEK,
    NotMathError,
    Token,
    TooComplexError,
    word_set,
)

MAX_DEPTH = 60  # nesting of brackets, fractions, exponents
MAX_FACTORS = 100  # in one product
MAX_NODES = 4_000
MAX_HEIGHT = 150  # of a tree: others walk it recursively
MAX_DIGITS = 4_000  # of one number


@dataclass(frozen=True, slots=True)
class Node:
    """A syntax tree. `kind`: num (value) | sym (name) | const (name: pi e i oo) | add | mul | div | pow | neg |
    fn (name) | mixed. `value` is a Fraction for num, a name for the others that have one.
    """

    kind: str
    value: Fraction | str = ""
    args: tuple[Node, ...] = ()


OPEN = {"(": ")", "[": "]", "{": "}", "\\{": "\\}"}
_ROUNDED = {"lfloor": "floor", "lceil": "ceil"}
_OF_SETS = word_set("max min gcd lcm")
_INVERTED = word_set("sin cos tan cot")  # of which ^{-1} is the inverse
# Words of three letters and more are text, not products of symbols, unless they are in order, as in `abc` and `xyz`.
_PRODUCT = re.compile(r"[A-Za-z]{1,2}|abc|abcd|xyz|bcd|rst|pqr|mnp|abx|aby|acx|bcx")
_NOT_PRODUCTS = word_set("no or of on if is it in at an am as by to we do be he me my so up us go and not yes")


def parse(tokens: list[Token]) -> Node:
    """The tree of one expression, the whole of the tokens. Raises NotMathError or TooComplexError."""
    parser = _Parser(tokens)
    node = parser.sum(0)
    if parser.at < len(tokens):
        raise NotMathError(f"can't read {tokens[parser.at].text!r}")
    level, height = [node], 0
    while level:
        height += 1
        if height > MAX_HEIGHT:
            raise TooComplexError(f"an expression of more than {MAX_HEIGHT} levels")
        level = [arg for one in level for arg in one.args]
    return node


class _Parser:
    def __init__(self, tokens: list[Token]) -> None:
        self.tokens = tokens
        self.at = 0
        self.nodes = 0
        self.letters: list[str] = []  # what is left of a word that is read letter by letter
        self.bars = 0  # absolute values that are open

    def peek(self) -> Token | None:
        return self.tokens[self.at] if self.at < len(self.tokens) else None

    def is_op(self, *texts: str) -> bool:
        token = self.peek()
        return not self.letters and token is not None and token.kind == "op" and token.text in texts

    def is_cmd(self, name: str) -> bool:
        token = self.peek()
        return token is not None and token.kind == "cmd" and token.text == name

    def expect(self, text: str) -> None:
        if not self.is_op(text):
            found = self.peek()
            raise NotMathError(f"expected {text!r}, found {found.text if found else 'the end'!r}")
        self.at += 1

    def node(self, kind: str, value: Fraction | str = "", *args: Node) -> Node:
        self.nodes += 1
        if self.nodes > MAX_NODES:
            raise TooComplexError(f"an expression of more than {MAX_NODES} parts")
        return Node(kind, value, args)

    def sum(self, depth: int) -> Node:
        if depth > MAX_DEPTH:
            raise TooComplexError(f"an expression nested deeper than {MAX_DEPTH}")
        terms = [self.product(depth)]
        while self.is_op("+", "-"):
            minus = self.tokens[self.at].text == "-"
            self.at += 1
            term = self.product(depth)
            terms.append(self.node("neg", "", term) if minus else term)
        return terms[0] if len(terms) == 1 else self.node("add", "", *terms)

    def product(self, depth: int) -> Node:
        signs = 0
        while self.is_op("+", "-"):
            signs += self.tokens[self.at].text == "-"
            self.at += 1
        left = self.power(depth)
        for _ in range(MAX_FACTORS):
            if self.is_op("*"):
                self.at += 1
                left = self.node("mul", "", left, self.signed(depth))
            elif self.is_op("/"):
                self.at += 1
                left = self.node("div", "", left, self.signed(depth))
            elif self.starts_factor():
                right = self.power(depth)
                left = self.juxtaposed(left, right)
            else:
                break
        else:
            raise TooComplexError(f"a product of more than {MAX_FACTORS} factors")
        return self.node("neg", "", left) if signs % 2 else left

    def signed(self, depth: int) -> Node:
        if self.is_op("-"):
            self.at += 1
            return self.node("neg", "", self.power(depth))
        if self.is_op("+"):
            self.at += 1
        return self.power(depth)

    def juxtaposed(self, left: Node, right: Node) -> Node:
        """A product, or `3 1/2` and `3\\frac{1}{2}` as people write mixed numbers."""
        if left.kind == "num" and right.kind == "num":
            raise NotMathError("two numbers side by side")
        whole = left.kind == "num" and isinstance(left.value, Fraction) and left.value.denominator == 1
        if whole and right.kind == "div" and all(n.kind == "num" for n in right.args):
            top, bottom = (n.value for n in right.args)
            if isinstance(top, Fraction) and isinstance(bottom, Fraction) and 0 < top < bottom:
                return self.node("mixed", "", left, right)
            raise NotMathError("a number beside a fraction")
        return self.node("mul", "", left, right)

    def starts_factor(self) -> bool:
        if self.letters:
            return True
        token = self.peek()
        if token is None:
            return False
        if token.kind == "cmd":
            return token.text not in (
                "cr",
                "degree",
                "to",
                "leq",
                "geq",
                "neq",
                "in",
                "cup",
                "cap",
                "pm",
                "mp",
                "approx",
                "setminus",
                "rfloor",
                "rceil",
            )
        opening = ("(", "[", "{") if self.bars else ("(", "[", "{", "|")
        return token.kind in ("num", "word") or (token.kind == "op" and token.text in opening)

    def power(self, depth: int) -> Node:
        base = self.factor(depth)
        for _ in range(MAX_DEPTH):
            if self.is_op("!"):
                self.at += 1
                base = self.node("fn", "factorial", base)
            elif self.is_op("^", "**") and not self.letters:
                self.at += 1
                base = self.node("pow", "", base, self.exponent(depth + 1))
            elif self.is_cmd("degree") and not self.letters:
                self.at += 1
                ratio = self.node("div", "", self.node("const", "pi"), self.node("num", Fraction(180)))
                base = self.node("mul", "", base, ratio)
            elif self.is_op("'") and base.kind == "sym":
                self.at += 1
                base = self.node("sym", f"{base.value}'")
            else:
                return base
        raise TooComplexError(f"more than {MAX_DEPTH} exponents or factorials in a row")

    def exponent(self, depth: int) -> Node:
        if self.is_op("{"):
            return self.group(depth)
        token = self.peek()
        if self.tokens[self.at - 1].text == "^" and token is not None and token.kind == "num" and len(token.text) > 1:
            python = self.at >= 2 and all(t.kind != "cmd" for t in self.tokens)
            if not python:  # in LaTeX x^23 is x squared times three; nobody means it
                self.at += 1
                return self.number(token.text)
        minus = self.is_op("-")
        if minus or self.is_op("+"):
            self.at += 1
        base = self.factor(depth)
        if self.is_op("^", "**"):
            self.at += 1
            base = self.node("pow", "", base, self.exponent(depth + 1))
        return self.node("neg", "", base) if minus else base

    def group(self, depth: int) -> Node:
        opening = self.tokens[self.at].text
        self.at += 1
        inner = self.sum(depth + 1)
        if self.letters:
            raise NotMathError("an unfinished word")
        self.expect(OPEN[opening])
        return inner

    def argument(self, depth: int) -> Node:
        """What a command takes: a group, or one digit or letter."""
        if self.is_op("{"):
            return self.group(depth)
        token = self.peek()
        if token is None:
            raise NotMathError("a command without its argument")
        if token.kind == "num" and len(token.text) > 1 and token.text.isdigit():
            self.tokens[self.at : self.at + 1] = [Token("num", digit) for digit in token.text]
        if token.kind == "word" and len(token.text) > 1:
            self.tokens[self.at : self.at + 1] = [Token("word", letter) for letter in token.text]
        return self.factor(depth + 1)

    def number(self, digits: str) -> Node:
        if len(digits) > MAX_DIGITS:
            raise TooComplexError(f"a number of {len(digits)} digits")
        return self.node("num", Fraction(digits))

    def factor(self, depth: int) -> Node:
        if depth > MAX_DEPTH:
            raise TooComplexError(f"an expression nested deeper than {MAX_DEPTH}")
        if self.letters:
            return self.symbol(self.letters.pop(0))
        token = self.peek()
        if token is None:
            raise NotMathError("an expression that ends too early")
        self.at += 1
        if token.kind == "num":
            return self.repeating(token.text)
        if token.kind == "op":
            if token.text in ("(", "[", "{"):
                self.at -= 1
                return self.group(depth)
            if token.text == "|":
                self.bars += 1
                inner = self.sum(depth + 1)
                self.expect("|")
                self.bars -= 1
                return self.node("fn", "abs", inner)
            raise NotMathError(f"can't read {token.text!r}")
        if token.kind == "word":
            return self.word(token.text, depth)
        if token.kind == "cmd":
            return self.command(token.text, depth)
        raise NotMathError(f"the words {token.text!r}")

    def repeating(self, digits: str) -> Node:
        """A number; `0.1\\overline{6}` is a repeating decimal."""
        node = self.number(digits)
        if "." not in digits and not (self.is_op(".") and digits.isdigit()):
            return node
        if self.is_op("."):
            self.at += 1
            digits += "."
        if not self.is_cmd("overline"):
            return node
        self.at += 1
        self.expect("{")
        period = self.peek()
        if period is None or not period.text.isdigit():
            raise NotMathError("a repeating decimal without its digits")
        self.at += 1
        self.expect("}")
        places = len(digits.partition(".")[2])
        if max(len(period.text), places) > 200:
            raise TooComplexError("a repeating decimal of more than 200 places")
        tail = Fraction(int(period.text), (10 ** len(period.text) - 1) * 10**places)
        return self.node("num", Fraction(digits.rstrip(".")) + tail)

    def word(self, text: str, depth: int) -> Node:
        if text in FUNCTIONS or text in CONSTANTS or text in GREEK:
            return self.command(text, depth)
        if not _PRODUCT.fullmatch(text) or (text.lower() in _NOT_PRODUCTS and not self.is_op("^")):
            raise NotMathError(f"the word {text!r}")
        if len(text) == 1 and text in "fghFGPpQq":
            ahead = self.at
            while ahead < len(self.tokens) and self.tokens[ahead].text == "'":
                ahead += 1
            if ahead < len(self.tokens) and self.tokens[ahead].text == "(":
                text += "'" * (ahead - self.at)
                self.at = ahead
                return self.applied(text, depth)
        self.letters = list(text[1:])
        return self.symbol(text[0])

    def applied(self, name: str, depth: int) -> Node:
        arguments: list[Node] = []
        while not arguments or self.is_op(","):
            self.at += 1
            arguments.append(self.sum(depth + 1))
        self.expect(")")
        return self.node("fn", f"{name}()", *arguments)

    def symbol(self, name: str) -> Node:
        if self.letters:
            return self.node("sym", name)
        if self.is_op("_"):
            self.at += 1
            name += "_" + self.subscript()
        elif name in ("e", "i"):
            return self.node("const", name)
        return self.node("sym", name)

    def subscript(self) -> str:
        token = self.peek()
        if token is None:
            raise NotMathError("a subscript that is missing")
        self.at += 1
        if token.text != "{":
            return token.text
        parts: list[str] = []
        while not self.is_op("}"):
            inner = self.peek()
            if inner is None or inner.text in OPEN:
                raise NotMathError("a subscript that does not end")
            parts.append(inner.text)
            self.at += 1
        self.at += 1
        return "".join(parts)

    def command(self, name: str, depth: int) -> Node:
        if name == "frac":
            top = self.argument(depth)
            bottom = self.argument(depth)
            return self.node("div", "", top, bottom)
        if name == "binom":
            return self.node("fn", "binom", self.argument(depth), self.argument(depth))
        if name == "sqrt":
            return self.root(depth)
        if name in CONSTANTS:
            return self.node("const", CONSTANTS[name])
        if name in _ROUNDED:
            inner = self.sum(depth + 1)
            if self.letters or not self.is_cmd(f"r{name[1:]}"):
                raise NotMathError(f"\\{name} without its end")
            self.at += 1
            return self.node("fn", _ROUNDED[name], inner)
        if name in FUNCTIONS:
            return self.function(name, depth)
        if name in GREEK:
            return self.symbol(name)
        raise NotMathError(f"the command \\{name}")

    def root(self, depth: int) -> Node:
        degree = self.node("num", Fraction(2))
        if self.is_op("["):
            degree = self.group(depth)
        radicand = self.factor(depth) if self.is_op("(") else self.argument(depth)
        return self.node("pow", "", radicand, self.node("div", "", self.node("num", Fraction(1)), degree))

    def function(self, name: str, depth: int) -> Node:
        exponent: Node | None = None
        base: Node | None = None
        while self.is_op("^", "_"):
            raised = self.is_op("^")
            self.at += 1
            if raised:
                exponent = self.exponent(depth + 1)
            else:
                base = self.argument(depth)
        if self.is_op("(") or (name in _OF_SETS and self.is_op("\\{")):
            closing = OPEN[self.tokens[self.at].text]
            self.at += 1
            arguments = [self.sum(depth + 1)]
            while self.is_op(","):
                self.at += 1
                arguments.append(self.sum(depth + 1))
            self.expect(closing)
        else:
            arguments = [self.bare_argument(depth + 1)]
        if base is not None:
            arguments.append(base)
        if exponent is not None and exponent.kind == "neg":
            if name not in _INVERTED or exponent.args[0] != Node("num", Fraction(1)):
                raise NotMathError("an inverse function or a reciprocal")
            name, exponent = f"arc{name}", None
        applied = self.node("fn", {"asin": "arcsin", "acos": "arccos", "atan": "arctan"}.get(name, name), *arguments)
        return applied if exponent is None else self.node("pow", "", applied, exponent)

    def bare_argument(self, depth: int) -> Node:
        """`\\sin 2x` takes factors up to the next function."""
        left = self.signed(depth)
        for _ in range(MAX_FACTORS):
            if not self.starts_factor():
                break
            token = self.peek()
            if not self.letters and token is not None and (token.text in FUNCTIONS or token.text in "(["):
                break
            left = self.node("mul", "", left, self.power(depth))
        return left


def walk(node: Node) -> list[Node]:
    """Every node of a tree."""
    found = [node]
    for one in found:
        found.extend(one.args)
    return found
