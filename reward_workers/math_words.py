"""Numbers, times and dates as people write them in words and digits.

Contract. Pure: a text is one of these as a whole, or None.
"""

from __future__ import annotations

import re
from fractions import Fraction

from reward_workers.math_notation import word_set

_SMALL = re.findall(
    r"\w+",
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen",
)
_TENS = re.findall(r"\w+", "twenty thirty forty fifty sixty seventy eighty ninety")
_NUMBERS = {name: i for i, name in enumerate(_SMALL)} | {name: 10 * i for i, name in enumerate(_TENS, 2)}
SCALES = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_PARTS = {
    "half": 2,
    "halve": 2,
    "third": 3,
    "quarter": 4,
    "fourth": 4,
    "fifth": 5,
    "sixth": 6,
    "seventh": 7,
    "eighth": 8,
}
_PARTS |= {"ninth": 9, "tenth": 10}
_NO_NOUN = SCALES.keys() | word_set(
    "hundred of or and another more less fewer other others is are than to by plus minus point over squared cubed "
    "factorial half halves"
)
MAX_WORDS = 20

_CLOCK = re.compile(r"(\d{1,2}):([0-5]\d)(?::([0-5]\d))? ?(?:([ap])\.? ?m\.?)?", re.IGNORECASE)
_DATE = re.compile(r"(\d{4})-(\d{1,2})-(\d{1,2})|(\d{1,2})/(\d{1,2})/(\d{4})")


def number_in_words(text: str) -> tuple[Fraction, str] | None:
    """`twenty-five`, `two thirds`, `minus seven`, `seven apples`: the number, and the one word that says what is counted."""
    words = re.split(r"[ -]+", text.lower())
    if not 0 < len(words) <= MAX_WORDS or not all(word.isalpha() for word in words):
        return None
    sign = -1 if words[0] in ("minus", "negative") else 1
    words = words[1:] if sign < 0 else words
    whole, used = _whole(words)
    rest = words[used:]
    if words[:1] == ["half"]:
        whole, used, rest = Fraction(1, 2), 1, words[1:]
    elif used and rest and (part := _PARTS.get(rest[0]) or _PARTS.get(rest[0].removesuffix("s"))):
        whole, rest = whole / part, rest[1:]
    if not used or len(rest) > 1 or (rest and (rest[0] in _NO_NOUN or rest[0] in _NUMBERS or len(rest[0]) < 3)):
        return None
    return sign * whole, "".join(rest)


def _whole(words: list[str]) -> tuple[Fraction, int]:
    """The whole number at the beginning, and how many words it takes (0: there is none)."""
    total, group, used, may_follow = 0, 0, 0, 10**15
    last = 100  # what the last word stood for: after a ten only a digit may follow
    for word in words:
        value = _NUMBERS.get(word)
        if value is not None and value < last and (value or not used):
            group, last = group + value, 10 if value >= 20 else 1
        elif word == "hundred" and 0 < group < 10:
            group, last = group * 100, 100
        elif word in SCALES and group and SCALES[word] < may_follow:
            total, group, last, may_follow = total + group * SCALES[word], 0, 100, SCALES[word]
        elif word == "and" and used and last == 100 and words[used + 1 : used + 2] and words[used + 1] in _NUMBERS:
            pass
        else:
            break
        used += 1
    return Fraction(total + group), used


def clock_of(text: str) -> tuple[list[int], str] | None:
    """`10:30`, `9:05 a.m.`: hours, minutes and perhaps seconds, and `am`, `pm` or nothing."""
    match = _CLOCK.fullmatch(text)
    if match is None:
        return None
    parts = [int(part) for part in match.groups()[:3] if part is not None]
    return parts, f"{match[4].lower()}m" if match[4] else ""


def date_of(text: str) -> str | None:
    """`2024-03-05`, `3/5/2024`: a date in digits, without zeros that carry no meaning. It is no subtraction or quotient."""
    match = _DATE.fullmatch(text)
    if match is None:
        return None
    return re.sub(r"\b0+(?=\d)", "", match[0])
