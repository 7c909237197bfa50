"""Golds that reward functions say of their rows: how they are asked for, and that each pays what it should."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from reward_workers.builtin import arithmetic_checker, arithmetic_reward, hash_reward, synthetic_reward
from reward_workers.code import grade_code
from reward_workers.json_example import example
from reward_workers.json_schema import Schema, SchemaError
from reward_workers.math import grade_math
from reward_workers.rag import grounded
from reward_workers.reward import RewardFunction, RewardFunctionError, gold_written_by
from reward_workers.structured import grade_json, grade_tags
from reward_workers.tool_calls import grade_tool_calls
from reward_workers.triage import category, checker
from rollout_workers.trajectory import RewardResult, Status, Trajectory

N = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
TESTS = {"kind": "function", "entry_point": "f", "cases": [{"args": [3], "kwargs": {}, "expected": 6}]}
SOLUTION = "def f(n):\n    return 2 * n"


def verdict(function: RewardFunction, columns: Mapping[str, Any], gold: Any) -> RewardResult | float:
    message = {"role": "assistant", "content": gold} if isinstance(gold, str) else gold
    trajectory = Trajectory.from_messages([{"role": "user", "content": "?"}, message])
    given = {**columns, **function.options, "completion": trajectory.completion, "trajectory": trajectory}
    return function.loaded(**{name: given[name] for name in function.signature.parameters if name in given})


@pytest.mark.parametrize(
    ("function", "columns", "options"),
    [
        (arithmetic_reward, {"answer": "7"}, {}),
        (arithmetic_checker, {"answer": "7", "dataset": "basic_arithmetic"}, {}),
        (synthetic_reward, {}, {}),
        (category, {"labels": ["billing", "shipping"]}, {}),
        (checker, {"labels": ["account"]}, {}),
        (grounded, {"answer": "12"}, {}),
        (grounded, {"answer": None}, {}),
        (grade_math, {"answer": r"\frac{1}{2}"}, {}),
        (grade_math, {"answer": "So it is 4.\n#### 4"}, {}),
        (grade_math, {"answer": 2.5}, {}),
        (grade_math, {"answer": "B", "choices": ["one", "two"]}, {}),
        (grade_math, {"answer": "7"}, {"opened_thinking": True}),
        (grade_math, {"answer": "7"}, {"require_mark": True}),
        (grade_code, {"tests": TESTS, "solution": SOLUTION}, {}),
        (grade_code, {"tests": TESTS, "solution": f"Here:\n```python\n{SOLUTION}\n```"}, {}),
        (grade_json, {"schema": N, "answer": '{"n": 4}'}, {"fence": "require"}),
        (grade_json, {"schema": N}, {"fence": "refuse"}),
        (grade_tags, {"answer": "4"}, {}),
        (grade_tags, {}, {"tags": ["think"], "text_after": True, "prompt_tail": "<think>\n"}),
        (
            grade_tool_calls,
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": N}}]},
            {"least_calls": 2},
        ),
    ],
)
def test_every_gold_pays(function: Any, columns: dict[str, Any], options: dict[str, Any]) -> None:
    reward = RewardFunction("reward", function, options=options)
    golds = reward.golds(columns)
    assert len(golds) == len(columns.get("labels", [0]))
    for gold in golds:
        result = verdict(reward, columns, gold)
        assert (result.value if isinstance(result, RewardResult) else result) == 1.0


@pytest.mark.parametrize(
    ("function", "columns", "options"),
    [
        (hash_reward, {}, {}),
        (grade_code, {"tests": TESTS}, {}),
        (grade_code, {"tests": TESTS, "solution": None}, {}),
        (grade_json, {"schema": {"type": "string", "pattern": "^x{9}$"}}, {}),
        (grade_tags, {}, {"prompt_tail": "Thoughts:"}),
        (grade_tool_calls, {"tools": []}, {}),
        (arithmetic_reward, {"question": "?"}, {}),
    ],
)
def test_where_no_gold_is_known(function: Any, columns: dict[str, Any], options: dict[str, Any]) -> None:
    assert RewardFunction("reward", function, options=options).golds(columns) == ()


def test_an_answer_that_can_not_be_read_is_still_judged() -> None:
    reward = RewardFunction("reward", grade_math)
    (gold,) = reward.golds({"answer": "\\frac{1}{"})
    result = verdict(reward, {"answer": "\\frac{1}{"}, gold)
    assert isinstance(result, RewardResult)
    assert result.status is Status.UNPARSEABLE_ANSWER


def test_a_writer_takes_columns_and_options() -> None:
    @gold_written_by(lambda a, b, c="c": [a + b, c])
    def reward(completion: str, b: str) -> float:
        return 0.0

    assert RewardFunction("reward", reward, options={"b": "2"}).golds({"a": "1", "b": "0"}) == ("12", "c")
    assert RewardFunction("reward", reward, options={"b": "2"}).golds({}) == ()


def test_a_gold_that_can_not_be_written_names_the_function() -> None:
    @gold_written_by(lambda answer: int(answer))
    def reward(completion: str) -> float:
        return 0.0

    with pytest.raises(RewardFunctionError, match="reward function 'exact' can't write its gold: invalid literal"):
        RewardFunction("exact", reward).golds({"answer": "x"})


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "minLength": 6},
        {"type": "string", "maxLength": 2},
        {"type": "integer", "minimum": 5},
        {"type": "number", "maximum": -2},
        {"type": ["boolean", "null"]},
        {"enum": ["a", "b"]},
        {"const": {"n": [1]}},
        {"anyOf": [{"type": "integer"}, {"type": "string"}]},
        {"type": "array", "items": {"type": "integer"}, "minItems": 3},
        {"type": "object", "properties": {"a": {"type": "string"}, "b": N}, "required": ["b"]},
        {"type": "object", "properties": {"a": {"type": "string"}}},
    ],
)
def test_an_example_satisfies_its_schema(schema: Any) -> None:
    value = example(schema)
    assert value is not None
    assert Schema(schema).problem(value) is None


@pytest.mark.parametrize(
    "schema", [False, {"type": "string", "pattern": "^x$"}, {"$defs": {"n": N}, "$ref": "#/$defs/n"}]
)
def test_where_no_example_is_found(schema: Any) -> None:
    assert example(schema) is None


def test_no_example_of_what_is_no_schema() -> None:
    with pytest.raises(SchemaError):
        example({"type": "strong"})
