"""Trajectories: tokens, masks and versions that fit each other, or an error that names the answer."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_workers.trajectory import RewardResult, Status, Trajectory, TrajectoryGroup, VersionSpan

DATA = Path(__file__).parent.parent / "data" / "reported_bugs.jsonl"
CASES: dict[str, dict[str, Any]] = {case["id"]: case for case in map(json.loads, DATA.read_text().splitlines())}


def make(mask: list[bool], spans: tuple[VersionSpan, ...] = (), **changes: Any) -> Trajectory:
    arguments: dict[str, Any] = {
        "group_id": "g7",
        "index": 2,
        "prompt_id": "p1",
        "messages": (),
        "token_ids": np.arange(len(mask), dtype=np.int32),
        "response_mask": np.array(mask, dtype=bool),
        "behaviour_logprobs": np.zeros(len(mask), dtype=np.float32),
        "version_spans": spans,
        "finish_reason": "stop",
    }
    return Trajectory(**(arguments | changes))


@st.composite
def spans_and_mask(draw: st.DrawFn) -> tuple[list[bool], tuple[VersionSpan, ...]]:
    """Spans in order, some touching each other, and the mask they cover."""
    mask: list[bool] = []
    spans = []
    for version in range(draw(st.integers(1, 4))):
        mask += [False] * draw(st.integers(0, 3))
        length = draw(st.integers(1, 4))
        spans.append(VersionSpan(len(mask), len(mask) + length, version))
        mask += [True] * length
    return mask + [False] * draw(st.integers(0, 3)), tuple(spans)


@given(spans_and_mask())
def test_every_sampled_token_has_the_version_that_wrote_it(made: tuple[list[bool], tuple[VersionSpan, ...]]) -> None:
    mask, spans = made
    trajectory = make(mask, spans)
    versions = trajectory.token_versions
    assert ((versions >= 0) == trajectory.response_mask).all()
    for span in spans:
        assert (versions[span.start : span.end] == span.version).all()
    assert trajectory.response_length == sum(mask)


@given(spans_and_mask(), st.data())
def test_spans_that_do_not_cover_exactly_the_sampled_tokens_are_refused(
    made: tuple[list[bool], tuple[VersionSpan, ...]], data: st.DataObject
) -> None:
    mask, spans = made
    position = data.draw(st.integers(0, len(mask) - 1))
    mask[position] = not mask[position]
    with pytest.raises(ValueError, match=r"trajectory g7/2 \(prompt p1\): version span"):
        make(mask, spans)


@pytest.mark.parametrize(
    "spans",
    [
        (VersionSpan(2, 3, 0), VersionSpan(0, 2, 1)),
        (VersionSpan(0, 2, 0), VersionSpan(1, 3, 1)),
        (VersionSpan(0, 4, 0),),
        (VersionSpan(-1, 3, 0),),
        (VersionSpan(0, 0, 0), VersionSpan(0, 3, 1)),
    ],
)
def test_spans_out_of_order_or_range_are_refused(spans: tuple[VersionSpan, ...]) -> None:
    with pytest.raises(ValueError, match=r"trajectory g7/2 .* out of order or out of range"):
        make([True, True, True], spans)


@pytest.mark.parametrize("name", ["token_ids", "response_mask", "behaviour_logprobs"])
def test_unequal_lengths_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"trajectory g7/2 \(prompt p1\): .* must be equally many"):
        make([True, True], **{name: np.zeros(3)})


def test_e09_a_logprob_too_many_is_an_error_that_names_the_answer() -> None:
    case = CASES["e09"]["input"]
    with pytest.raises(ValueError, match=r"g7/2 .*10 token ids, 10 mask entries and 11 logprobs"):
        make([True] * case["token_ids_len"], behaviour_logprobs=np.zeros(case["logprobs_len"]))


def test_e21_a_mask_of_another_length_is_an_error_that_names_the_answer() -> None:
    case = CASES["e21"]["input"]
    with pytest.raises(ValueError, match=r"g7/2 .*65 token ids, 80 mask entries"):
        make([True] * case["ids_len"], response_mask=np.ones(case["mask_len"], dtype=bool))


def test_e22_masks_of_ones_and_zeros_mean_what_masks_of_truths_mean() -> None:
    """As an index, an array of numbers would pick the tokens 0 and 1."""
    trajectory = make([True] * 4, token_ids=[5, 6, 7, 8], response_mask=[0, 1, 0, 1], behaviour_logprobs=[0, -1, 0, -2])
    assert trajectory.token_ids[trajectory.response_mask].tolist() == [6, 8]
    assert (trajectory.response_length, trajectory.prompt_length) == (2, 1)
    found = (trajectory.token_ids.dtype, trajectory.response_mask.dtype, trajectory.behaviour_logprobs.dtype)
    assert found == (np.int32, np.bool_, np.float32)
    ids = np.arange(4, dtype=np.int32)
    assert make([True] * 4, token_ids=ids).token_ids is ids


@pytest.mark.parametrize(
    "wrong",
    [
        {"response_mask": [0, 1, 2]},
        {"response_mask": [0, 0.5, 1]},
        {"token_ids": [1, 2, 2.5]},
        {"token_ids": np.zeros((3, 1), dtype=np.int32)},
        {"token_ids": np.array([1, 2, 2**32])},
        {"token_ids": [1, 2, 2**70]},
        {"token_ids": [1, 2, None]},
        {"token_ids": [1, 2, "x"]},
        {"token_ids": [[1], [2, 3], [4]]},
        {"response_mask": [[True], [True, False], [True]]},
        {"behaviour_logprobs": [None, -1.0, -2.0]},
        {"behaviour_logprobs": ["-1", "-2", "-3"]},
        {"behaviour_logprobs": [-1.0, -2.0, -3.0 + 1j]},
        {"behaviour_logprobs": [-1.0, -2.0, -1e300]},
        {"behaviour_logprobs": [[-1.0], [-2.0, -3.0], [0.0]]},
    ],
)
def test_what_is_no_token_or_no_mask_is_refused(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(ValueError, match=rf"trajectory g7/2 \(prompt p1\): {name}: expected"):
        make([True] * 3, **wrong)


def test_e16_truncated_is_what_the_engine_says_not_what_the_last_token_is() -> None:
    case = CASES["e16"]
    stopped = make([True, True], finish_reason=case["input"]["finish_reason"])
    assert stopped.truncated is case["expected"]["truncated"]
    assert stopped.response_length == 2  # the mask is kept
    assert make([True, True], finish_reason="length").truncated


def test_a_logprob_that_the_engine_does_not_know_is_nan() -> None:
    given = [-0.1, math.nan, -math.inf]
    logprobs = make([True] * 3, behaviour_logprobs=given).behaviour_logprobs
    assert logprobs.dtype == np.float32
    np.testing.assert_array_equal(logprobs, np.array(given, dtype=np.float32))
    assert make([True] * 3, behaviour_logprobs=[0, -1, -2]).behaviour_logprobs.tolist() == [0, -1, -2]


def test_completion_is_the_last_thing_the_policy_said() -> None:
    messages = (
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": "Let me see."},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "4"},
        {"role": "tool", "content": "end"},
    )
    trajectory = Trajectory.from_messages(messages)
    assert trajectory.completion == "4"
    assert trajectory.prompt_messages == messages[:1]
    assert trajectory.turns == 2
    assert Trajectory.from_messages(messages[:1]).completion == ""
    assert Trajectory.from_messages([{"role": "assistant", "content": None}]).completion == ""
    parts = [{"type": "text", "text": "4"}, {"type": "image_url", "image_url": {}}, {"type": "text", "text": "2"}]
    assert Trajectory.from_messages([{"role": "assistant", "content": parts}]).completion == "42"
    assert Trajectory.from_messages([{"role": "assistant", "content": ["4", *parts[1:]]}]).completion == "42"


def test_a_prompt_may_hold_turns_of_the_assistant() -> None:
    messages = (
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "2 + 2?"},
    )
    choice = {"message": {"role": "assistant", "content": "4"}, "finish_reason": "length"}
    trajectory = Trajectory.from_messages(messages, choice)
    assert trajectory.prompt_messages == messages
    assert trajectory.completion == "4"
    assert trajectory.truncated


@pytest.mark.parametrize("as_object", [True, False])
def test_a_choice_with_ids_and_logprobs_brings_its_tokens(as_object: bool) -> None:
    choice: Any = {
        "message": {"role": "assistant", "content": "4"},
        "finish_reason": "stop",
        "token_ids": [5, 6],
        "logprobs": {"content": [{"logprob": -0.5}, {"logprob": -0.25}]},
    }
    if as_object:
        content = [SimpleNamespace(logprob=-0.5), SimpleNamespace(logprob=-0.25)]
        choice = SimpleNamespace(
            message=SimpleNamespace(content="4"),
            finish_reason="stop",
            token_ids=[5, 6],
            logprobs=SimpleNamespace(content=content),
        )
    trajectory = Trajectory.from_messages([{"role": "user", "content": "2 + 2?"}], choice, group_id="g", index=1)
    assert trajectory.token_ids.tolist() == [5, 6]
    assert trajectory.behaviour_logprobs.tolist() == [-0.5, -0.25]
    assert trajectory.response_mask.all()
    assert trajectory.completion == "4"


def test_e19_a_choice_keeps_all_that_its_message_says() -> None:
    """Reasoning and tool calls too, whatever kind of object it is; what it does not say is absent."""
    said: dict[str, Any] = {"content": "c", "reasoning_content": "r", "tool_calls": [{"id": "1"}]}
    plain = SimpleNamespace(role="assistant", **said, refusal=None)
    dumping = SimpleNamespace(model_dump=lambda exclude_none: {"role": "assistant", **said})
    for message in ({"role": "assistant", **said}, plain, dumping):
        assert Trajectory.from_messages([], SimpleNamespace(message=message)).messages == (
            {"role": "assistant", **said},
        )
    silent = Trajectory.from_messages([], {"message": SimpleNamespace(content=None, tool_calls=[{"id": "1"}])})
    assert silent.messages == ({"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},)


@pytest.mark.parametrize("messages", [[{"content": "a"}], "hello", [SimpleNamespace(content="a")]])
def test_a_message_without_a_role_is_named(messages: Any) -> None:
    with pytest.raises(ValueError, match="trajectory g/3: message 0 has no role"):
        Trajectory.from_messages(messages, group_id="g", index=3)


@pytest.mark.parametrize(("ids", "logprob", "name"), [([5.5], -1.0, "token_ids"), ([5], None, "behaviour_logprobs")])
def test_a_choice_of_what_are_no_tokens_is_named(ids: list[Any], logprob: Any, name: str) -> None:
    choice = {"message": {"role": "assistant"}, "token_ids": ids, "logprobs": {"content": [{"logprob": logprob}]}}
    with pytest.raises(ValueError, match=rf"trajectory g/3 .*: {name}: expected"):
        Trajectory.from_messages([], choice, group_id="g", index=3)


def test_a_choice_whose_ids_and_logprobs_differ_is_refused() -> None:
    choice = {"message": {"role": "assistant", "content": "4"}, "token_ids": [5, 6], "logprobs": {"content": []}}
    with pytest.raises(ValueError, match="choice 3 has 2 token ids and 0 logprobs"):
        Trajectory.from_messages([], choice, index=3)


def test_a_reward_is_a_number_or_a_status() -> None:
    assert RewardResult(0.0).status is Status.SCORED
    assert RewardResult(None, Status.TIMED_OUT).value is None
    with pytest.raises(ValueError, match="a number or a status"):
        RewardResult(0.0, Status.ERRORED)
    with pytest.raises(ValueError, match="a number or a status"):
        RewardResult(None)
    for value in (math.nan, math.inf):
        with pytest.raises(ValueError, match="must be finite"):
            RewardResult(value)


def test_a_reward_leaves_the_rest_as_it_was() -> None:
    trajectory = make([True], (VersionSpan(0, 1, 4),))
    scored = trajectory.with_reward(RewardResult(1.0))
    assert trajectory.reward is None
    assert scored.reward == RewardResult(1.0)
    assert scored.version_spans == trajectory.version_spans


def test_a_group_takes_only_its_own_answers() -> None:
    with pytest.raises(ValueError, match="group other was given a trajectory of group g7"):
        TrajectoryGroup("other", "p1", (make([True]),))
    group = TrajectoryGroup.from_messages(
        [[{"role": "assistant", "content": text}] for text in "ab"],
        group_id="g",
        prompt_id="p",
        columns={"answer": "a"},
    )
    assert [t.index for t in group.trajectories] == [0, 1]
    assert [t.completion for t in group.trajectories] == ["a", "b"]
    assert group.columns == {"answer": "a"}
