"""JSON against a schema and a gold, and text in tags; the reported cases by their ids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_workers.reward import RewardFunction, RewardFunctionError, RewardSet, Status
from reward_workers.structured import check_json_row, grade_json, grade_tags
from reward_workers.worker import RewardWorker
from rollout_workers.trajectory import Trajectory

DATA = Path(__file__).parent.parent / "data" / "reported_bugs.jsonl"
CASES = {case["id"]: case for case in map(json.loads, DATA.read_text().splitlines())}

ORDER = {
    "type": "object",
    "properties": {
        "item": {"type": "string"},
        "price": {"type": "number"},
        "sizes": {"type": "array", "items": {"type": "integer"}},
    },
    "required": ["item", "price"],
    "additionalProperties": False,
}
GOLD = {"item": "hat", "price": 19.99, "sizes": [1, 2]}


def value(completion: str, schema: Any = ORDER, answer: Any = None, **options: Any) -> float | None:
    return grade_json(completion, schema, answer, **options).value


def outcome(completion: str, schema: Any = ORDER, answer: Any = None, **options: Any) -> str:
    return grade_json(completion, schema, answer, **options).detail["outcome"]


class TestCases:
    """The rest of the cases on JSON are judges' (tests of the judge) and tool calls (test_tool_calls)."""

    @pytest.mark.parametrize("name", ["c01", "c02", "c03", "c04"])
    def test_tags(self, name: str) -> None:
        expected = {"c01": 1.0, "c02": 0.0, "c03": 0.0, "c04": 0.0}[name]
        assert grade_tags(CASES[name]["input"]["completion"]).value == expected

    def test_c05_the_template_opened_the_thought(self) -> None:
        case = CASES["c05"]["input"]
        options: dict[str, Any] = {"tags": ["think"], "text_after": True}
        assert grade_tags(case["completion"], prompt_tail=case["prompt_tail"], **options).value == 1.0
        assert grade_tags(case["completion"], **options).value == 0.0

    def test_c09_extra_properties(self) -> None:
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
        completion = CASES["c09"]["input"]["completion"]
        assert value(completion, {**schema, "additionalProperties": False}) == 0.0
        assert value(completion, schema) == 1.0

    @pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e999", "[1, NaN]", '{"a": -Infinity}'])
    def test_c10_numbers_that_json_does_not_have(self, text: str) -> None:
        completion = CASES["c10"]["input"]["completion"]
        assert "NaN" in completion
        result = grade_json(completion.replace("NaN", text), {"type": "object"})
        assert (result.value, result.metrics["valid_json"]) == (0.0, 0.0)

    def test_c11_ambiguity(self) -> None:
        result = grade_json(CASES["c11"]["input"]["completion"], {"type": "object"})
        assert (result.value, result.metrics["valid_json"]) == (0.0, 0.0)
        assert value('{"score": 0}\n{"score": 1}', {"type": "object"}) == 0.0
        assert value('{"score": 1}\n{"score": 1}', {"type": "object"}) == 1.0
        assert value('{"score": 1}\n{"score": 1}', {"type": "object"}, repeats=False) == 0.0

    def test_c24_a_schema_that_cannot_be_read_pays_nothing(self) -> None:
        case = CASES["c24"]["input"]
        result = grade_json(case["completion"], case["schema"])
        assert (result.value, result.status) == (None, Status.UNPARSEABLE_ANSWER)
        assert "schema can't be used" in result.detail["error"]
        function = RewardFunction("json", grade_json)
        with pytest.raises(RewardFunctionError, match="'json' can't judge it: the schema can't be used"):
            function.check_row({"schema": case["schema"]})

    def test_c25_integers(self) -> None:
        case = CASES["c25"]
        valid = [value(text, case["input"]["schema"]) == 1.0 for text in case["input"]["values"]]
        assert valid == case["expected"]["valid"]


class TestJson:
    def test_the_gold_earns_all(self) -> None:
        result = grade_json(json.dumps(GOLD), ORDER, GOLD)
        assert result.value == 1.0
        assert result.metrics == {"valid_json": 1.0, "valid_schema": 1.0, "right_fields": 1.0}
        assert result.detail["outcome"] == "right"

    def test_json_text_serves_as_schema_and_gold(self) -> None:
        assert value(json.dumps(GOLD), json.dumps(ORDER), json.dumps(GOLD)) == 1.0
        assert value("null", True, "null") == 1.0
        assert value("0", True, "null") == 0.0

    @pytest.mark.parametrize(
        ("completion", "what"),
        [
            ('{"item": "hat", "price": 19.99, "sizes": [1, 2]} as asked', "not-json"),
            ('{"item": "hat", "price": "19.99", "sizes": [1, 2]}', "off-schema"),
            ('{"item": "hat", "price": true, "sizes": [1, 2]}', "off-schema"),
            ('{"item": "hat"}', "off-schema"),
            ('{"item": "hat", "price": 19.99}', "wrong"),
            ('{"item": "Hat", "price": 19.99, "sizes": [1, 2]}', "wrong"),
            ('{"item": "hat", "price": 19.99, "sizes": [2, 1]}', "wrong"),
            ('{"item": "hat", "price": 19.99, "sizes": [1, 2, 3]}', "wrong"),
            ('<think>{"item": "hat", "price": 19.99, "sizes": [1, 2]}', "unfinished-thought"),
            ("<think>hm</think>", "not-json"),
            ("", "not-json"),
        ],
    )
    def test_what_earns_nothing(self, completion: str, what: str) -> None:
        assert value(completion, ORDER, GOLD) == 0.0
        assert outcome(completion, ORDER, GOLD) == what

    def test_a_finished_thought_is_not_graded(self) -> None:
        text = f'<think>\nA draft: {{"item": "cap"\n</think>\n{json.dumps(GOLD)}'
        assert value(text, ORDER, GOLD) == 1.0
        assert outcome(text, ORDER, GOLD, thought=False) == "not-json"
        assert value('{"item": "</think>", "price": 1}') == 1.0  # a string is no thought
        assert value('{"item": "<think>", "price": 1}') == 1.0

    @pytest.mark.parametrize(
        ("completion", "earned"),
        [
            ("Here it is: {}. Done {{x}}.", 1.0),
            ("```json\n{}\n```\nor in short {}", 1.0),
            ('<think>{{"item": "cap", "price": 1}}</think>So: {}', 1.0),
            ('{} or {{"item": "cap", "price": 1}}', 0.0),
            ("<think>It is {}</think>I do not know.", 0.0),
            ("<think>It is {}", 0.0),
            ('It is {{"order": {}', 0.0),
            ("It is nothing.", 0.0),
        ],
    )
    def test_within_other_text_where_asked(self, completion: str, earned: float) -> None:
        text = completion.format(*[json.dumps(GOLD)] * 2)
        assert value(text, ORDER, GOLD, other_text=True) == earned
        assert value(text, ORDER, GOLD) == 0.0

    def test_other_text_and_fences_do_not_go_together(self) -> None:
        with pytest.raises(ValueError, match="fence=refuse with other_text=true"):
            check_json_row(ORDER, fence="refuse", other_text=True)

    def test_fences(self) -> None:
        fenced = f"```json\n{json.dumps(GOLD)}\n```"
        assert [value(fenced, fence=policy) for policy in ("allow", "require", "refuse")] == [1.0, 1.0, 0.0]

    def test_equal_answers_are_written_alike(self) -> None:
        one = grade_json('{"b": 1.0, "a": [2]}', True)
        other = grade_json(' {"a":[2.0],\n"b":1} ', True)
        assert one.detail["answer"] == other.detail["answer"] == '{"a": [2], "b": 1}'

    @pytest.mark.parametrize(
        ("schema", "answer", "why"),
        [
            (None, None, "has no schema"),
            ({"type": "nothing"}, None, "schema can't be used"),
            ({"$ref": "#/x"}, None, "leads nowhere"),
            ({"$ref": "#"}, GOLD, "without end"),
            (ORDER, {"item": "hat"}, "does not satisfy the schema: .*'price' is a required"),
            (ORDER, "{not json", "the answer is no JSON"),
            ({"type": "string"}, "hat", "a string needs its quotes"),
            (True, {"a": float("nan")}, "the answer is no JSON"),
            (True, {"a": object()}, "the answer is no JSON"),
            (True, '{"a": 1, "a": 2}', "twice"),
        ],
    )
    def test_a_row_that_cannot_be_used_is_no_verdict(self, schema: Any, answer: Any, why: str) -> None:
        result = grade_json("{}", schema, answer)
        assert (result.value, result.status) == (None, Status.UNPARSEABLE_ANSWER)
        with pytest.raises(ValueError, match=why):
            check_json_row(schema, answer)

    def test_a_schema_without_end_is_found_when_it_is_used(self) -> None:
        assert grade_json("1", {"$ref": "#"}).status is Status.UNPARSEABLE_ANSWER

    @pytest.mark.parametrize(
        ("found", "tolerances", "right"),
        [
            (20.09, {"price": 0.1}, True),  # 0.10000000000000142 as floats
            (20.1, {"price": 0.1}, False),
            (20.1, {"*": 0.2}, True),
            (20.1, {"sizes": 5, "prices": 5, "price.x": 5}, False),
            (20.1899, {"price": "1%"}, True),
            (20.19, {"price": "1%"}, False),
            (19.99, {"price": 0}, True),
        ],
    )
    def test_tolerances(self, found: float, tolerances: Any, right: bool) -> None:
        assert value(json.dumps({**GOLD, "price": found}), ORDER, GOLD, tolerances=tolerances) == float(right)

    def test_tolerances_reach_into_lists_and_spare_booleans(self) -> None:
        gold = {"rows": [{"x": 1.0, "on": True}, {"x": 2.0, "on": False}]}
        near = {"rows": [{"x": 1.01, "on": True}, {"x": 1.99, "on": False}]}
        assert value(json.dumps(near), True, gold, tolerances={"rows.*.x": 0.01}) == 1.0
        assert value(json.dumps(near), True, gold, tolerances={"rows.0.x": 0.01}) == 0.0
        near["rows"][0]["on"] = 1
        assert value(json.dumps(near), True, gold, tolerances={"rows.*.*": 9}) == 0.0

    @pytest.mark.parametrize("bad", [-1, "1", "x%", "-1%", True, float("nan"), float("inf"), None, [1]])
    def test_a_tolerance_that_is_none(self, bad: Any) -> None:
        with pytest.raises(ValueError, match=r"tolerances\.price=.*expected a number from 0, or a percentage"):
            check_json_row(ORDER, GOLD, tolerances={"price": bad})

    def test_options_are_checked_before_a_run(self) -> None:
        with pytest.raises(RewardFunctionError, match="fence=strip: expected one of"):
            RewardFunction("json", grade_json, options={"fence": "strip"}).check_row({"schema": ORDER})
        with pytest.raises(RewardFunctionError, match="no option fences"):
            RewardFunction("json", grade_json, options={"fences": "allow"})

    def test_partial_credit_counts_what_is_too_much(self) -> None:
        def partial(answer: Any) -> float | None:
            return value(json.dumps(answer), True, GOLD, partial=True)

        assert partial(GOLD) == 1.0
        assert partial({"item": "hat", "price": 1, "sizes": [1, 2]}) == 0.75
        assert partial({"item": "hat", "price": 19.99}) == 0.5
        assert partial({**GOLD, "sizes": [1, 2, *range(12)]}) == 0.25
        assert partial({}) == 0.0
        assert partial([]) == 0.0
        assert value("{}", ORDER, GOLD, partial=True) == 0.0  # off the schema

    @given(st.text(max_size=40))
    def test_text_that_is_no_json_never_pays(self, text: str) -> None:
        try:
            json.loads(text)
        except ValueError:
            assert value(text, True) == 0.0 or "```" in text

    @given(st.integers(0, len(json.dumps(GOLD)) - 1))
    def test_a_cut_off_answer_never_pays(self, length: int) -> None:
        assert value(json.dumps(GOLD)[:length], ORDER, GOLD) == 0.0

    def test_as_a_reward_of_a_run(self) -> None:
        rewards = RewardSet([RewardFunction("json", grade_json, options={"tolerances": {"price": 0.1}})])
        members = [
            Trajectory.from_messages(
                [{"role": "user", "content": "?"}, {"role": "assistant", "content": text}], index=index
            )
            for index, text in enumerate([json.dumps({**GOLD, "price": 20}), "no"])
        ]
        with RewardWorker(rewards, retries=0) as worker:
            results = worker.score_group(members, {"schema": json.dumps(ORDER), "answer": GOLD})
        assert [result.value for result in results] == [1.0, 0.0]
        assert [result.metrics["json/valid_json"] for result in results] == [1.0, 0.0]
        assert results[1].detail["json"]["outcome"] == "not-json"


class TestTags:
    @pytest.mark.parametrize(
        "completion",
        [
            "<think>a</think><answer>b</answer>",
            "  <think>a\n\nb</think>\n\n<answer>\nc\n</answer>\n",
            "<think>1 < 2 and a > b</think><answer><b>4</b></answer>",
            "<think>the answers, a thinker</think><answer>x</answer>",
        ],
    )
    def test_right(self, completion: str) -> None:
        assert grade_tags(completion).value == 1.0

    @pytest.mark.parametrize(
        ("completion", "why"),
        [
            ("", "none"),
            ("4", "none"),
            ("I shall write <think> </think> <answer> </answer>", "outside"),
            ("<think>a</think><answer>b</answer> Done.", "outside"),
            ("<think>a</think> so <answer>b</answer>", "outside"),
            ("<think>I need <answer> tags</think><answer>b</answer>", "there are"),
            ("<answer>b</answer><think>a</think>", "there are"),
            ("<think>a<answer>b</answer></think>", "there are"),
            ("<think>a</think><answer>b", "there are"),
            ("<think>a</think><answer>b</answer></answer >", "there are"),
            ("<think>a</think><Answer>x</answer><answer>b</answer>", "there are"),
            ("<think>a</think><answer id=1>b</answer>", "there are"),
            ("<think></think><answer>b</answer>", "<think> is empty"),
            ("<think>a</think><answer> \n</answer>", "<answer> is empty"),
        ],
    )
    def test_wrong(self, completion: str, why: str) -> None:
        result = grade_tags(completion)
        assert result.value == 0.0
        assert why in result.detail["why"]

    def test_the_answer_is_what_the_last_block_holds(self) -> None:
        assert grade_tags("<think>a</think><answer> 4\n</answer>").detail["answer"] == "4"
        result = grade_tags("<think>a</think> It is 4.", tags=["think"], text_after=True)
        assert result.detail["answer"] == "It is 4."
        assert grade_tags("<think>a</think>\n", tags=["think"], text_after=True).value == 0.0
        assert grade_tags("<think>a</think>\n", tags=["think"]).value == 1.0

    def test_blocks_that_may_be_empty(self) -> None:
        completion = "<think>\n\n</think><answer>b</answer>"
        assert grade_tags(completion, may_be_empty=["think"]).value == 1.0

    def test_other_names_in_any_number(self) -> None:
        names = ["plan", "code", "check"]
        text = "".join(f"<{name}>x</{name}>" for name in names)
        assert grade_tags(text, tags=names).value == 1.0
        assert grade_tags(text, tags=names[:2]).value == 0.0

    @pytest.mark.parametrize("tags", [[], ["a", "a"], ["a b"], [""], ["<a>"]])
    def test_names_that_are_none(self, tags: list[str]) -> None:
        with pytest.raises(ValueError, match="expected different names"):
            grade_tags("x", tags=tags)
        with pytest.raises(RewardFunctionError, match="expected different names"):
            RewardFunction("tags", grade_tags, options={"tags": tags}).check_row({})

    @given(st.text(alphabet="<>/ thinkaswer\n", max_size=60), st.integers(0, 60))
    def test_a_text_added_anywhere_outside_costs_the_reward(self, text: str, place: int) -> None:
        right = "<think>a</think><answer>b</answer>"
        places = [0, len("<think>a</think>"), len(right)]
        cut = places[place % 3]
        graded = grade_tags(right[:cut] + text + right[cut:]).value
        assert graded == float(not text.strip())

    def test_any_input_ends_soon(self) -> None:
        for text in ("<think" * 160_000, "<think>" * 140_000, "< " * 500_000, "<think>" + "<" * 900_000):
            assert grade_tags(text).value == 0.0
