"""Tool calls, read strictly: a call is whole and fits its tool, or it is an error that says why.

Contract:
- Arguments are one strict JSON object (`reward_workers.strict_json`). Those that can't be read never become `{}`: a
  tool that runs with no arguments instead of the policy's does something nobody asked for.
- An error carries the id of its call, and `as_message` is the tool's answer to show the policy, so that the
  conversation can go on.
- `tools` are OpenAI's tool dicts; a tool's `parameters` is a JSON Schema, and without one no arguments are allowed.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reward_workers import strict_json
from reward_workers.function import gold_written_by, rows_checked_by
from reward_workers.json_example import example
from reward_workers.json_schema import Schema, SchemaError
from reward_workers.strict_json import StrictJsonError
from rollout_workers.trajectory import Message, RewardResult, Status, Trajectory

NO_PARAMETERS = {"type": "object", "additionalProperties": False}


@dataclass(frozen=True)
class ToolCall:
    id: str
    name: str
    arguments: dict[str, Any]


class ToolCallError(ValueError):
    """A tool call that can't be carried out; the message says why, in words for the policy."""

    def __init__(self, call_id: str, message: str) -> None:
        super().__init__(message)
        self.call_id = call_id

    def as_message(self) -> dict[str, Any]:
        """The answer to the call: a tool message with the same id."""
        return {"role": "tool", "tool_call_id": self.call_id, "content": json.dumps({"error": str(self)})}


def read_tool_call(call: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> ToolCall:
    """An entry of an assistant message's `tool_calls` (OpenAI's form). Raises ToolCallError.

    Raises SchemaError when the parameters of its tool can't be used.
    """
    call_id = str(call.get("id") or "")
    function = call.get("function")
    function = function if isinstance(function, Mapping) else {}
    schemas = _schemas(json.dumps(list(tools)))
    name = function.get("name")
    if not isinstance(name, str) or name not in schemas:
        raise ToolCallError(call_id, f"there is no tool {name!r}; there are: {', '.join(schemas) or 'none'}")
    given = function.get("arguments")
    try:
        arguments = strict_json.loads(given if isinstance(given, str) else json.dumps(given))
    except (StrictJsonError, TypeError, RecursionError) as error:  # a TypeError: a value that JSON does not have
        raise ToolCallError(call_id, f"the arguments of {name} are no JSON: {error}") from error
    if not isinstance(arguments, dict):
        raise ToolCallError(call_id, f"the arguments of {name} must be a JSON object")
    if (problem := schemas[name].problem(arguments)) is not None:
        raise ToolCallError(call_id, f"the arguments of {name} don't fit: {problem}")
    return ToolCall(call_id, name, arguments)


def check_tools(tools: Any) -> None:
    """Raises ValueError for tools that can't be used."""
    _schemas(json.dumps(_listed(tools)))


def write_tool_calls(tools: Any, least_calls: int = 1) -> Message | None:
    """An assistant message that calls the first tool for which arguments are found easily, as often as is asked for."""
    for tool in _listed(tools):
        parameters = tool["function"].get("parameters") or NO_PARAMETERS
        if isinstance(arguments := example(parameters), dict):
            function = {"name": tool["function"]["name"], "arguments": json.dumps(arguments)}
            calls = [{"id": f"call-{i}", "type": "function", "function": function} for i in range(max(1, least_calls))]
            return {"role": "assistant", "content": "", "tool_calls": calls}
    return None


@rows_checked_by(check_tools)
@gold_written_by(write_tool_calls)
def grade_tool_calls(trajectory: Trajectory, tools: Any, *, least_calls: int = 1) -> RewardResult:
    """Reward function: 1 if every tool call that the policy made is whole and fits its tool, else 0.

    0 also for fewer than `least_calls`. `tools` is a data column or an option: OpenAI's tool dicts, or their JSON text.
    Metrics: `calls` and, where there are some, `malformed_calls` (their share). `detail["errors"]` lists what was wrong. Status
    `unparseable_answer` for tools that can't be used.
    """
    try:
        listed = _listed(tools)
        _schemas(json.dumps(listed))
    except ValueError as error:
        return RewardResult(None, Status.UNPARSEABLE_ANSWER, detail={"error": str(error)})
    written = trajectory.messages[len(trajectory.prompt_messages) :]
    calls = [call for message in written for call in _calls(message)]
    errors = []
    for call in calls:
        try:
            read_tool_call(call, listed)
        except ToolCallError as error:
            errors.append(str(error))
    metrics = {"calls": float(len(calls))} | ({"malformed_calls": len(errors) / len(calls)} if calls else {})
    if len(calls) < least_calls:
        errors.append(f"{len(calls)} tool calls; expected at least {least_calls}")
    return RewardResult(float(not errors), metrics=metrics, detail={"errors": errors} if errors else {})


def _calls(message: Message) -> Sequence[Mapping[str, Any]]:
    return (message.get("tool_calls") or ()) if message.get("role") == "assistant" else ()


def _listed(tools: Any) -> list[Any]:
    """Raises ValueError unless it is a list of tool dicts, or the JSON text of one."""
    try:
        listed = strict_json.loads(tools) if isinstance(tools, str) else tools
    except StrictJsonError as error:
        raise ValueError(f"tools: text that is not JSON: {error}") from error
    if not isinstance(listed, list | tuple):
        raise ValueError(f"tools: expected a list of tool dicts, got {type(tools).__name__}")
    return list(listed)


@functools.lru_cache(maxsize=64)
def _schemas(tools: str) -> dict[str, Schema]:
    """The schema of each tool's arguments by the tool's name, of a list of tool dicts as JSON text. Raises ValueError."""
    schemas: dict[str, Schema] = {}
    for tool in json.loads(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(f"tools: expected {{'type': 'function', 'function': {{'name': …}}}}, got {str(tool)[:80]}")
        name = function["name"]
        if name in schemas:
            raise ValueError(f"tools: two of the name {name!r}")
        try:
            schemas[name] = Schema(function.get("parameters") or NO_PARAMETERS)
        except SchemaError as error:
            raise SchemaError(f"the parameters of tool {name!r} can't be used: {error}") from error
    return schemas
