"""`headway check-rewards` as a whole: the house's tasks are clean, planted faults are found, and the report says where."""

from __future__ import annotations

import importlib.util
import json
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import planted_rewards as planted
import pytest
from reward_models import write_reward_model

from orchestrator import check_rewards, cli
from orchestrator.reward_check import MAX_TIMED_OUT
from orchestrator.reward_check_report import Report
from orchestrator.reward_findings import Finding
from reward_workers.builtin import arithmetic_reward
from reward_workers.code import grade_code
from reward_workers.math import grade_math
from reward_workers.structured import grade_json, grade_tags
from reward_workers.tool_calls import grade_tool_calls

pytestmark = pytest.mark.thorough

ROWS = [{"id": n, "prompt": f"Say {word}.", "answer": word} for n, word in enumerate(planted.WORDS)]


@pytest.fixture(autouse=True)
def same_logging() -> Iterator[None]:
    level = logging.getLogger().level
    yield
    logging.getLogger().setLevel(level)


class Checker:
    """Checks rewards over rows in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.out = folder / "out"

    def rows(self, rows: Sequence[dict[str, Any]], name: str = "rows") -> Path:
        path = self.folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    def __call__(
        self, reward: Any, *overrides: str, rows: Sequence[dict[str, Any]] = ROWS, template: str | None = "{answer}"
    ) -> Report:
        gold = [f"check_rewards.gold_template='{template}'"] if template is not None else []
        keys = [f"check_rewards.out={self.out}", "logging.console=plain", *gold, *overrides]
        return check_rewards(data={"mine": self.rows(rows)}, reward=reward, overrides=keys)


@pytest.fixture
def check(tmp_path: Path) -> Checker:
    return Checker(tmp_path)


def errors(report: Report) -> dict[str, Finding]:
    return {finding.what: finding for finding in report.findings if finding.level == "error"}


def warnings(report: Report) -> dict[str, Finding]:
    return {finding.what: finding for finding in report.findings if finding.level == "warning"}


@pytest.mark.parametrize(
    ("reward", "found"),
    [
        (planted.exact, set()),
        (planted.pays_nothing, {"empty", "whitespace"}),
        (planted.pays_a_quote, {"echo"}),
        (planted.pays_a_beginning, {"lookalike"}),
        (planted.pays_a_list, {"guesses"}),
        (planted.pays_thoughts, {"unfinished_thought"}),
        (planted.pays_flattery, {"injection"}),
        (planted.pays_any_word, {"other_gold", "lookalike"}),
        ([planted.exact, planted.pays_by_total], {"empty"}),
    ],
)
def test_planted_faults_are_found(check: Checker, reward: Any, found: set[str]) -> None:
    report = check(reward)
    assert set(errors(report)) == found
    assert report.clean == (not found)
    assert report.figures["data.train.mine"]["gold"].paid == len(ROWS)
    for what, finding in errors(report).items():
        assert finding.source == "data.train.mine"
        assert {case.probe for case in finding.cases} == {what}
        assert {case.prompt_id for case in finding.cases} <= {f"mine:{row['id']}" for row in ROWS}


def test_the_lookalike_is_named_with_its_row(check: Checker) -> None:
    (case,) = errors(check(planted.pays_a_beginning))["lookalike"].cases
    assert (case.prompt_id, case.answer, case.value) == ("mine:2", '"sixty"', 1.0)


def test_what_is_allowed_is_no_finding(check: Checker) -> None:
    report = check(planted.pays_thoughts, "check_rewards.allow=[unfinished_thought]")
    assert report.clean
    assert report.figures["data.train.mine"]["unfinished_thought"].paid == len(ROWS)


# Golds


def test_golds_that_do_not_pay(check: Checker) -> None:
    rows = [*ROWS, {"id": "typo", "prompt": "Say ten.", "answer": "tne", "wanted": "ten"}]

    report = check(planted.wanted, rows=rows)
    (case,) = errors(report)["gold"].cases
    assert (case.prompt_id, case.answer) == ("mine:typo", '"tne"')
    assert "no more than the worst answer" in case.note or "is needed" in case.note
    report = check(planted.wanted, "check_rewards.max_gold_failures=1", rows=rows)
    assert report.clean
    assert "gold" in warnings(report)


def test_a_gold_must_satisfy_the_whole_set(check: Checker) -> None:
    functions = {
        "right": "{path: 'planted_rewards.exact'}",
        "form": "{path: 'planted_rewards.never', gate: true}",
    }
    overrides = [f"reward.functions.{name}={value}" for name, value in functions.items()]
    report = check(None, "reward=custom", *overrides, "reward.primary=right")
    assert {case.note for case in errors(report)["gold"].cases} == {"its total 0 is no more than the worst answer's"}
    report = check([planted.exact, planted.in_capitals])
    assert report.clean
    assert warnings(report)["constant"].message.startswith("in_capitals gives 0 to every answer")


def test_rows_with_reward_functions_of_their_own(check: Checker) -> None:
    rows = [{**row, "reward": "exact" if row["id"] else "pays_nothing"} for row in ROWS]
    report = check([planted.exact, planted.pays_nothing], rows=rows)
    assert {case.prompt_id for finding in errors(report).values() for case in finding.cases} == {"mine:0"}
    assert set(errors(report)) == {"empty", "whitespace"}


def test_without_a_gold_it_says_how_to_give_one(check: Checker) -> None:
    report = check(planted.pays_nothing, template=None)
    assert set(errors(report)) == {"empty", "whitespace"}
    assert "no right answer is known for 4 of 4 rows" in warnings(report)["no_gold"].message
    assert "check_rewards.gold_template" in warnings(report)["no_gold"].message


def test_a_gold_of_a_column_and_of_the_functions_own(check: Checker) -> None:
    rows = [{**row, "whole": f"It is {row['answer']}"} for row in ROWS] + [{"id": 9, "prompt": "?", "answer": "nil"}]

    report = check(planted.exact, "check_rewards.gold_column=whole", rows=rows, template=None)
    assert len(errors(report)["gold"].cases) == 4
    assert "1 of 5 rows (mine:9)" in warnings(report)["no_gold"].message
    assert check(planted.said, rows=rows, template=None).clean


def test_of_several_golds_the_one_counts_that_the_whole_set_pays(check: Checker) -> None:
    rows = [{"id": n, "prompt": f"{n} + 40?", "answer": str(n + 40)} for n in range(4)]
    report = check([grade_math, grade_tags], rows=rows, template=None)
    assert report.clean
    gold = report.figures["data.train.mine"]["gold"]
    assert (gold.mean, gold.components["grade_math"][0], gold.components["grade_tags"][0]) == (2.0, 1.0, 1.0)


# Failures


def test_what_is_too_slow_is_found_and_not_waited_for(check: Checker) -> None:
    rows = [{"id": n, "prompt": f"Say {n}.", "answer": f"word {n}"} for n in range(20)]
    report = check(planted.slow, "reward.timeout_s=0.2", rows=rows)
    late = errors(report)["timed_out"]
    assert late.message.startswith("slow is timed_out on ")
    assert {case.total for case in late.cases} == {None}
    assert all("no result within 0.2 s" in case.note for case in late.cases)
    assert len(late.cases) >= MAX_TIMED_OUT
    assert "drawn rows were left out" in errors(report)["left_out"].message
    assert max(report.latencies_s["slow"]) > 0.2
    assert report.figures["data.train.mine"]["gold"].statuses == {"scored": report.sources["data.train.mine"]["rows"]}


def test_what_raises_is_found_and_is_no_zero(check: Checker) -> None:
    report = check(planted.raises)
    failed = errors(report)["errored"]
    assert failed.message == "raises is errored on 8 answers"
    assert {case.probe for case in failed.cases} == {"empty", "whitespace"}
    assert "IndexError: list index out of range" in failed.cases[0].note
    empty = report.figures["data.train.mine"]["empty"]
    assert (empty.mean, empty.statuses) == (None, {"errored": 4})


def test_a_gold_that_can_not_be_read(check: Checker) -> None:
    rows = [{"id": n, "prompt": "?", "answer": answer} for n, answer in enumerate(("3", "\\frac{1}{"))]
    report = check(grade_math, rows=rows, template=None)
    assert {case.prompt_id for case in errors(report)["unparseable_answer"].cases} == {"mine:1"}
    assert [case.prompt_id for case in errors(report)["gold"].cases] == ["mine:1"]


# Ready-made rewards


SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {**SCHEMA, "required": ["n"]}}}]
SOLUTIONS = {
    "double": ("def double(n):\n    return 2 * n", [3], 6),
    "square": ("def square(n):\n    return n * n", [3], 9),
}
PROGRAMS = [
    {
        "id": name,
        "prompt": f"Write {name}.",
        "solution": solution,
        "tests": {
            "kind": "function",
            "entry_point": name,
            "cases": [{"args": arguments, "kwargs": {}, "expected": expected}],
        },
    }
    for name, (solution, arguments, expected) in SOLUTIONS.items()
]


@pytest.mark.parametrize(
    ("reward", "rows", "allow"),
    [
        (grade_math, [{"id": a, "prompt": "?", "answer": a} for a in ("1/2", "14", "4", "(1, 2)", "B")], ""),
        (grade_json, [{"id": n, "prompt": "?", "schema": SCHEMA, "answer": {"n": n}} for n in (1, 14)], ""),
        (grade_json, [{"id": n, "prompt": "?", "schema": SCHEMA} for n in (1, 14)], ""),
        (grade_tags, [{"id": n, "prompt": "?", "answer": str(n)} for n in (1, 14)], "other_gold,lookalike"),
        (grade_tool_calls, [{"id": n, "prompt": "?", "tools": TOOLS} for n in (1, 14)], ""),
        (grade_code, PROGRAMS, ""),
        (arithmetic_reward, [{"id": n, "prompt": "?", "answer": str(n)} for n in (4, 14, 7)], ""),
    ],
)
def test_ready_made_rewards_are_clean(check: Checker, reward: Any, rows: list[dict[str, Any]], allow: str) -> None:
    report = check(reward, f"check_rewards.allow=[{allow}]", rows=rows, template=None)
    assert errors(report) == {}
    assert "no_gold" not in warnings(report)
    gold = report.figures["data.train.mine"]["gold"]
    assert gold.paid == gold.answers == len(rows)


def test_programs_bring_their_own_probes_and_the_sandbox_is_described(check: Checker) -> None:
    report = check(grade_code, rows=PROGRAMS, template=None)
    assert {"exits", "does_nothing", "always_equal"} <= report.figures["data.train.mine"].keys()
    assert report.sandbox is not None
    assert report.sandbox["level"].startswith(("2 (confined)", "3 (separated)"))
    assert check(planted.exact).sandbox is None


def test_a_careless_grader_of_programs(check: Checker) -> None:
    report = check(planted.careless_tests, rows=PROGRAMS, template=None)
    assert set(errors(report)) == {"exits", "always_equal", "errored"}  # os._exit takes its process with it
    assert {case.probe for case in errors(report)["errored"].cases} == {"exits"}


# Reward models


@pytest.mark.thorough
def test_a_reward_model_is_a_component_like_any_other(check: Checker) -> None:
    folder = write_reward_model(check.folder / "rm")
    keys = ["reward=custom", f"reward.models.taste={{path: '{folder}', dtype: float32}}"]
    report = check(planted.exact, *keys, "check_rewards.pays=0.5", "placement.device=cpu")
    gold = report.figures["data.train.mine"]["gold"]
    assert set(gold.components) == {"exact", "taste"}
    assert gold.components["exact"] == (1.0, 0.0)
    assert gold.components["taste"][1] > 0


# The checker


def test_reward_and_checker_side_by_side(check: Checker) -> None:
    report = check(planted.begins_right, "eval.checker={path: 'planted_rewards.exact'}")
    agreement = report.agreements["data.train.mine"]
    assert not isinstance(agreement, str)
    assert agreement.counts[True, True] == 4
    assert agreement.counts[False, True] == 0
    assert {case.probe for case in agreement.differing} == {"long"}
    assert agreement.counts[True, False] == len(agreement.differing) == 4
    assert agreement.share == pytest.approx(1 - 4 / sum(agreement.counts.values()))


@pytest.mark.parametrize(
    ("checker", "why"),
    [
        (None, "there is no eval.checker"),
        ("planted_rewards.exact", "eval.checker is the reward 'exact' itself"),
        ("reward_workers.builtin.arithmetic_checker", "takes dataset, which nothing supplies"),
    ],
)
def test_why_there_is_nothing_to_compare(check: Checker, checker: str | None, why: str) -> None:
    keys = [] if checker is None else [f"eval.checker={{path: '{checker}'}}"]
    functions = ["reward.functions.exact={path: 'planted_rewards.exact'}"]
    found = check(None, "reward=custom", *functions, *keys).agreements["data.train.mine"]
    assert isinstance(found, str)
    assert why in found


def test_a_set_of_evaluation_is_judged_by_its_checker(check: Checker) -> None:
    held_out = check.rows(ROWS[:2], "held_out")
    keys = [f"data.eval.held_out.path={held_out}", "eval.checker={path: 'planted_rewards.pays_nothing'}"]
    report = check(planted.exact, *keys)
    assert {finding.source for finding in errors(report).values()} == {"data.eval.held_out"}
    assert set(errors(report)) == {"empty", "whitespace"}
    assert check(planted.exact, *keys, "check_rewards.sets=[train]").clean


# The house's own tasks


@pytest.fixture(scope="module")
def judge_url() -> Iterator[str]:
    file = Path(__file__).resolve().parents[2] / "scripts" / "rule_judge.py"
    spec = importlib.util.spec_from_file_location("rule_judge_of_check", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    server = ThreadingHTTPServer(("127.0.0.1", 0), module.Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("experiment", ["quickstart", "triage", pytest.param("judge_rag", marks=pytest.mark.thorough)])
def test_the_house_s_tasks_are_clean(experiment: str, tmp_path: Path, judge_url: str) -> None:
    keys = [f"experiment={experiment}", f"run.dir={tmp_path}", "check_rewards.rows=12", "logging.console=plain"]
    if experiment == "judge_rag":
        keys += [f"reward.functions.judge.options.api_base={judge_url}"]
    report = check_rewards(overrides=keys)
    assert errors(report) == {}
    assert set(warnings(report)) <= {"echo"}
    assert {len(by_kind) for by_kind in report.figures.values()} <= {10, 11, 12}
    for key, by_kind in report.figures.items():
        assert by_kind["gold"].paid == by_kind["gold"].answers >= report.sources[key]["rows"] == 12
    assert (tmp_path / "reward_check" / "report.html").exists()


# The command


Shell = Callable[..., tuple[int, str]]


@pytest.fixture
def shell(check: Checker, capsys: pytest.CaptureFixture[str]) -> Shell:
    def run(reward: str, *overrides: str) -> tuple[int, str]:
        """Exit code and stderr."""
        keys = ["data=files", f"data.train.mine.path={check.rows(ROWS)}", "reward=custom", "logging.console=plain"]
        keys += [f"reward.functions.mine.path='planted_rewards.{reward}'", f"check_rewards.out={check.out}"]
        return cli.main(["check-rewards", *keys, *overrides]), capsys.readouterr().err

    return run


GOLD = "check_rewards.gold_template='{answer}'"


def test_exit_codes_log_and_files(check: Checker, shell: Shell, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert shell("exact", GOLD)[0] == 0
        assert shell("pays_nothing", GOLD)[0] == 1
    assert "empty pays on 4 of 4 rows" in caplog.text
    assert "row 'mine:0', empty: \"\" earns 1" in caplog.text
    assert "and 1 more" in caplog.text
    written = json.loads((check.out / "report.json").read_text())
    assert written["clean"] is False
    assert {finding["what"] for finding in written["findings"]} == {"empty", "whitespace"}
    empty = written["sources"]["data.train.mine"]["probes"]["empty"]
    assert (empty["answers"], empty["paid_share"], empty["mean"]) == (4, 1.0, 1.0)
    assert set(written["latency_s"]["mine"]) == {"calls", "p50", "p95", "max"}
    page = (check.out / "report.html").read_text()
    assert "<td>&lt;think&gt;" not in page
    assert "empty pays on 4 of 4 rows" in page
    assert "<script src=" not in page
    assert "empty pays on 4" in (check.out / "logs" / "driver.log").read_text()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("check_rewards.allow=[ecko]", "check_rewards.allow: there is no ecko; expected some of empty, "),
        ("check_rewards.allow=[gold]", "check_rewards.allow: there is no gold"),
        ("check_rewards.sets=[test]", "check_rewards.sets: there is no test; expected some of train, eval"),
        ("check_rewards.sets=[]", "check_rewards.sets=[]: expected some of train, eval"),
        ("check_rewards.rows=0", "check_rewards.rows=0: expected at least 1"),
        ("check_rewards.pays=1.5", "check_rewards.pays=1.5: expected at most 1"),
        ("check_rewards.gold_template='{anser}'", "check_rewards.gold_template: no source has a column anser"),
        ("check_rewards.gold_template='{answer'", "names of columns stand in braces"),
        ("check_rewards.gold_template='{}'", "empty braces"),
        (
            "check_rewards.gold_column=gold",
            "check_rewards.gold_column: no source has a column gold; there are answer, id",
        ),
        ("check_rewards.sets=[eval]", "data: no source of prompts"),
        ("reward.functions.mine.path=no_such.thing", "there is no module 'no_such'"),
    ],
)
def test_mistakes_are_found_before_anything_starts(check: Checker, shell: Shell, override: str, message: str) -> None:
    code, said = shell("exact", override)
    assert code == 2
    assert said.startswith("headway: ")
    assert message in said
    assert not check.out.exists()


def test_both_kinds_of_gold(shell: Shell) -> None:
    code, said = shell("exact", GOLD, "check_rewards.gold_column=answer")
    assert code == 2
    assert "both say what a gold is" in said


def test_the_same_rows_are_drawn_for_the_same_seed(check: Checker) -> None:
    rows = [{"id": n, "prompt": f"Say {n}.", "answer": f"word {n}"} for n in range(40)]

    def judged(seed: int) -> list[str]:
        report = check(planted.pays_nothing, "check_rewards.rows=5", f"run.seed={seed}", rows=rows)
        assert report.sources["data.train.mine"]["rows"] == 5
        return [case.prompt_id for case in errors(report)["empty"].cases]

    assert judged(1) == judged(1) != judged(2)


def test_a_function_of_groups_can_not_find_the_gold_by_its_place(check: Checker) -> None:
    rows = [{"id": n, "prompt": f"Say {n}.", "answer": f"word {n}"} for n in range(12)]
    assert len(errors(check(planted.first_is_best, rows=rows))["gold"].cases) > 6
