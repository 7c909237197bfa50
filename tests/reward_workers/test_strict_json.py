"""Strict JSON: what Python's own reader lets through, ambiguous replies, and hostile inputs."""

from __future__ import annotations

import contextlib
import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_workers import strict_json
from reward_workers.strict_json import StrictJsonError

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=9),
    lambda parts: st.lists(parts, max_size=3) | st.dictionaries(st.text(max_size=5), parts, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.text(max_size=5), VALUES, max_size=3)
SPACE = st.text(" \t\r\n", max_size=3)


class TestLoads:
    @given(VALUES, SPACE, SPACE)
    def test_reads_what_json_writes(self, value: Any, before: str, after: str) -> None:
        read = strict_json.loads(before + json.dumps(value) + after)
        assert strict_json.same_value(read, value)
        assert strict_json.same_value(value, read)

    @given(st.text(max_size=30))
    def test_accepts_nothing_that_json_refuses(self, text: str) -> None:
        try:
            value = strict_json.loads(text)
        except StrictJsonError:
            return
        assert strict_json.same_value(value, json.loads(text))

    @pytest.mark.parametrize(
        ("text", "why"),
        [
            ("NaN", "NaN is not JSON"),
            ('{"a": [Infinity]}', "Infinity is not JSON"),
            ("-Infinity", "-Infinity is not JSON"),
            ("1e999", "1e999 is too large"),
            ('{"a": {"b": -1E400}}', "too large"),
            ("1e-999", "1e-999 is too small"),
            ("[-0.01E-400]", "too small"),
            ('{"a": 1, "a": 1}', "key 'a' twice"),
            ('{"x": {"a": 1, "\\u0061": 2}}', "key 'a' twice"),
            ('"\\ud800"', "surrogate"),
            ('{"\\ud800": 1}', "surrogate"),
            ('{"a": 1}{"a": 1}', "more text after"),
            ('{"a": 1} // done', "more text after"),
            ("{'a': 1}", "double quotes"),
            ('{"a": 1,}', "double quotes|trailing comma"),
            ('{"a": 1', "the text ends"),
            ("", "the text ends"),
            ("\ufeff1", "Expecting value"),
            ("\u00a01", "Expecting value"),
            ("01", "more text after"),
            ("1" * 5000, "5000 digits"),
            ("[" * 65 + "]" * 65, "64 deep"),
            ("[" * 100_000, "64 deep"),
            ('{"a":' * 2000, "64 deep"),
        ],
    )
    def test_refusals_say_why(self, text: str, why: str) -> None:
        with pytest.raises(StrictJsonError, match=why):
            strict_json.loads(text)

    def test_the_deepest_that_is_read(self) -> None:
        assert strict_json.loads("[" * 64 + "]" * 64)


class TestSameValue:
    @pytest.mark.parametrize(
        ("one", "other", "same"),
        [
            (1, 1.0, True),
            (1, True, False),
            (0, False, False),
            (None, False, False),
            ({"a": 1, "b": [2]}, {"b": [2.0], "a": 1}, True),
            ({"a": None}, {}, False),
            ([1, 2], [2, 1], False),
            ([], {}, False),
            ("1", 1, False),
            (2**53, 2.0**53, True),
            (2**53 + 1, 2.0**53, False),
        ],
    )
    def test_as_json(self, one: Any, other: Any, same: bool) -> None:
        assert strict_json.same_value(one, other) is same
        assert strict_json.same_value(other, one) is same


class TestOnlyValue:
    @pytest.mark.parametrize("fence", ["```json\n{}\n```", "```\n{}```", "  ```JSON \r\n{}\r\n```\n"])
    def test_one_code_fence_around_it(self, fence: str) -> None:
        text = fence.replace("{}", '{"a": 1}')
        assert strict_json.only_value(text) == {"a": 1}
        assert strict_json.only_value(text, fence="require") == {"a": 1}
        with pytest.raises(StrictJsonError, match="a code fence around"):
            strict_json.only_value(text, fence="refuse")
        with pytest.raises(StrictJsonError, match="no code fence"):
            strict_json.only_value('{"a": 1}', fence="require")

    @pytest.mark.parametrize(
        "text",
        [
            '```json\n{"a": 1}',
            '```python\n{"a": 1}\n```',
            'Here: {"a": 1}',
            '{"a": 1}\nThat is all.',
            '```json\n{"a": 1}\n```\nThat is all.',
            '```json\n{"a": 1} // one\n```',
            "```json\n```",
            "",
        ],
    )
    def test_other_text_is_refused(self, text: str) -> None:
        with pytest.raises(StrictJsonError):
            strict_json.only_value(text)

    def test_c11_ambiguous_replies(self) -> None:
        assert strict_json.only_value('{"score": 1}\n{"score": 1.0}') == {"score": 1}
        assert strict_json.only_value('```json\n{"score": 1}\n```\n{"score": 1}') == {"score": 1}
        with pytest.raises(StrictJsonError, match="2 JSON values; expected one"):
            strict_json.only_value('{"score": 1}\n{"score": 1}', repeats=False)
        with pytest.raises(StrictJsonError, match="2 JSON values that differ"):
            strict_json.only_value('{"score": 0}\n{"score": 1}')
        with pytest.raises(StrictJsonError, match="differ"):
            strict_json.only_value('{"score": 1}\n{"score": true}')

    def test_an_unknown_policy_is_the_callers_fault(self) -> None:
        with pytest.raises(ValueError, match="fence=strip: expected one of allow, require, refuse"):
            strict_json.only_value("1", fence="strip")


class TestOnlyObject:
    @given(OBJECTS, st.text("ab .[]:,1", max_size=12), st.text("ab .}[]:,1", max_size=12))
    def test_is_found_within_other_text(self, value: dict[str, Any], before: str, after: str) -> None:
        text = f"{{x}} {{ {before}: {json.dumps(value)} {after}"
        assert strict_json.same_value(strict_json.only_object(text), value)

    @given(OBJECTS, OBJECTS)
    def test_two_that_differ_are_none(self, one: dict[str, Any], other: dict[str, Any]) -> None:
        text = f"First {json.dumps(one)}, then {json.dumps(other)}."
        assert len(strict_json.objects_in(text)) == 2
        if strict_json.same_value(one, other):
            assert strict_json.same_value(strict_json.only_object(text), one)
        else:
            with pytest.raises(StrictJsonError, match="differ"):
                strict_json.only_object(text)

    @given(st.dictionaries(st.text(max_size=3), OBJECTS, min_size=1, max_size=3), st.data())
    def test_a_part_of_a_cut_off_object_is_never_the_answer(self, value: dict[str, Any], data: st.DataObject) -> None:
        text = json.dumps(value)
        cut = data.draw(st.integers(2, len(text) - 1))
        with pytest.raises(StrictJsonError):
            strict_json.only_object(text[:cut])

    def test_no_object(self) -> None:
        with pytest.raises(StrictJsonError, match="no JSON object"):
            strict_json.only_object("The set {x} is [1, 2].")

    @pytest.mark.parametrize("text", ['[{"a": 1}]', 'So: [ {"a": 1}, {"a": 1}]', '[{"a": 1}, [2]] it is'])
    def test_a_part_of_a_list_is_not_the_answer(self, text: str) -> None:
        with pytest.raises(StrictJsonError, match="a list of objects"):
            strict_json.only_object(text)

    @pytest.mark.parametrize("text", ['[see {"a": 1}]', '[{"a": 1} is meant]', '[1] {"a": 1}'])
    def test_other_brackets_around_it_are_other_text(self, text: str) -> None:
        assert strict_json.only_object(text) == {"a": 1}

    def test_zeros_are_no_vanished_numbers(self) -> None:
        assert strict_json.loads("[0e-999, -0.0, 0.000e5, 1e-300]") == [0, 0, 0, 1e-300]

    def test_keys_twice_are_not_passed_over(self) -> None:
        with pytest.raises(StrictJsonError, match="twice"):
            strict_json.only_object('Well: {"score": 0, "score": 1}')


class TestAfterThought:
    @pytest.mark.parametrize(
        ("text", "answer"),
        [
            ("plain", "plain"),
            ("<think>a</think>b", "b"),
            ("a</think>b", "b"),
            ("<think>a</think><think>b</think>c", "c"),
            ("<think>a", None),
            ("<think>a</think>b<think>c", None),
            ("<think>a</think>", ""),
        ],
    )
    def test_what_follows_the_last(self, text: str, answer: str | None) -> None:
        assert strict_json.after_thought(text) == answer


@pytest.mark.parametrize(
    "text",
    [
        '{"a":[' * 160_000,
        "{" * 1_000_000,
        '{"k%d":' * 100_000,
        '{"a":1},' * 100_000,
        "{" + '"a":1,' * 150_000 + '"b":1}',
        '{"' * 500_000,
        '"' * 1_000_000,
        "```json\n" * 100_000,
        "[" + "1e5," * 200_000 + "1]",
        "1" * 1_000_000,
    ],
)
def test_any_input_ends_soon(text: str) -> None:
    started = time.process_time()
    for read in (strict_json.loads, strict_json.only_value, strict_json.only_object):
        with contextlib.suppress(StrictJsonError):
            read(text)
    assert time.process_time() - started < 10
