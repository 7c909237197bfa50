"""Answers in a prescribed form: JSON that satisfies a schema, and text in tags.

Contract:
- Only the policy's text is judged against it: what it wrote badly earns 0, with `detail["outcome"]` and
  `detail["why"]`. A schema or gold that can't be used is no verdict but `unparseable_answer`, and is refused when the
  data is loaded (`check_json_row`).
- Nothing is repaired, guessed or taken from the middle of other text.
- `detail["answer"]` is the answer in one way of writing, so that equal answers can be counted as equal.

Both are reward functions as they stand: `reward.functions.NAME.path=reward_workers.structured.grade_json`.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from reward_workers import strict_json
from reward_workers.function import gold_written_by, rows_checked_by
from reward_workers.json_example import example
from reward_workers.json_schema import Schema, SchemaError
from reward_workers.strict_json import StrictJsonError
from rollout_workers.trajectory import RewardResult, Status


class GoldError(ValueError):
    """The schema or the gold answer of a data row can't be used; the message says why."""


def check_json_row(
    schema: Any,
    answer: Any = None,
    *,
    formats: bool = True,
    tolerances: Mapping[str, float | str] | None = None,
    fence: str = "allow",
    other_text: bool = False,
) -> None:
    """Raises ValueError for what `grade_json` can't use, options included."""
    if fence not in strict_json.FENCE_POLICIES:
        raise ValueError(f"fence={fence}: expected one of {', '.join(strict_json.FENCE_POLICIES)}")
    if other_text and fence != "allow":
        raise ValueError(f"fence={fence} with other_text=true: other text may hold any fence; leave it at allow")
    _tolerances(tolerances)
    _gold(schema, answer, formats)


def write_json_answer(schema: Any, answer: Any = None, fence: str = "allow", formats: bool = True) -> str | None:
    """The gold answer, or without one a value that satisfies the schema, where one is found easily."""
    checked, gold = _gold(schema, answer, formats)
    if gold is NO_GOLD:
        gold = example(strict_json.loads(_json_text(schema)))
        if gold is None or checked.problem(gold) is not None:
            return None
    text = json.dumps(gold, ensure_ascii=False)
    return f"```json\n{text}\n```" if fence == "require" else text


@rows_checked_by(check_json_row)
@gold_written_by(write_json_answer)
def grade_json(
    completion: str,
    schema: Any,
    answer: Any = None,
    *,
    fence: str = "allow",
    repeats: bool = True,
    thought: bool = True,
    other_text: bool = False,
    formats: bool = True,
    tolerances: Mapping[str, float | str] | None = None,
    partial: bool = False,
) -> RewardResult:
    """1 if the completion is JSON that satisfies `schema` and equals `answer`, else 0.

    `schema` is a JSON Schema (`reward_workers.json_schema` states the dialect), as a dict, a boolean or JSON text; `answer`
    a JSON value, None for no gold. A text is read as JSON text in both, since columnar files can't hold values of
    many shapes: the gold string abc is written `"abc"`, and the gold null `null`.

    The completion must be one JSON value and nothing else (`reward_workers.strict_json`), after a finished thought if
    `thought`. `fence` = allow | require | refuse a Markdown code fence around it. With `repeats`, the same value several
    times is one; values that differ earn 0 in any case. With `other_text` it may also be the only JSON object within
    other text.

    Gold and answer are compared field by field as JSON: numbers by value, in decimals, true is not 1. `tolerances`
    allows numbers to differ: by field (`price`, `items.*.price`; `*` is every place of a list or key of an object), as a number or,
    relative to the gold, a percentage (`"1%"`). `partial`: the reward of an answer that satisfies the schema is the share of right
    fields, over those of gold and answer together.

    Metrics: `valid_json`, `valid_schema`, and, with a gold, `right_fields` (that share). `detail["outcome"]`: right |
    wrong | off-schema | not-json | unfinished-thought. Status `unparseable_answer` for a schema or gold that can't be
    used, with `detail["error"]`. Raises ValueError for an unusable option.
    """
    limits = _tolerances(tolerances)
    try:
        checked, gold = _gold(schema, answer, formats)
    except GoldError as error:
        return RewardResult(None, Status.UNPARSEABLE_ANSWER, detail={"error": str(error)})
    try:
        found = _read(completion, fence=fence, repeats=repeats, thought=thought, other_text=other_text)
    except UnfinishedThoughtError as error:
        return _wrong("unfinished-thought", str(error))
    except StrictJsonError as error:
        return _wrong("not-json", str(error))
    detail: dict[str, Any] = {"answer": json.dumps(_plain_numbers(found), sort_keys=True, ensure_ascii=False)}
    try:
        problem = checked.problem(found)
    except SchemaError as error:
        return RewardResult(None, Status.UNPARSEABLE_ANSWER, detail={"error": str(error)})
    if problem is not None:
        return _wrong("off-schema", problem, valid_json=1.0, **detail)
    metrics = {"valid_json": 1.0, "valid_schema": 1.0}
    if gold is NO_GOLD:
        return RewardResult(1.0, metrics=metrics, detail={"outcome": "right", **detail})
    right, fields = _right_fields(gold, found, (), limits)
    metrics["right_fields"] = right / fields
    if right == fields:
        return RewardResult(1.0, metrics=metrics, detail={"outcome": "right", **detail})
    detail = {"outcome": "wrong", "why": f"{fields - right} of {fields} fields are not the gold's", **detail}
    return RewardResult(right / fields if partial else 0.0, metrics=metrics, detail=detail)


def check_tags(tags: Sequence[str] = ("think", "answer"), may_be_empty: Sequence[str] = ()) -> None:
    """Raises ValueError for no tags, a name that is none, or the same twice."""
    if not tags or len(set(tags)) != len(tags) or not all(re.fullmatch(r"[\w-]+", tag, re.ASCII) for tag in tags):
        raise ValueError(f"tags={list(tags)}: expected different names of letters, digits, dash and underscore")
    if unknown := set(may_be_empty) - set(tags):
        raise ValueError(f"may_be_empty={sorted(unknown)}: not among tags={list(tags)}")


def write_tags(
    tags: Sequence[str] = ("think", "answer"), prompt_tail: str = "", text_after: bool = False, answer: Any = "Done."
) -> str | None:
    """The tags in order, the row's `answer` in the last one or after it; None where the prompt's tail does not begin so."""
    check_tags(tags)
    inside = [*["One step after the other."] * (len(tags) - 1), "Done." if text_after else str(answer)]
    text = "\n".join(f"<{name}>\n{content}\n</{name}>" for name, content in zip(tags, inside, strict=True))
    text += f"\n{answer}" if text_after else ""
    return text.removeprefix(prompt_tail) if text.startswith(prompt_tail) else None


@rows_checked_by(check_tags)
@gold_written_by(write_tags)
def grade_tags(
    completion: str,
    *,
    tags: Sequence[str] = ("think", "answer"),
    prompt_tail: str = "",
    text_after: bool = False,
    may_be_empty: Sequence[str] = (),
) -> RewardResult:
    """1 if the completion is `<think>…</think><answer>…</answer>`, with each tag exactly once, in order, else 0.

    `tags` are the names, in order. Nothing but whitespace may stand outside of the blocks, so that talking about
    tags earns nothing; with `text_after` there must be text after the last one, as with models that only mark their
    thoughts. Blocks must hold something, but for those in `may_be_empty`. Anything that looks like one of the tags
    (`</answer >`, `<Think>`, `<answer id=1>`) counts as that tag written wrongly.

    `prompt_tail` is what the chat template writes at the end of every prompt (`"<think>\\n"` for some): it is read as the
    beginning of the completion.

    `detail["answer"]`: what is in the last block, or after it with `text_after`. `detail["outcome"]`: right | wrong.
    Raises ValueError for tags that can't be used.
    """
    check_tags(tags, may_be_empty)
    names = tuple(tags)
    text = prompt_tail + completion
    expected = [mark for name in names for mark in (f"<{name}>", f"</{name}>")]
    found = list(_tag_pattern(names).finditer(text))
    if [mark[0] for mark in found] != expected:
        seen = " ".join(mark[0] for mark in found[: len(expected) + 4]) or "none"
        return _misshapen(f"tags must be {' '.join(expected)}, there are: {seen[:200]}")
    bounds = [0, *(place for mark in found for place in mark.span()), len(text)]
    parts = [text[start:end].strip() for start, end in zip(bounds[::2], bounds[1::2], strict=True)]  # around each tag
    inside, outside = parts[1::2], parts[::2]
    after = outside.pop() if text_after else None
    if any(outside):
        return _misshapen("there is text outside of the tags")
    for name, content in zip(names, inside, strict=True):
        if not content and name not in may_be_empty:
            return _misshapen(f"<{name}> is empty")
    if after == "":
        return _misshapen(f"nothing follows </{names[-1]}>")
    return RewardResult(1.0, detail={"outcome": "right", "answer": inside[-1] if after is None else after})


class UnfinishedThoughtError(StrictJsonError):
    """A thought was begun and not finished, so that nothing after it is an answer."""


NO_GOLD = object()


def _read(completion: str, *, fence: str, repeats: bool, thought: bool, other_text: bool) -> Any:
    """The JSON value of a completion. Raises StrictJsonError."""
    answer = strict_json.after_thought(completion) if thought else completion
    if other_text:
        if answer is None:
            raise UnfinishedThoughtError("a thought is not finished")
        return strict_json.only_object(answer, repeats=repeats)
    try:
        return strict_json.only_value(completion, fence=fence, repeats=repeats)
    except StrictJsonError:  # first as it is, since a thought's marks may also stand inside a JSON string
        if answer is None:
            raise UnfinishedThoughtError("a thought is not finished") from None
        if answer == completion:
            raise
    return strict_json.only_value(answer, fence=fence, repeats=repeats)


def _plain_numbers(value: Any) -> Any:
    """The value with 1.0 written 1."""
    if isinstance(value, dict):
        return {key: _plain_numbers(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_plain_numbers(part) for part in value]
    exact = isinstance(value, float) and value.is_integer() and abs(value) < 2**53
    return int(value) if exact else value


def _gold(schema: Any, answer: Any, formats: bool) -> tuple[Schema, Any]:
    """The checked schema and the gold value, NO_GOLD for none. Raises GoldError."""
    if schema is None:
        raise GoldError("the row has no schema")
    try:
        checked = _schema(_json_text(schema), formats)
    except (SchemaError, StrictJsonError) as error:
        raise GoldError(f"the schema can't be used: {error}") from error
    if answer is None:
        return checked, NO_GOLD
    try:
        gold = strict_json.loads(_json_text(answer))
    except StrictJsonError as error:
        hint = "; a text is read as JSON text, so a string needs its quotes" if isinstance(answer, str) else ""
        raise GoldError(f"the answer is no JSON: {error}{hint}") from error
    try:
        problem = checked.problem(gold)
    except SchemaError as error:
        raise GoldError(f"the schema can't be used: {error}") from error
    if problem is not None:
        raise GoldError(f"the answer does not satisfy the schema: {problem}")
    return checked, gold


def _json_text(value: Any) -> str:
    """A value of a data row as JSON text; what is text already stays as it is. Raises StrictJsonError."""
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise StrictJsonError(str(error)) from error


@functools.lru_cache(maxsize=256)  # a group's members share a schema, and often a whole data set's rows do
def _schema(text: str, formats: bool) -> Schema:
    return Schema(strict_json.loads(text), formats=formats)


Limits = list[tuple[tuple[str, ...], Fraction, bool]]  # path, how much, whether relative to the gold


def _tolerances(tolerances: Mapping[str, float | str] | None) -> Limits:
    limits: Limits = []
    for path, value in (tolerances or {}).items():
        relative = isinstance(value, str) and value.endswith("%")
        try:
            if isinstance(value, bool) or not isinstance(value, int | float | str):
                raise ValueError
            limit = Fraction(value[:-1]) / 100 if relative and isinstance(value, str) else Fraction(repr(value))
            if limit < 0:
                raise ValueError
        except (ValueError, ZeroDivisionError):
            raise ValueError(
                f"tolerances.{path}={value!r}: expected a number from 0, or a percentage of the gold such as '1%'"
            ) from None
        limits.append((tuple(path.split(".")), limit, relative))
    return limits


def _right_fields(gold: Any, found: Any, path: tuple[str, ...], limits: Limits) -> tuple[int, int]:
    """How many fields of the two values are the same, and how many there are in either."""
    pairs: list[tuple[str, Any, Any]]
    if isinstance(gold, dict) and isinstance(found, dict) and (gold or found):
        pairs = [(key, gold.get(key, MISSING), found.get(key, MISSING)) for key in {**gold, **found}]
    elif isinstance(gold, list) and isinstance(found, list) and (gold or found):
        places = range(max(len(gold), len(found)))
        pairs = [(str(i), _place(gold, i), _place(found, i)) for i in places]
    elif isinstance(gold, dict | list) or isinstance(found, dict | list):
        return int(gold == found), max(_size(gold), _size(found))
    else:
        return int(_same(gold, found, path, limits)), 1
    counts = [_right_fields(one, other, (*path, key), limits) for key, one, other in pairs]
    return sum(right for right, _ in counts), sum(fields for _, fields in counts)


MISSING = object()  # equal to nothing in the other value


def _place(values: list[Any], index: int) -> Any:
    return values[index] if index < len(values) else MISSING


def _size(value: Any) -> int:
    """Number of fields: values that hold no others."""
    parts = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    return sum(map(_size, parts)) if parts else 1


def _same(gold: Any, found: Any, path: tuple[str, ...], limits: Limits) -> bool:
    if strict_json.same_value(gold, found):
        return True
    if not all(isinstance(value, int | float) and not isinstance(value, bool) for value in (gold, found)):
        return False
    exact = Fraction(repr(gold))
    off = abs(exact - Fraction(repr(found)))
    return any(
        off <= (limit * abs(exact) if relative else limit)
        for pattern, limit, relative in limits
        if len(pattern) == len(path) and all(a in ("*", b) for a, b in zip(pattern, path, strict=True))
    )


@functools.lru_cache(maxsize=64)
def _tag_pattern(names: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile(rf"<\s{{0,9}}/?\s{{0,9}}(?:{'|'.join(names)})(?![\w-])[^<>]{{0,200}}>?", re.IGNORECASE)


def _misshapen(why: str) -> RewardResult:
    return RewardResult(0.0, detail={"outcome": "wrong", "why": why})


def _wrong(outcome: str, why: str, valid_json: float = 0.0, **detail: Any) -> RewardResult:
    return RewardResult(
        0.0,
        metrics={"valid_json": valid_json, "valid_schema": 0.0},
        detail={"outcome": outcome, "why": why, **detail},
    )
