"""Probes of single rows: what they are made of, and that no two are the same."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.reward_probes import GUESSES, KINDS, Probe, holds_gold, normal, probes
from reward_workers.code import grade_code
from reward_workers.function import Gold
from reward_workers.structured import grade_json

CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "look_up", "arguments": '{"n": 1}'}}],
}


def made(golds: Sequence[Gold], others: Sequence[Gold] = (), prompt: str = "How many?", seed: int = 0) -> list[Probe]:
    return probes(golds, prompt, {normal(gold): gold for gold in others}, random.Random(seed))


def texts(golds: Sequence[Gold], others: Sequence[Gold] = (), prompt: str = "How many?") -> dict[str, str]:
    return {probe.kind: probe.text for probe in made(golds, others, prompt)}


words = st.text("ab1. ", max_size=6)


@given(golds=st.lists(words, max_size=3), others=st.lists(words, max_size=12), prompt=words, seed=st.integers(0, 9))
def test_no_text_twice_and_the_gold_first(golds: list[str], others: list[str], prompt: str, seed: int) -> None:
    found = made(golds, others, prompt, seed)
    assert len({probe.text for probe in found}) == len(found)
    assert {probe.kind for probe in found} <= KINDS.keys()
    assert [probe.text for probe in found if probe.kind == "gold"] == list(dict.fromkeys(golds))
    own = {normal(gold) for gold in golds}
    assert not own & {normal(probe.answer) for probe in found if probe.kind in ("other_gold", "lookalike")}


@given(others=st.lists(st.integers(0, 99).map(str), min_size=1, unique=True), seed=st.integers(0, 9))
def test_the_right_guess_is_neither_first_nor_last(others: list[str], seed: int) -> None:
    guesses = next(p.text for p in made(["gold"], others, seed=seed) if p.kind == "guesses").split("\n")
    assert guesses.count("gold") == 1
    assert "gold" not in (guesses[0], guesses[-1])
    assert len(guesses) <= GUESSES + 1


def test_a_bare_gold() -> None:
    found = texts(["14"], ["14.0", "3", "141"])
    assert found["empty"] == ""
    assert found["whitespace"].strip() == ""
    assert found["echo"] == "How many?"
    assert (found["other_gold"], found["lookalike"]) == ("3", "141")
    assert found["unfinished_thought"] == "<think>\n14"
    assert found["truncated"] == "1"
    assert len(found["long"]) > 4000
    assert "format_only" not in found


def test_without_a_gold_there_are_still_answers_that_must_not_pay() -> None:
    assert texts([], ["3"]).keys() == {"empty", "whitespace", "echo", "injection", "mentions"}


@pytest.mark.parametrize(
    ("gold", "form"),
    [
        (r"\boxed{\frac{1}{2}}", r"\boxed{}"),
        ('{"category": "billing", "lines": [1, 2]}', '{"category": null, "lines": []}'),
        ("<think>\nSo.\n</think>\n<answer>\n4\n</answer>", "<think></think>\n<answer></answer>"),
        ("```python\ndef f():\n    return 1\n```", "```python\n```"),
    ],
)
def test_the_form_without_the_content(gold: str, form: str) -> None:
    found = texts([gold])
    assert found["format_only"] == form
    assert form in found["mentions"]


def test_a_thought_of_the_gold_is_not_the_unfinished_one() -> None:
    assert texts(["So.\n</think>\n4"])["unfinished_thought"] == "<think>\n4"


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("10", "10.0", True),
        ("1,000", "1000", True),
        ("0.5", "1/2", True),
        ("The  Sea", "the sea", True),
        ("10", "100", False),
        (r"\boxed{4}", r"\boxed{14}", False),
        (CALL, {**CALL, "content": ""}, True),
        (CALL, {**CALL, "content": "Well."}, False),
    ],
)
def test_golds_that_are_the_same(one: Gold, other: Gold, same: bool) -> None:
    assert (normal(one) == normal(other)) == same


@pytest.mark.parametrize(
    ("prompt", "gold", "holds"),
    [
        ("Calculate 0 + 4.", "4", True),
        ("Calculate 0 + 4.", r"\boxed{4}", True),
        ("Calculate 3 + 4.", "7", False),
        ("Calculate 3 + 14.", "4", False),
        ("Sort: billing or account?", '{"category": "billing"}', True),
        ("My card was charged twice.", '{"category": "billing"}', False),
    ],
)
def test_a_prompt_that_holds_the_gold(prompt: str, gold: str, holds: bool) -> None:
    assert holds_gold(prompt, [gold]) == holds
    assert not holds_gold(prompt, [])


def test_tool_calls() -> None:
    other = {**CALL, "tool_calls": [{"function": {"name": "look_up", "arguments": '{"n": 2}'}}]}
    found = {probe.kind: probe for probe in made([CALL], [other])}
    assert found["gold"].answer == CALL
    assert found["other_gold"].answer == other
    assert '"arguments": "{\\"n\\"' in found["truncated"].text
    assert json.loads(found["format_only"].text) == [{"name": "", "arguments": "{}"}]
    assert "guesses" not in found


def test_programs() -> None:
    found = made(["```python\nimport math\ndef double(n):\n    return 2 * n\n```"])
    kinds = [probe.kind for probe in found]
    assert kinds.count("exits") == 2
    tests = {"kind": "function", "entry_point": "double", "cases": [{"args": [3], "kwargs": {}, "expected": 6}]}
    values = {
        p.text: grade_code(p.text, tests).value for p in found if p.kind in ("exits", "always_equal", "does_nothing")
    }
    assert len(values) == 4
    assert set(values.values()) == {0.0}
    assert "does_nothing" not in texts(["```python\nthis is no Python\n```"])


def test_cut_answers_are_marked() -> None:
    assert {probe.kind for probe in made(["14"]) if probe.cut} == {"unfinished_thought", "truncated"}


def test_a_form_of_json_is_off_schema() -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    assert grade_json(texts(['{"n": 3}'])["format_only"], schema).value == 0.0
