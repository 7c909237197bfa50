"""Grading of answers to mathematical questions.

Contract.
- The final answer is found first, without looking at the right one (`reward_workers.math_answers`). Then both are read
  and compared exactly (`math_reading`, `math_matching`); what exact arithmetic leaves open is decided by math-verify in
  a process of its own (`math_symbolic`).
- `value` is 1 or 0. It is None when the right answer can't be read (`unparseable_answer`) and when the verifier
  broke or ran out of time (`errored`, `timed_out`): a fault that is not the policy's is not a zero. An answer beyond the limits
  of what is compared, a number of a million digits for example, is the policy's own doing and scores 0.
- `detail["answer"]` is the final answer, or None; plain rational numbers are written one way, so that they can be
  counted as votes. `detail["source"]` says where it was found, or why there is none.
- Time and memory are bounded for any completion. Nothing of it is ever executed.

As a reward of a run: `reward.functions.NAME.path=reward_workers.math.grade_math`, with a data column `answer`. Options are set
for all rows with `reward.functions.NAME.options`, or for a row by a column of the option's name.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any

from reward_workers.function import gold_written_by
from reward_workers.math_answers import Answer, choice_in, find_answer
from reward_workers.math_families import in_form_of
from reward_workers.math_forms import is_reduced, vote
from reward_workers.math_matching import Matcher, Policy
from reward_workers.math_notation import MAX_CHARACTERS, TooComplexError, normalise
from reward_workers.math_reading import read
from reward_workers.math_symbolic import SymbolicError, verifier
from reward_workers.math_syntax import Node, walk
from reward_workers.math_values import Quantity, Relation, Value, Words, symbols_of
from rollout_workers.trajectory import RewardResult, Status

LETTERS = "ABCDEFGHIJ"
MAX_SHOWN = 500  # characters of an answer in `detail`

_GOLD_CHOICE = re.compile(r"\(?([A-Z])\)?(?:\s*\(options? [A-Z]\s*[-–,]\s*([A-Z])\)|[.:)]? .*)?", re.DOTALL)
_LONE = re.compile(r"[\s(\[{\\]*(?:(?:option|choice)\s+\(?)?([A-Za-z])[\s)\]}\\.:]*", re.IGNORECASE)
_LEADING = re.compile(
    r"\s*(?:\(([A-Z])\)|([A-Z])(?=\s*[.:)](?:\s|$)|\s*[-–—]\s|\s+(?:and|is(?!\s+(?:incorrect|not|wrong|false|never|no)\b)|with|for|if|because|since)\b|,))"
)
_SEVERAL = re.compile(r"\s*\(?[A-Za-z]\)?(?:\s*(?:,|;|&|/|\band\b|\bor\b|,\s*(?:and|or)\b|\s)\s*\(?[A-Za-z]\)?)+\s*\.?")
_PREFIX = re.compile(
    r"\s*(\\text\s*\{\s*)?(?:(?:the )?(?:final |correct )?(?:answer(?: is)?|ans|solution|result|output)\s*[:=]"
    r"|(?:the )?(?:final )?answer is|(?-i:A):(?=\s)|答案\s*[是为]?\s*[:：]?|#{2,6}(?=\s))\s*(\}\s*)?",
    re.IGNORECASE,
)


_TEN_TO = re.compile(r"(?<=\d)e(?=-\d)")


def write_boxed(answer: str | int | float, opened_thinking: bool | None = None) -> str:
    """The right answer in a box. One that can't be read is boxed as it stands, so that judging it says what is wrong."""
    text, problem = _gold_text(answer)
    thought = "The answer is found.\n</think>\n" if opened_thinking else ""
    return f"{thought}\\boxed{{{answer if problem else text}}}"


@gold_written_by(write_boxed)
def grade_math(
    completion: str,
    answer: str | int | float,
    *,
    prompt: str | Sequence[Mapping[str, Any]] = "",
    choices: Sequence[str] | None = None,
    choice_text: bool | None = None,
    percent: str | None = None,
    units: str | None = None,
    tolerance: float | None = None,
    relative_tolerance: float | None = None,
    decimal_comma: bool | None = None,
    any_base: bool | None = None,
    intervals_as_inequalities: bool | None = None,
    allow_unevaluated: bool | None = None,
    free_constants: Sequence[str] | None = None,
    require_mark: bool | None = None,
    opened_thinking: bool | None = None,
    symbolic: bool | None = None,
    timeout_s: float | None = None,
    memory_mb: int | None = None,
) -> RewardResult:
    r"""1 if the completion's final answer is the right one, else 0.

    `answer` is the right answer as text or a number; of a worked solution its box, its answer tag or what follows
    `####`. Notation is of no account: `m + n = 7` and `seven` state 7, `3 million` 3,000,000 (never 3), `6:8` is
    `3:4`, `[1, 2] \cup [2, 3]` is `1 \leq x \leq 3`, and of a right answer `\frac{\pi}{2} + n\pi, n \in \mathbb{Z}`
    `k\pi - \frac{\pi}{2}` is the same family.
    An option that is None has its default:

    - prompt: the question; what merely restates it is no answer.
    - choices: the options' texts of a multiple-choice question, A first, whose answer is a letter; choice_text (False): the
      text of one option stands for its letter.
    - percent ("number"): 28% is the same as 28; "fraction": as 0.28; "either".
    - units ("lenient"): another unit than the right answer's is wrong, none is accepted; "require": it must be there;
      "ignore".
    - tolerance (0), relative_tolerance (0): how far a number may be off.
    - decimal_comma (False): 1.234,5 instead of 1,234.5, in both texts.
    - any_base (False): a number counts by value, whatever base it is written in.
    - intervals_as_inequalities (True): 1 < x < 2 is the same as (1, 2).
    - allow_unevaluated (False): 3 + 4 counts as 7.
    - free_constants (none): symbols that may be named otherwise.
    - require_mark (False): only a box, an answer tag, `####` or «the answer is» count.
    - opened_thinking (False): the completion begins inside a thinking block that the prompt opened.
    - symbolic (True): ask math-verify where exact arithmetic can't tell; otherwise such answers count as wrong.
    - timeout_s (5), memory_mb (2048): limits of one such question.

    Raises TypeError or ValueError for an option of the wrong type or value.
    """
    policy = Policy(
        percent=_option("percent", percent, "number", ("number", "fraction", "either")),
        units=_option("units", units, "lenient", ("lenient", "require", "ignore")),
        tolerance=_number("tolerance", tolerance, 0.0),
        relative_tolerance=_number("relative_tolerance", relative_tolerance, 0.0),
        any_base=_flag("any_base", any_base, False),
        intervals_as_inequalities=_flag("intervals_as_inequalities", intervals_as_inequalities, True),
        allow_unevaluated=_flag("allow_unevaluated", allow_unevaluated, False),
        free_constants=_texts("free_constants", free_constants),
    )
    options = _texts("choices", choices)
    by_text = _flag("choice_text", choice_text, False)
    comma = _flag("decimal_comma", decimal_comma, False)
    ask = _flag("symbolic", symbolic, True)
    limits = (_number("timeout_s", timeout_s, 5.0), int(_number("memory_mb", memory_mb, 2048)))
    if not isinstance(completion, str):
        raise TypeError(f"the completion must be text, got a {type(completion).__name__}")
    question = _question(prompt)

    gold_text, problem = _gold_text(answer)
    if problem:
        return RewardResult(None, Status.UNPARSEABLE_ANSWER, detail={"error": f"the right answer: {problem}"})
    found = find_answer(
        completion,
        prompt=question,
        require_mark=_flag("require_mark", require_mark, False),
        opened_thinking=_flag("opened_thinking", opened_thinking, False),
    )
    if found.text is None:
        return RewardResult(0.0, detail={"answer": None, "source": found.source})
    detail: dict[str, Any] = {"answer": found.text[:MAX_SHOWN], "source": found.source}

    letters = _gold_letters(gold_text, len(options))
    if letters is not None:
        stated = _stated_letters(found.text, len(letters) > 1)
        if stated is None and by_text and options:
            same = [i for i, text in enumerate(options) if _is_same_text(text, found.text)]
            stated = frozenset(LETTERS[i] for i in same) if len(same) == 1 else None
        if stated is not None:
            detail["answer"] = ", ".join(sorted(stated))
        return RewardResult(float(stated == letters), detail=detail)

    try:
        gold = read(gold_text, comma)
    except TooComplexError:
        gold = Words(_bare(gold_text))  # counts where it is written the same
    decide = verifier(*limits).equal if ask else _never
    try:
        value, right = _judge(Matcher(policy, decide), gold, gold_text, found, comma)
    except TooComplexError as error:
        return RewardResult(0.0, detail={**detail, "beyond_limits": str(error)})
    except SymbolicError as error:
        return RewardResult(None, error.status, detail={**detail, "error": str(error)})
    if right and _restates(value, gold, found.text, question):
        return RewardResult(0.0, detail={**detail, "restates": True})
    return RewardResult(float(right), detail={**detail, "answer": vote(value) or detail["answer"]})


def _judge(matcher: Matcher, gold: Value, gold_text: str, found: Answer, comma: bool) -> tuple[Value, bool]:
    """The value that is stated, and whether it is right."""
    text = _without_prefix(found.text or "")
    texts = [text]
    if found.is_prose and text.rstrip().endswith("!") and "!" not in gold_text:
        texts.append(text.rstrip(" !"))
    if _TEN_TO.search(text) and not re.search(r"(?<![A-Za-z])e(?![A-Za-z])", gold_text):  # 5e-3 is no 5 e - 3
        texts.append(_TEN_TO.sub("E", text))
    stated: Value = Words("")
    for one in texts:
        if _bare(one) and _bare(one) == _bare(gold_text):
            return (read(one, comma) if len(one) <= MAX_CHARACTERS else Words("")), True
        stated = read(one, comma)
        if matcher.matches(gold, stated):
            return stated, True
    if len(gold_text) <= MAX_CHARACTERS and (alike := in_form_of(normalise(gold_text), normalise(text))):
        alike_value = read(alike, comma)
        if matcher.matches(gold, alike_value):
            return alike_value, True
    return stated, False


def _without_prefix(text: str) -> str:
    r"""`The answer is 42` and `\text{Answer: 42}` without the words."""
    match = _PREFIX.match(text)
    if match is None:
        return text
    opened, closed = match[1] or "", match[2] or ""
    return ("" if bool(opened) == bool(closed) else "\\text{" if opened else closed) + text[match.end() :]


def _bare(text: str) -> str:
    """Notation without its spaces, to find what is written the same."""
    if len(text) > 100_000:
        return ""
    try:
        text = normalise(text)
    except TooComplexError:
        text = re.sub(r"\\(?:left|right)(?![A-Za-z])|\$", "", text)
    text = re.sub(r"\\text ?\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"v_\{([A-Z]{2})\}", r"\1", text)  # with an arrow or without
    text = re.sub(r"(?<![\d,])\s+|\s+(?!\d)", "", text).strip(",;:").rstrip(".,;:")
    return re.sub(r"^\.+(?!\d)", "", text)  # .75 is not 75


def _restates(value: Value, gold: Value, text: str, question: str) -> bool:
    """Whether an answer is a calculation or an equation that stands in the question. Of formulas only what is longer than
    the right answer.
    """
    if not question or not isinstance(gold, Quantity):
        return False
    if isinstance(value, Relation):
        return _bare(text) in _bare(question)
    if not isinstance(value, Quantity) or value.node == gold.node:
        return False
    if symbols_of(value.node) and len(walk(value.node)) <= len(walk(gold.node)):
        return False
    return not is_reduced(value.node) and _bare(text) in _bare(question)


# The right answer


def _gold_text(answer: str | int | float) -> tuple[str, str]:
    """The right answer's text, and what is wrong with it (empty: nothing)."""
    if hasattr(answer, "tolist"):  # numpy's numbers
        answer = answer.tolist()
    if isinstance(answer, Decimal | Fraction):
        answer = str(answer)
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        return "", f"expected text or a number, got a {type(answer).__name__}"
    if isinstance(answer, float):
        if not math.isfinite(answer):
            return "", f"{answer} is no number"
        return f"{answer:f}" if float(f"{answer:f}") == answer else repr(answer), ""
    text = str(answer).strip()
    if re.search(r"\\(?:boxed|fbox)(?![A-Za-z])|^####|\n.*####|</?answer>", text):
        found = find_answer(text, require_mark=True)
        if found.text is None:
            return "", f"{found.source} in {text[-80:]!r}"
        text = found.text
    text = _without_prefix(text).strip()
    if not _says_something(text) or text.lower() == "nan":
        return "", f"{text[:80]!r} states nothing"
    if _unbalanced(text):
        return "", f"the braces of {text[:80]!r} do not match"
    if re.search(r"\\(?:[dt]?frac|sqrt|binom)\s*$", text) or re.search(r"(?<!\\)\\$", text):
        return "", f"{text[-80:]!r} is cut off"
    return text, ""


def _says_something(text: str) -> bool:
    """Whether there is more than punctuation, spacing and signs."""
    plain = re.sub(
        r"\\(?:text|math|operatorname)\w*|\\(?:left|right|q?quad|pm|circ|degree|displaystyle)(?![A-Za-z])", "", text
    )
    return bool(re.search(r"[^\W_]|[∞∅]|\\\{\s*\\\}", plain)) and not re.fullmatch(r"<(\w+)>\s*</\1>", plain)


def _unbalanced(text: str) -> bool:
    depth = 0
    for match in re.finditer(r"\\.|[{}]", text, re.DOTALL):
        depth += (match[0] == "{") - (match[0] == "}")
        if depth < 0:
            return True
    return depth != 0


# Multiple choice


def _gold_letters(text: str, options: int) -> frozenset[str] | None:
    """The letters that are right; None if the right answer is not a choice."""
    plain = _without_fonts(text).strip()
    match = _GOLD_CHOICE.fullmatch(plain)
    last = LETTERS[-1] if not options else chr(ord("A") + options - 1)
    if match and match[1] <= (match[2] or last):
        bare = len(plain.strip("().: ")) == 1
        if bare or match[2] or re.match(r"\(?[A-Z][).:]\s", plain):
            return frozenset(match[1])
    if re.fullmatch(r"[A-J](?:\s*,\s*[A-J])+", plain) or (options and re.fullmatch(r"[A-Z]{2,}", plain)):
        return frozenset(re.findall("[A-Z]", plain))
    return None


def _stated_letters(text: str, several: bool) -> frozenset[str] | None:
    """The letters that an answer states; None if it states none."""
    plain = _without_prefix(_without_fonts(text)).strip("*_` \"'.")
    lone = _LONE.fullmatch(plain)
    if lone:
        return frozenset(lone[1].upper())
    if _SEVERAL.fullmatch(plain) or (several and re.fullmatch(r"[A-Z]{2,10}", plain)):
        return frozenset(letter for letter in re.sub(r"\b(?:and|or)\b", "", plain).upper() if letter.isalpha())
    leading = _LEADING.match(plain)
    if leading:
        return frozenset(leading[1] or leading[2])
    named = choice_in(plain)
    return frozenset(named) if named else None


def _without_fonts(text: str) -> str:
    text = (
        unicodedata.normalize("NFKC", text[:2_000])
        .replace("$", "")
        .replace("\\left", "")
        .replace("\\right", "")
        .replace("\\boxed", "")
        .replace("**", "")
    )
    for _ in range(4):
        text = re.sub(r"\\(?:text|math)\w*\s*\{([^{}]*)\}", r"\1", text)
    return re.sub(r"\\[,;:! (){}]|~", " ", text)


def _is_same_text(option: str, stated: str) -> bool:
    return bool(_bare(stated)) and _bare(option).casefold() == _bare(stated).casefold()


# Options


def _question(prompt: str | Sequence[Mapping[str, Any]] | None) -> str:
    if prompt is None or isinstance(prompt, str):
        return prompt or ""
    messages = list(prompt) if isinstance(prompt, Iterable) else [prompt]  # an array, of a Parquet row
    if not all(isinstance(message, Mapping) for message in messages):
        raise TypeError(f"prompt is text or a list of messages, got {str(prompt)[:80]!r}")
    return "\n".join(str(message.get("content") or "") for message in messages)


def _never(gold: Node | str, stated: Node | str) -> bool:
    return False


def _option(name: str, given: str | None, default: str, known: tuple[str, ...]) -> str:
    if given is None:
        return default
    if given not in known:
        raise ValueError(f"{name} is one of {', '.join(known)}, got {given!r}")
    return given


def _flag(name: str, given: bool | None, default: bool) -> bool:
    if given is None:
        return default
    if not isinstance(given, bool):
        raise TypeError(f"{name} is True or False, got {given!r}")
    return given


def _number(name: str, given: float | None, default: float) -> float:
    if given is None:
        return default
    if isinstance(given, bool) or not isinstance(given, int | float):
        raise TypeError(f"{name} is a number, got {given!r}")
    if not math.isfinite(given) or given < 0 or (default and not given):
        raise ValueError(f"{name} must be finite and {'positive' if default else 'not negative'}, got {given!r}")
    return float(given)


def _texts(name: str, given: Sequence[str] | None) -> tuple[str, ...]:
    if given is None:
        return ()
    if isinstance(given, str) or not all(isinstance(item, str) for item in given):
        raise TypeError(f"{name} is a list of texts, got {given!r}")
    return tuple(given)
