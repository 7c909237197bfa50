"""What a judge answers, read strictly: every score belongs to the id that it came with, or the reply can't be used.

Contract: a score is a number from 0 to 1, plain or as a string of exactly such a number. Nothing is clamped, padded,
cut or matched by position, and nothing unreadable becomes 0: it is a ReplyError whose message tells the judge what
to mend. Judges that use other key names, write one object after another, or think aloud first, are understood. Two scores
of one attempt that differ are none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

LIST_KEYS = ("scores", "results", "ratings", "evaluations", "verdicts", "attempts", "trajectories")
ID_KEYS = ("id", "trajectory_id", "attempt_id", "attempt", "trajectory")
SCORE_KEYS = ("score", "rating", "grade", "value")
EXPLANATION_KEYS = ("explanation", "justification", "reasoning", "reason", "rationale", "comment")
BETTER_KEYS = ("better", "winner", "preferred", "verdict", "choice")
TIE = "tie"

MAX_CHARACTERS = 200_000
MAX_PLACES = 2_000  # of brackets that are tried as the beginning of a JSON value


class ReplyError(ValueError):
    """The judge's reply can't be used; the message says why, to the judge as well."""


@dataclass(frozen=True)
class Verdict:
    """`score` from 0 to 1."""

    score: float
    explanation: str


def find_json(reply: str) -> list[Any]:
    """The JSON objects and arrays in a reply, in order; those inside one another count once.

    Thinking blocks are left out, with drafts and stray quotes in them, also where the prompt began the first one; one that
    never ends leaves what stands before it. Their marks inside a value's text are that text, and prose may speak of them: a
    block begins at the beginning of a line, and `</think>` alone ends one only where JSON follows.
    NaN and repeated keys make a value unreadable. At most the last MAX_CHARACTERS characters are looked at.
    """
    text = reply.strip()
    while text.startswith("<think>"):
        text = text.partition("</think>")[2].lstrip()
    text = text[-MAX_CHARACTERS:]
    decoder = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_refuse)
    found: list[tuple[int, int, Any]] = []
    end = 0
    for place in [match.start() for match in re.finditer(r"[{\[]", text)][-MAX_PLACES:]:
        if place < end:
            continue
        try:
            value, end = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):
            continue
        found.append((place, end, value))
    begun: int | None = None
    for mark in re.finditer("^[ \t]*<think>|</think>", text, re.MULTILINE):
        if any(start < mark.start() < stop for start, stop, _ in found):
            continue
        if mark[0] != "</think>":
            begun = mark.start() if begun is None else begun
            continue
        following = [one for one in found if one[0] >= mark.end()]
        if following:
            found = following
        elif begun is not None:
            found = [one for one in found if one[0] < begun]
        begun = None
    return [value for start, _, value in found if begun is None or start < begun]


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    if len({key for key, _ in pairs}) != len(pairs):
        raise ValueError("a key stands twice")
    return dict(pairs)


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def read_score(value: Any) -> float:
    """A number from 0 to 1. Raises ReplyError for anything else: 7, "0.8x", "1.", true, null."""
    if isinstance(value, str) and re.fullmatch(r"\d*\.?\d+", value.strip(), re.ASCII):
        value = float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ReplyError(f"{_shown(value)} is not a score; it must be a number from 0 to 1")
    if not 0 <= value <= 1:
        raise ReplyError(f"the score {_shown(value)} is out of range; it must be a number from 0 to 1")
    return float(value)


def read_scores(reply: str, names: Sequence[str]) -> dict[str, Verdict]:
    """Each name's verdict. Raises ReplyError, also where a reply has complete lists that differ."""
    return _only(reply, lambda value: _scores(value, names), one_by_one=True)


def read_better(reply: str, names: Sequence[str]) -> str:
    """Which of two names is better, or TIE. Raises ReplyError, also where a reply says one thing and another."""
    return _only(reply, lambda value: _better(value, names))


def _only(reply: str, read: Callable[[Any], Any], one_by_one: bool = False) -> Any:
    """What the readable values of a reply agree on: with two that differ, nobody can say which one counts.

    `one_by_one`: where none is readable, all of them may be the entries of one list.
    """
    values = find_json(reply)
    if not values:
        raise ReplyError("it holds no JSON object that can be read")
    problems: list[ReplyError] = []
    said: list[Any] = []
    for value in values:
        try:
            said.append(read(value))
        except ReplyError as error:
            problems.append(error)
    if not said and one_by_one and len(values) > 1:
        try:
            return read(values)
        except ReplyError:
            raise problems[-1] from None
    if not said:
        raise problems[-1]
    if any(other != said[0] for other in said[1:]):
        raise ReplyError("it holds several answers that differ; give one only")
    return said[0]


def _scores(value: Any, names: Sequence[str]) -> dict[str, Verdict]:
    entries = list(_entries(value, names))
    found: dict[str, Verdict] = {}
    for name, entry in entries:
        if name not in names:
            raise ReplyError(f"there is no attempt {_shown(name)}")
        if name in found:
            raise ReplyError(f"the attempt {name} has two scores")
        found[name] = _verdict(name, entry)
    if missing := [name for name in names if name not in found]:
        raise ReplyError(
            f"it has {len(found)} scores for {len(names)} attempts; these are missing: {', '.join(missing)}"
        )
    return found


def _entries(value: Any, names: Sequence[str]) -> list[tuple[Any, Any]]:
    """Pairs of a name and what was said of it, from any of the shapes that judges use."""
    if isinstance(value, Mapping):
        if (inner := _get(value, LIST_KEYS)) is not None:
            return _entries(inner, names)
        if _get(value, SCORE_KEYS) is not None:
            return [(_get(value, ID_KEYS) if len(names) > 1 else _get(value, ID_KEYS) or names[0], value)]
        if value and all(name in names for name in value):
            return list(value.items())
    if isinstance(value, list):
        return [(_get(entry, ID_KEYS) if isinstance(entry, Mapping) else None, entry) for entry in value]
    raise ReplyError('expected {"scores": [{"id": ..., "explanation": ..., "score": ...}]}')


def _verdict(name: str, entry: Any) -> Verdict:
    if not isinstance(entry, Mapping):
        return Verdict(read_score(entry), "")
    given = _all(entry, SCORE_KEYS)
    if not given:
        raise ReplyError(f"the attempt {name} has no score")
    try:
        score = read_score(given[0])
    except ReplyError as error:
        raise ReplyError(f"the attempt {name}: {error}") from error
    if any(_differs(other, score) for other in given[1:]):
        raise ReplyError(f"the attempt {name} has several scores that differ")
    return Verdict(score, str(_get(entry, EXPLANATION_KEYS) or ""))


def _differs(value: Any, score: float) -> bool:
    """Whether a value beside a score is another score; a grade B or a value of 7 points is none."""
    try:
        return read_score(value) != score
    except ReplyError:
        return False


def _better(value: Any, names: Sequence[str]) -> str:
    given = _all(value, BETTER_KEYS) if isinstance(value, Mapping) else []
    named = [one for one in given if one in names or one == TIE]
    said = given[0] if given else None
    if named and all(one == said for one in named):
        return str(said)
    raise ReplyError(f'expected {{"better": ...}} with one of {", ".join(names)} or "{TIE}", got {_shown(said)}')


def _get(entry: Mapping[str, Any], keys: Sequence[str]) -> Any:
    return next(iter(_all(entry, keys)), None)


def _all(entry: Mapping[str, Any], keys: Sequence[str]) -> list[Any]:
    """The values under any of the keys, whatever their case, in the order of the keys."""
    by_key = {name.strip().lower(): value for name, value in entry.items() if value is not None}
    return [by_key[key] for key in keys if key in by_key]


def _shown(value: Any) -> str:
    return repr(value)[:60]
