"""Tool calls: whole ones are read, others are errors with their call's id; the reported cases by their ids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_workers.json_schema import SchemaError
from reward_workers.reward import RewardFunction, RewardFunctionError, Status
from reward_workers.tool_calls import ToolCall, ToolCallError, grade_tool_calls, read_tool_call
from rollout_workers.trajectory import RewardResult, Trajectory

DATA = Path(__file__).parent.parent / "data" / "reported_bugs.jsonl"
CASES = {case["id"]: case for case in map(json.loads, DATA.read_text().splitlines())}


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [
    tool("shell", cmd={"type": "string"}),
    tool("anything"),
    {"type": "function", "function": {"name": "now"}},  # takes nothing
]


def call(name: Any, arguments: Any, call_id: str = "call_7") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def refused(name: Any, arguments: Any) -> ToolCallError:
    with pytest.raises(ToolCallError) as error:
        read_tool_call(call(name, arguments), TOOLS)
    return error.value


class TestRead:
    def test_a_whole_call(self) -> None:
        assert read_tool_call(call("shell", '{"cmd": "ls"}'), TOOLS) == ToolCall("call_7", "shell", {"cmd": "ls"})
        assert read_tool_call(call("shell", {"cmd": "ls"}), TOOLS).arguments == {"cmd": "ls"}
        assert read_tool_call(call("now", "{}"), TOOLS).arguments == {}

    @pytest.mark.parametrize("name", ["c21", "c22", "c23"])
    def test_cases(self, name: str) -> None:
        error = refused("anything", CASES[name]["input"]["tool_call_arguments"])
        message = error.as_message()
        assert (message["role"], message["tool_call_id"]) == ("tool", "call_7")
        assert "the arguments of anything are no JSON" in json.loads(message["content"])["error"]

    @pytest.mark.parametrize(
        "arguments", ["", " ", None, "null", "[]", '"{}"', "1", b"{}", {"x": {1}}, {"x": float("nan")}]
    )
    def test_no_arguments_are_not_empty_ones(self, arguments: Any) -> None:
        refused("anything", arguments)
        refused("now", arguments)

    @pytest.mark.parametrize("arguments", ["{}", '{"cmd": 1}', '{"cmd": "a", "cmd": "b"}', '{"cmd": NaN}'])
    def test_arguments_that_do_not_fit(self, arguments: str) -> None:
        assert "the arguments of shell" in str(refused("shell", arguments))

    def test_a_tool_that_takes_nothing_is_given_nothing(self) -> None:
        assert "don't fit" in str(refused("now", '{"zone": "UTC"}'))

    @pytest.mark.parametrize("name", ["rm", "", None, ["shell"], "Shell"])
    def test_a_tool_that_is_not_there(self, name: Any) -> None:
        assert "there are: shell, anything, now" in str(refused(name, "{}"))

    @pytest.mark.parametrize("entry", [{}, {"id": None}, {"id": "x", "function": "shell"}])
    def test_an_entry_of_no_form(self, entry: dict[str, Any]) -> None:
        with pytest.raises(ToolCallError, match="there is no tool None"):
            read_tool_call(entry, TOOLS)

    @given(st.text(max_size=30))
    def test_text_is_a_call_or_an_error_never_something_else(self, arguments: str) -> None:
        try:
            read = read_tool_call(call("anything", arguments), TOOLS)
        except ToolCallError:
            return
        assert read.arguments == json.loads(arguments)


def grade(*calls: Any, tools: Any = TOOLS, in_prompt: Any = (), **options: Any) -> RewardResult:
    prompt = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "tool_calls": list(in_prompt)},
        {"role": "user", "content": "again"},
    ]
    written: list[dict[str, Any]] = []
    for one in calls:
        written.append({"role": "assistant", "content": None, "tool_calls": [one]})
        written.append({"role": "tool", "tool_call_id": one["id"], "content": "done"})
    messages = [*prompt, *written, {"role": "assistant", "content": "There."}]
    trajectory = Trajectory.from_messages(messages, metadata={"prompt_length_messages": len(prompt)})
    return grade_tool_calls(trajectory, tools, **options)


class TestGrade:
    def test_all_must_be_whole(self) -> None:
        good, bad = call("shell", '{"cmd": "ls"}'), call("shell", '{"cmd": "ls"')
        assert grade(good, good) == RewardResult(1.0, metrics={"calls": 2.0, "malformed_calls": 0.0})
        result = grade(good, bad)
        assert result.value == 0.0
        assert result.metrics == {"calls": 2.0, "malformed_calls": 0.5}
        assert len(result.detail["errors"]) == 1

    def test_an_answer_without_calls(self) -> None:
        assert grade().value == 0.0
        assert grade().metrics == {"calls": 0.0}
        assert grade(least_calls=0).value == 1.0

    def test_calls_in_the_prompt_are_not_the_policys(self) -> None:
        assert grade(call("now", "{}"), in_prompt=[call("rm", "{}")]).value == 1.0

    def test_tools_as_json_text(self) -> None:
        assert grade(call("now", "{}"), tools=json.dumps(TOOLS)).value == 1.0

    @pytest.mark.parametrize(
        ("tools", "why"),
        [
            ("[", "tools: text that is not JSON.*the text ends"),
            ({}, "expected a list of tool dicts"),
            ([{"name": "shell"}], "expected {'type': 'function'"),
            ([tool("a"), tool("a")], "two of the name 'a'"),
            ([tool("a", x={"type": "nothing"})], "parameters of tool 'a' can't be used"),
        ],
    )
    def test_tools_that_cannot_be_used_are_no_verdict(self, tools: Any, why: str) -> None:
        assert grade(call("a", "{}"), tools=tools).status is Status.UNPARSEABLE_ANSWER
        with pytest.raises(RewardFunctionError, match=why):
            RewardFunction("tools", grade_tool_calls).check_row({"tools": tools})

    def test_a_bad_schema_is_not_the_policys_fault(self) -> None:
        with pytest.raises(SchemaError, match="tool 'a'"):
            read_tool_call(call("a", "{}"), [tool("a", x={"type": "nothing"})])
