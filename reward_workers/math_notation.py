"""Mathematical notation as people and models write it, in one spelling and as tokens.

Contract. Pure, and linear in the text, which is at most MAX_CHARACTERS long. Only what carries no meaning is dropped:
fonts, spacing, delimiters of formulas.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from dataclasses import dataclass

MAX_CHARACTERS = 10_000  # of one answer


def word_set(text: str) -> frozenset[str]:
    """The words of a text."""
    return frozenset(text.split())


FAMILIES = {  # named operations: an answer in one that the right answer does not need is a question restated
    "trigonometry": "sin cos tan cot sec csc arcsin arccos arctan arccot sinh cosh tanh coth asin acos atan",
    "logarithm": "ln log lg",
    "counting": "binom factorial",
    "order": "max min gcd lcm floor ceil mod",
    "analysis": "int iint oint sum prod lim det limit integral",
}
FAMILY = {name: family for family, names in FAMILIES.items() for name in names.split()}
FUNCTIONS = (word_set("abs exp sqrt") | FAMILY.keys()) - word_set("binom factorial mod " + FAMILIES["analysis"])
GREEK = word_set(
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi "
    "rho varrho sigma tau upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Sigma Upsilon "
    "Phi Psi Omega ell"
)
CONSTANTS = {"pi": "pi", "infty": "oo", "infinity": "oo", "inf": "oo"}

_GREEK_LETTERS = "αβγδεζηθικλμνξρστυφχψωΓΔΘΛΞΣΥΦΨΩ"
_GREEK_NAMES = re.findall(
    r"\w+",
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau upsilon phi chi psi omega "
    "Gamma Delta Theta Lambda Xi Sigma Upsilon Phi Psi Omega",
)
_CHARACTERS = str.maketrans(
    {
        **dict.fromkeys("−–—‒‐‑﹣-﹘", "-"),
        **dict.fromkeys("×·⋅∙∗✕", "*"),
        **{
            "÷": "/",
            "∕": "/",
            "⁄": "/",
            "：": ":",
            "∶": ":",
            "≤": r"\leq ",
            "≥": r"\geq ",
            "≦": r"\leq ",
            "≧": r"\geq ",
        },
        **{
            "⩽": r"\leq ",
            "⩾": r"\geq ",
            "≠": r"\neq ",
            "≡": r"\equiv ",
            "≈": r"\approx ",
            "∞": r"\infty ",
            "π": r"\pi ",
            "√": r"\sqrt ",
            "∛": r"\sqrt[3] ",
            "∜": r"\sqrt[4] ",
            "∴": " ",
            "∖": r"\setminus ",
        },
        **{letter: f"\\{name} " for letter, name in zip(_GREEK_LETTERS, _GREEK_NAMES, strict=True)},
        **{"∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ", "ℝ": r"\R ", "ℤ": r"\Z ", "±": r"\pm "},
        **{
            "∀": r"\forall ",
            "∃": r"\exists ",
            "…": r"\ldots ",
            "⋯": r"\ldots ",
            "→": r"\to ",
            "∫": r"\int ",
            "∑": r"\sum ",
        },
        **{"°": r"\degree ", "º": r"\degree ", "℃": r"\degree C", "％": r"\%", "′": "'", "’": "'", "“": '"', "”": '"'},
        **dict.fromkeys("\u00a0\u2002\u2003\u2004\u2005\u2007\u2009\u202f\u3000\t", " "),
        **dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff\u2061\u2062\u2063\u200e\u200f", ""),
        "\u200a": " ",
        "\u2008": " ",
    }
)
_RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿⁱ⁽⁾ˣʸᵏᵐᵗ", "0123456789+-ni()xykmt")
_LOWERED = str.maketrans("₀₁₂₃₄₅₆₇₈₉₊₋ₙᵢⱼₖₘ", "0123456789+-nijkm")
_VULGAR = re.compile("[¼-¾⅐-⅞]")
_ROOT = re.compile(r"([√∛∜])\s*(\d+(?:\.\d+)?)")  # of a whole number; after a command LaTeX takes one digit
_SPACES = re.compile(
    r"\\[,;:!> ]|\\(?:quad|qquad|thinspace|medspace|enspace|hfill|displaystyle|textstyle|limits|nolimits|nobreak|left|right"
    r"|[bB]igg?[lrm]?|middle|mathstrut|boxed|fbox|bf|rm|it|strut|tiny|small|normalsize|large|Large|LARGE|huge|Huge|vec|overrightarrow|underline|ensuremath|therefore|newline)(?![A-Za-z])|~"
)
_NO_BRACKET = re.compile(r"\\(?:left|right) ?\.")
_COLOURS = re.compile(
    r"\\(?:(?:text)?color(?:box)?|fcolorbox ?\{\w+\}) ?\{\w+\}|\\[hv]?phantom ?\{[^{}]*\}|\\[hv]space\*? ?\{[^{}]*\}"
)
_SYSTEM = re.compile(  # a brace on the left of equations
    r"\\left ?\\[{] ?\\begin\{(array|aligned|gathered|matrix)\}(?: ?\{[lcr| ]*\})?(.*?)\\end\{\1\} ?\\right ?\."
)
_VECTOR = re.compile(r"\\(?:vec|overrightarrow) ?\{ ?([A-Z]) ?([A-Z]) ?\}")  # from point to point: the order counts
_UNIT_VECTOR = re.compile(
    r"\\hat ?\{ ?(?:\\(?:mathbf|boldsymbol|bm) ?\{ ?([ijk]) ?\}|\\([ij])math|([ijk])) ?\}"
    r"|\\hat ?(?:\\([ij])math|([ijk]))(?![A-Za-z])"
)
_UNIT = r" ?\\text ?\{([^{}]*)\} ?((?:\^ ?\{? ?\d ?\}?)?) ?"
_UNIT_FRACTION = re.compile(rf"\\[dt]?frac ?\{{{_UNIT}\}} ?\{{{_UNIT}\}}")
_MODULUS = re.compile(
    r"\( ?(?:\\text ?\{ ?mod ?\}|\\mod|\\bmod|mod) ?\{?([^(){}]{1,40})\}? ?\)|\\(?:pmod|bmod|mod) ?(?:\{([^{}]{1,40})\}|(\w+))"
)
_OLD_FRACTION = re.compile(r"\{([^{}]*)\\(over|choose)(?![A-Za-z])([^{}]*)\}")
_PERIOD = re.compile(r"((?<=[\d.])(?:\\(?:bar|dot) ?\{?\d+\}?)+)")  # dots over digits
_TIMES_TEN = re.compile(r"(?<=\d) ?[xX] ?(?=10 ?\^)")
_APOSTROPHES = re.compile(r"(?<![\d'])\d{1,3}(?:'\d{3})+(?![\d'])")
_SAME = {
    **dict.fromkeys(("dfrac", "tfrac", "cfrac", "sfrac", "nicefrac"), r"\frac "),
    **dict.fromkeys(("dbinom", "tbinom"), r"\binom "),
    **dict.fromkeys(("cdot", "times", "ast", "bullet"), "*"),
    **dict.fromkeys(("le", "leqslant", "leqq"), r"\leq "),
    **dict.fromkeys(("ge", "geqslant", "geqq"), r"\geq "),
    **dict.fromkeys(("ne", "not="), r"\neq "),
    **dict.fromkeys(("lbrace",), r"\{"),
    **dict.fromkeys(("rbrace",), r"\}"),
    **dict.fromkeys(("lbrack",), "["),
    **dict.fromkeys(("rbrack",), "]"),
    **dict.fromkeys(("lparen", "langle"), "("),
    **dict.fromkeys(("rparen", "rangle"), ")"),
    **dict.fromkeys(("lvert", "rvert", "vert", "mid"), "|"),
    **dict.fromkeys(("dots", "cdots", "dotsc", "dotsb", "ldots"), r"\ldots "),
    **dict.fromkeys(("varnothing",), r"\emptyset "),
    **dict.fromkeys(("lt",), "<"),
    **dict.fromkeys(("gt",), ">"),
    **dict.fromkeys(("colon",), ":"),
    **dict.fromkeys(("div",), "/"),
    **dict.fromkeys(("circ",), r"\degree "),
    **dict.fromkeys(("percent",), r"\%"),
    **dict.fromkeys(("vee", "lor"), r"\text{ or }"),
    **dict.fromkeys(("wedge", "land"), r"\text{ and }"),
    **dict.fromkeys(("Re",), r"\Re "),
    **dict.fromkeys(("simeq", "thickapprox"), r"\approx "),
    **dict.fromkeys(("rightarrow", "longrightarrow"), r"\to "),
    **dict.fromkeys(("backslash", "smallsetminus"), r"\setminus "),
    **dict.fromkeys(("intercal", "top"), "T"),
}
_OLD = {"over": "frac", "choose": "binom"}
_COMMAND = re.compile(r"\\([A-Za-z]+) ?")
_FONT = re.compile(
    r"\\(text|textbf|textit|textrm|textsf|texttt|textnormal|mbox|hbox|emph|mathrm|mathbf|mathit|mathsf|mathtt|boldsymbol|bm|operatorname)"
    r"\*? ?\{((?:[\^_] ?\{[^{}\\]*\}|[^{}])*)\}"
)
_COUNTED = re.compile(r"(-?\d[\d,]*(?:\.\d+)?) ((?!(?:or|and|to|of|in|base|x) )[A-Za-z ]+)")  # `5 hours`
_NUMBERS = re.compile(r"[-\d\s.,/]*(?:\b(?:and|or)\b[-\d\s.,/]*)+")  # `5 and 7`
_UNIT_LETTERS = word_set("m g L s h J N W V K C A l t")  # in an upright font
_BLACKBOARD = re.compile(r"\\math(?:bb|bf|cal) ?\{? ?([RZQNC])(?![A-Za-z]) ?\}?")
# Beside a comma only the negative space joins: `100,\; 200` are two numbers.
_JOINED_DIGITS = re.compile(r"(?<=\d)(?:\{,\}|, ?\\!|\\[!,;: ](?: ?\\[!,;: ])*|_(?=\d{3}(?!\d)))[ ]?(?=\d{3}(?!\d))")


class NotMathError(ValueError):
    """The text is not notation that is understood here."""


class TooComplexError(ValueError):
    """The text, or a number that it denotes, is beyond the limits of what is compared."""


@functools.lru_cache(maxsize=1024)
def normalise(text: str) -> str:
    """One spelling for what is the same notation: characters, fonts, delimiters, spacing, synonyms of commands.

    Raises TooComplexError beyond MAX_CHARACTERS.
    """
    if len(text) > MAX_CHARACTERS:
        raise TooComplexError(f"an answer of {len(text)} characters; at most {MAX_CHARACTERS} are compared")
    if not text.isascii():
        text = _ascii(text)
    text = text.replace("\r", " ").replace("\n", " ")
    text = text.replace("{,}", r"\!").replace("...", r"\ldots ")
    text = re.sub(r"(?<![\\A-Za-z^_])\{ ?([-+]) ?\}", r"\1", text)
    text = _TIMES_TEN.sub("*", _APOSTROPHES.sub(lambda match: match[0].replace("'", ""), text))
    if "\\" not in text:
        return re.sub(" +", " ", text.replace("$", " ").replace("~", " ")).strip()
    text = re.sub(r"(?<!\\)\\$", " ", text)
    if "\\begin" not in text:
        text = re.sub(r"\\\\(?=[A-Za-z]{2})", r"\\", text)  # escaped twice: no row can end here
    text = _SYSTEM.sub(r"\\begin{cases}\2\\end{cases}", text)
    text = re.sub(r"\\\\(?:\[[^\]]*\])?", " \\\\cr ", text)  # rows of a matrix
    text = text.replace(r"\$", r"\dollar ").replace("$", " ")
    text = re.sub(r"\\[()\[\]]", " ", text)
    text = _JOINED_DIGITS.sub("", text)
    text = re.sub(r"\^ ?(?:\{ ?\\circ ?\}|\\circ(?![A-Za-z]))|\\degree(?![A-Za-z])", r"\\degree ", text)
    text = re.sub(r"(?<=[\d.])\\overline ?(\d)(?!\d)", r"\\overline{\1}", text)
    text = re.sub(r"\^ ?(?:\{ ?\\prime ?\}|\\prime(?![A-Za-z]))", "'", text)
    text = _COLOURS.sub(" ", text)
    text = _VECTOR.sub(r" v_{\1\2}", _UNIT_VECTOR.sub(lambda match: f" {match[match.lastindex or 0]} ", text))
    text = _SPACES.sub(" ", _NO_BRACKET.sub(" ", text))
    if "\\over" in text and "{" not in text:
        text = f"{{{text}}}"
    text = _OLD_FRACTION.sub(lambda match: rf"\{_OLD[match[2]]} {{{match[1]}}}{{{match[3]}}}", text)
    text = _PERIOD.sub(lambda match: rf"\overline{{{re.sub('[^0-9]', '', match[1])}}}", text)
    text = _BLACKBOARD.sub(r"\\\1 ", text)
    for _ in range(4):  # fonts inside fonts
        changed = _FONT.sub(_plain_font, text)
        if changed == text:
            break
        text = changed
    text = _UNIT_FRACTION.sub(r"\\text {\1} \2 / \\text {\3} \4", text)
    if "\\equiv" in text:
        text = _MODULUS.sub(lambda match: rf"\pmod {(match[1] or match[2] or match[3]).strip()}", text)
    text = _COMMAND.sub(lambda match: _SAME.get(match[1]) or f"\\{match[1]} ", text)
    return re.sub(" +", " ", text).strip()


def _ascii(text: str) -> str:
    text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿⁱ⁽⁾ˣʸᵏᵐᵗ]+", lambda match: "^{" + match[0].translate(_RAISED) + "}", text)
    text = re.sub("[₀₁₂₃₄₅₆₇₈₉₊₋ₙᵢⱼₖₘ]+", lambda match: "_{" + match[0].translate(_LOWERED) + "}", text)
    text = _VULGAR.sub(_vulgar, text)
    text = _ROOT.sub(r"\1{\2}", text)
    text = text.translate(_CHARACTERS)
    text = "".join(str(unicodedata.decimal(c)) if c.isdecimal() else c for c in text)
    return unicodedata.normalize("NFKC", text).translate(_CHARACTERS)


def _vulgar(match: re.Match[str]) -> str:
    top, _, bottom = unicodedata.normalize("NFKC", match[0]).partition("⁄")
    return f"\\frac{{{top}}}{{{bottom}}}"


def _plain_font(match: re.Match[str]) -> str:
    """A single letter is that symbol and a function's name that function, whatever the font; words stay words."""
    font, inside = match[1], match[2]
    bare = inside.strip()
    if not re.search("[A-Za-z]", bare):
        return f" {bare} "
    if font == "operatorname" or (not font.startswith("text") and bare in FUNCTIONS):
        return f"\\{bare} " if bare.isalpha() else f" {bare} "
    is_symbol = font.startswith("math") or font in ("boldsymbol", "bm")
    if is_symbol and not re.search("[A-Za-z]{2}", bare) and bare not in _UNIT_LETTERS:
        return f" {bare} "
    if _NUMBERS.fullmatch(bare):
        return f" {bare} "
    if re.fullmatch(r"(?:US ?)?\\dollar", bare):
        return " \\dollar "
    counted = _COUNTED.fullmatch(bare)
    if counted:
        return f" {counted[1]} \\text {{{counted[2]}}}"
    return "\\text {" + re.sub(r"[\\{}]", " ", inside) + "}"


@dataclass(frozen=True, slots=True)
class Token:
    """`kind`: num | word | cmd | text | op. `space`: there was white space before it."""

    kind: str
    text: str
    space: bool = False
    start: int = 0
    end: int = 0


# `2e-1` is 2 e - 1: a negative exponent of ten has a mantissa with a point, a capital E, or is not as small as that.
_NO_EXPONENT = re.compile(r"(?<![\d.])(\d+)(e-[0-3](?!\d))")
_TOKEN = re.compile(
    r"(?P<space> *)(?:"
    r"(?P<num>\d+(?:\.\d+)?(?:[eE][-+]?\d{1,3}(?![\d.]))?|\.\d+)"
    r"|\\text ?\{(?P<text>[^{}]*)\}|\\(?P<cmd>[A-Za-z]+)|(?P<esc>\\[{}%|&])"
    r"|(?P<word>[A-Za-z]+)|(?P<op>\*\*|!=|<=|>=|==|[^\sA-Za-z\d]))"
)


def tokens_of(text: str) -> list[Token]:
    """The tokens of a normalised text. Raises NotMathError for what is none (a lone backslash)."""
    found: list[Token] = []
    text = _NO_EXPONENT.sub(r"\1 \2", text)
    position, size = 0, len(text)
    while position < size:
        match = _TOKEN.match(text, position)
        if match is None:
            if not text[position:].strip():
                break
            raise NotMathError(f"can't read {text[position : position + 20]!r}")
        kind = str(match.lastgroup)
        value, start = match[kind], match.start(kind)
        if kind == "esc":
            kind = "op"
        elif kind == "op" and value == "\\":
            raise NotMathError("a lone backslash")
        found.append(Token(kind, value, bool(match["space"]), start, match.end()))
        position = match.end()
    return found
