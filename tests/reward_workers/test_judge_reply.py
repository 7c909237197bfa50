"""A judge's reply, read strictly: reported mishaps, and no reply that gives a name another's score."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_workers.judge_reply import TIE, ReplyError, find_json, read_better, read_score, read_scores

NAMES = ["bcdf", "ghjk", "lmnp"]
CASES = {
    case["id"]: case
    for line in (Path(__file__).parents[1] / "data" / "reported_bugs.jsonl").read_text().splitlines()
    if (case := json.loads(line))["kind"] == "format"
}


def listed(*entries: dict[str, Any]) -> str:
    return json.dumps({"scores": list(entries)})


def scores(reply: str, names: list[str] = NAMES) -> dict[str, float]:
    return {name: verdict.score for name, verdict in read_scores(reply, names).items()}


WHOLE = [{"id": name, "explanation": "e", "score": i / 4} for i, name in enumerate(NAMES)]


class TestReportedMishaps:
    def test_c13_a_quoted_number_is_a_number_and_a_word_is_an_error(self) -> None:
        case = CASES["c13"]
        assert scores(case["input"]["judge"], ["a"]) == {"a": case["expected"]["score"]}
        with pytest.raises(ReplyError, match="not a score"):
            read_scores('{"score":"good"}', ["a"])

    def test_c14_out_of_range_and_partial_numbers_are_no_scores(self) -> None:
        def accepted(value: Any) -> float | None:
            try:
                return read_score(value)
            except ReplyError:
                return None

        case = CASES["c14"]
        assert [accepted(value) for value in case["input"]["judge_scores"]] == case["expected"]["accepted"]
        for value in ("1.", "15", -0.1, 1.0001, True, None, [0.5], "nan", "١", "1e-1", ""):
            assert accepted(value) is None, value
        assert [accepted(value) for value in (0, 1, "0", ".5", " 0.25 ")] == [0, 1, 0, 0.5, 0.25]

    def test_c15_too_few_scores_are_no_scores(self) -> None:
        with pytest.raises(ReplyError, match=r"2 scores for 3 attempts; these are missing: lmnp"):
            read_scores(listed(*WHOLE[:2]), NAMES)

    def test_c17_other_key_names(self) -> None:
        case = CASES["c17"]
        (verdict,) = read_scores(case["input"]["judge"], ["a"]).values()
        assert (verdict.score, verdict.explanation) == (case["expected"]["score"], "ok")
        with pytest.raises(ReplyError, match="expected"):
            read_scores('{"points": 0.92}', ["a"])

    def test_c18_what_stands_in_the_thinking_block_does_not_count(self) -> None:
        case = CASES["c18"]
        assert find_json(case["input"]["judge"]) == [case["expected"]]


class TestScores:
    @pytest.mark.parametrize(
        "reply",
        [
            listed(*reversed(WHOLE)),
            json.dumps(WHOLE),
            json.dumps({name: i / 4 for i, name in enumerate(NAMES)}),
            json.dumps({"scores": {name: {"rating": i / 4} for i, name in enumerate(NAMES)}}),
            json.dumps({"results": [{"trajectory_id": e["id"], "score": e["score"]} for e in WHOLE]}),
            f"Here you are:\n```json\n{listed(*WHOLE)}\n```\nDone {{really}}.",
            f'<think>maybe {listed(*WHOLE[::-1][:2])} or "so {{ </think>{listed(*WHOLE)}',
            listed(*WHOLE) + "\nOnce more: " + listed(*WHOLE[::-1]),
            "\n".join(map(json.dumps, WHOLE)),
            json.dumps({"Scores": [{"ID": e["id"], "Score": e["score"]} for e in WHOLE]}),
            json.dumps([{**e, "grade": "B", "rating": e["score"]} for e in WHOLE]),
            f"<think>a</think>\n<think>b {listed(*WHOLE[::-1][:1])}</think>{listed(*WHOLE)}",
            f"draft {listed(*WHOLE[:2])}</think>{listed(*WHOLE)}",  # the prompt began the thought
            f"First: <think>{listed(*WHOLE[:2])}</think>{listed(*WHOLE)}",
            json.dumps([{**e, "explanation": "it wrote </think> twice"} for e in WHOLE]),
            # Prose about the marks is none.
            "The response opens <think> and never closes it.\n" + listed(*WHOLE),
            listed(*WHOLE) + " (the reply had a stray </think> in it)",
            listed(*WHOLE) + " without <think> tags.",
            listed(*WHOLE) + "\nNote: the second one has no </think>.",
            listed(*WHOLE) + f"\n<think>or {listed(*WHOLE[:1])}",
            listed(*WHOLE) + f"\n<think>or {listed(*WHOLE[:1])}</think>\nDone.",
            listed(*WHOLE) + ' The form was {"scores": [{"id": "...", "score": 0.5}]}',
        ],
    )
    def test_are_found_in_every_shape_that_judges_use(self, reply: str) -> None:
        assert scores(reply) == {"bcdf": 0.0, "ghjk": 0.25, "lmnp": 0.5}

    @pytest.mark.parametrize(
        ("reply", "problem"),
        [
            ("", "no JSON"),
            ("I would say 0.5", "no JSON"),
            (listed(*WHOLE)[:-8], "missing|expected"),
            ("<think>" + listed(*WHOLE), "no JSON"),
            (listed(*WHOLE[:2]) + "\n<think>" + listed(*WHOLE), "these are missing: lmnp"),
            (listed(), "0 scores for 3"),
            # Case c11: which of two answers counts would be a guess.
            (listed(*WHOLE) + listed(*({**e, "score": 1} for e in WHOLE)), "several answers that differ"),
            (listed(*WHOLE, WHOLE[0]), "bcdf has two scores"),
            (listed(*WHOLE[:2], {"id": "qrst", "score": 1}), "no attempt 'qrst'"),
            (listed(*WHOLE[:2], {"score": 1}), "no attempt None"),
            (listed(*WHOLE[:2], {"id": ["lmnp"], "score": 1}), "no attempt"),
            (json.dumps([0.0, 0.25, 0.5]), "no attempt None"),
            (listed(*WHOLE[:2], {"id": "lmnp"}), "lmnp has no score"),
            (listed(*WHOLE[:2], {"id": "lmnp", "score": 7}), "lmnp: the score 7 is out of range"),
            (listed(*WHOLE[:2], {"id": "lmnp", "score": 0.5, "rating": 0.75}), "lmnp has several scores that differ"),
            ("\n".join(map(json.dumps, [*WHOLE, WHOLE[0]])), "expected|missing|two scores"),
            (listed(*WHOLE).replace("0.25", "NaN"), "expected|no attempt|missing"),
            ("[" * 100_000, "no JSON"),
            ('{"a": ' * 5_000, "no JSON"),
        ],
    )
    def test_that_can_not_be_used_say_why(self, reply: str, problem: str) -> None:
        with pytest.raises(ReplyError, match=problem):
            read_scores(reply, NAMES)

    @given(st.text(max_size=40), st.permutations(WHOLE), st.text(max_size=40))
    def test_never_get_under_another_name(self, before: str, entries: list[dict[str, Any]], after: str) -> None:
        try:
            found = scores(before + listed(*entries) + after)
        except ReplyError:
            return  # a stray bracket before the list may hide it
        assert found == {"bcdf": 0.0, "ghjk": 0.25, "lmnp": 0.5}


class TestBetter:
    def test_is_a_name_or_a_tie(self) -> None:
        assert read_better('{"explanation": "x", "better": "ghjk"}', NAMES[:2]) == "ghjk"
        assert read_better('<think>{"better": "ghjk"}</think>{"winner": "bcdf"}', NAMES[:2]) == "bcdf"
        assert read_better('{"better": "tie"}', NAMES[:2]) == TIE

    @pytest.mark.parametrize(
        "reply",
        [
            '{"better": true}',
            '{"better": "bcdf", "winner": "ghjk"}',
            '{"better": "the first"}',
            "bcdf",
            '{"best": "bcdf"}',
            "[]",
        ],
    )
    def test_is_nothing_else(self, reply: str) -> None:
        with pytest.raises(ReplyError):
            read_better(reply, NAMES[:2])
