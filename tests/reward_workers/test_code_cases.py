"""Faults that users of other graders reported, one test per case, and what `grade_code` promises beside them."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reward_workers import code_runs
from reward_workers.code import check_options, check_row, grade_code
from reward_workers.code_compare import Tolerance, outputs_equal, values_equal
from reward_workers.code_extraction import extract_code
from reward_workers.code_tests import names_in
from reward_workers.function import RewardFunction, RewardFunctionError
from reward_workers.sandbox.host import Zygote
from reward_workers.sandbox.pool import Pool
from reward_workers.sandbox.session import SandboxError
from reward_workers.sandbox.wire import decode, encode
from rollout_workers.trajectory import RewardResult, Status

pytestmark = pytest.mark.thorough

FILE = Path(__file__).resolve().parents[1] / "data" / "reported_bugs.jsonl"
CASES = {case["id"]: case for case in map(json.loads, FILE.read_text().splitlines()) if case["kind"] == "code"}
CHECKS: dict[str, Callable[[dict[str, Any], dict[str, Any]], None]] = {}


def case(identity: str) -> Callable[[Callable[[dict[str, Any], dict[str, Any]], None]], None]:
    def register(check: Callable[[dict[str, Any], dict[str, Any]], None]) -> None:
        CHECKS[identity] = check

    return register


def stdio(expected: str, stdin: str = "") -> dict[str, Any]:
    return {"kind": "stdio", "cases": [{"stdin": stdin, "expected_stdout": expected}]}


def function(expected: Any, *arguments: Any) -> dict[str, Any]:
    return {"kind": "function", "entry_point": "solve", "cases": [{"args": list(arguments), "expected": expected}]}


def outcome(result: RewardResult) -> str:
    assert result.status is Status.SCORED, result
    return str(result.detail["outcome"])


SQUARES = {
    "kind": "function",
    "entry_point": "solve",
    "cases": [{"args": [n], "kwargs": {}, "expected": n * n} for n in (3, 5, 12)],
}
SQUARE = "def solve(n):\n    return n * n"


def asserts(*tests: str, **more: str) -> dict[str, Any]:
    return {"kind": "asserts", "asserts": list(tests), **more}


@case("b03")
def _(given: dict[str, Any], expected: dict[str, Any]) -> None:
    noise = f"print({given['stdout']!r})\ndef solve(n):\n    return 0"
    assert grade_code(noise, SQUARES).value == expected["reward"]
    assert grade_code(noise, asserts("assert solve(3) == 9")).value == expected["reward"]


@case("b05")
def _(given: dict[str, Any], expected: dict[str, Any]) -> None:
    broken = "import sys\nsys.modules['math'] = None\nsys.meta_path.clear()\nraise ImportError('no tests here')"
    result = grade_code(broken, asserts("import math\nassert solve(3) == 9", "assert solve(5) == 25"))
    assert result.value == expected["reward"]
    assert len(result.detail["tests"]) == len(given["expected_tests"])
    assert result.detail["passed"] == 0


@case("b06")
def _(given: dict[str, Any], expected: dict[str, Any]) -> None:
    skip = "import unittest\ndef solve(n):\n    raise unittest.SkipTest('skipped')"
    for tests in (SQUARES, asserts("assert solve(3) == 9")):
        assert grade_code(skip, tests).value == expected["reward"]


@case("b09")
def _(given: dict[str, Any], expected: dict[str, Any]) -> None:
    result = grade_code(given["code"], asserts(given["test"]))
    assert result.value == expected["reward"]
    assert outcome(result) == "crashed"


@case("b10")
def _(given: dict[str, Any], expected: dict[str, Any]) -> None:
    for nothing in ("", None):
        assert grade_code(given["code"], function(nothing, 1)).value == 0
        assert grade_code(f"def solve(x): return {nothing!r}", function(nothing, 1)).value == 1
    assert grade_code(given["code"] + "\nsolve(1)", stdio(given["expected_output"])).value == 0
    assert grade_code("pass", stdio("")).value == 1


@case("b11")
def _(given: dict[str, Any], expected: dict[str, Any]) -> None:
    assert grade_code(given["code"], stdio(given["expected_output"])).value == expected["reward"]


@case("b12")
def _(given: dict[str, Any], expected: dict[str, Any]) -> None:
    tolerance = Tolerance(given["rtol"], given["atol"])
    assert outputs_equal(given["stdout"], given["expected_output"], tolerance)
    assert not outputs_equal("0.3334", given["expected_output"], tolerance)
    assert not outputs_equal("abc", "abd", tolerance)
    assert not outputs_equal("1000001", "1000000", Tolerance(1e-3, 1e-3))
    options = {"rtol": given["rtol"], "atol": given["atol"]}
    assert grade_code(f"print('{given['stdout']}')", stdio(given["expected_output"]), **options).value == 1


@case("b13")
def _(given: dict[str, Any], expected: dict[str, Any]) -> None:
    assert grade_code(given["code"], stdio("1" + "0" * 5000)).value == expected["reward"]
    assert grade_code("def solve(n): return 10 ** n", function(10**5000, 5000)).value == expected["reward"]


@case("b14")
def _(given: dict[str, Any], expected: dict[str, Any]) -> None:
    program = f"def solve(): return {given['returned']}\n"
    assert grade_code(program, function([0.3, 1])).value == expected["reward"]
    assert grade_code("def solve(): return [(0.1 + 0.2, (1, 2))]", function([[0.3, [1, 2]]])).value == 1


@case("b15")
def _(given: dict[str, Any], expected: dict[str, Any]) -> None:
    before = resident_kb()
    options = {"memory_mb": given["mem_limit_mb"], "timeout_s": given["timeout_s"]}
    for tests in (stdio("3"), SQUARES, asserts("assert solve(3) == 9")):
        result = grade_code(given["code"], tests, **options)
        assert result.value == expected["reward"]
        assert outcome(result) == "oom"
    assert resident_kb() - before < 10_000
    assert grade_code(SQUARE, SQUARES).value == 1


@case("b18")
def _(given: dict[str, Any], expected: dict[str, Any]) -> None:
    before = resident_kb()
    for tests in (stdio("3"), SQUARES):
        result = grade_code(given["code"], tests, timeout_s=given["timeout_s"], output_kb=given["output_cap_kb"])
        assert result.value == expected["reward"]
        assert outcome(result) == "output-limit"
        assert 0 < len(result.detail["stdout"]) < 10_000
    assert resident_kb() - before < 10_000


@case("b19")
def _(given: dict[str, Any], expected: dict[str, Any]) -> None:
    assert grade_code(given["code"], SQUARES, timeout_s=1.0).value == expected["reward"]
    bash = "f() { f | f & }\nf\nsleep 20"
    assert grade_code(bash, stdio("3"), language="bash", timeout_s=1.0).value == expected["reward"]
    assert grade_code(SQUARE, SQUARES).value == 1


@case("b21")
def _(given: dict[str, Any], expected: dict[str, Any]) -> None:
    result = grade_code(given["code"], stdio(given["expected_output"]))
    assert result.value == expected["reward"]
    assert "\ufffd" in result.detail["stdout"]


@case("b22")
def _(given: dict[str, Any], expected: dict[str, Any]) -> None:
    writes = "\n".join(
        f"os.write(1, bytes.fromhex('{chunk}')); time.sleep(0.05)" for chunk in given["stdout_chunks_hex"]
    )
    result = grade_code(f"import os, time\n{writes}", stdio(given["expected_output"]))
    assert result.value == expected["reward"]


@case("b23")
def _(given: dict[str, Any], expected: dict[str, Any]) -> None:
    assert extract_code(given["completion"]) == expected["extracted"]


@case("b24")
def _(given: dict[str, Any], expected: dict[str, Any]) -> None:
    assert extract_code(given["completion"]) == expected["extracted"]


@case("b25")
def _(given: dict[str, Any], expected: dict[str, Any]) -> None:
    calls = 0

    def broken(*_: Any, **__: Any) -> None:
        nonlocal calls
        calls += 1
        raise SandboxError(given["sandbox_response"])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(code_runs.Runner, "run", broken)
        result = grade_code(SQUARE, SQUARES)
    assert result.value is expected["reward"]
    assert result.status is Status.ERRORED
    assert result.detail["outcome"] == "sandbox-error"
    assert calls > 1


@case("b27")
def _(given: dict[str, Any], expected: dict[str, Any]) -> None:
    for tests in (stdio("3"), SQUARES):
        result = grade_code(given["code"], tests, timeout_s=given["timeout_s"] / 3)
        assert result.value == expected["reward"]
        assert outcome(result) == "timeout"


@case("b29")
def _(given: dict[str, Any], expected: dict[str, Any]) -> None:
    assert outputs_equal(given["stdout"], given["expected_output"], Tolerance())
    assert not outputs_equal("1 2\n\n3", given["expected_output"], Tolerance())
    assert not outputs_equal("3\n1 2", given["expected_output"], Tolerance())
    assert grade_code(f"print({given['stdout']!r})", stdio(given["expected_output"])).value == expected["reward"]


@case("b30")
def _(given: dict[str, Any], expected: dict[str, Any]) -> None:
    assert grade_code(given["code"], SQUARES).value == expected["reward"]
    spy = (
        "import gc, sys\n"
        "def solve(n):\n"
        "    seen = []\n"
        "    frame = sys._getframe()\n"
        "    while frame:\n"
        "        seen.append(repr(frame.f_locals) + repr(frame.f_globals))\n"
        "        frame = frame.f_back\n"
        "    seen += [repr(o) for o in gc.get_objects() if type(o) in (dict, list, tuple)]\n"
        "    for answer in (987654321, 'needle-in-a-test'):\n"
        "        if any(str(answer) in text for text in seen):\n"
        "            return answer\n"
    )
    spy = spy.replace("987654321", "int('98765432') * 10 + 1")  # the program must not hold itself what it looks for
    spy = spy.replace("'needle-in-a-test'", "'-'.join(['needle', 'in', 'a', 'test'])")
    assert grade_code(spy, function(987654321, 1)).value == 0
    assert grade_code(spy, asserts("assert solve(1) == 987654321", "assert solve(1) == 'needle-in-a-test'")).value == 0


@pytest.mark.parametrize("identity", CASES)
def test_reported_fault(identity: str) -> None:
    CHECKS[identity](CASES[identity]["input"], CASES[identity]["expected"])


def resident_kb() -> int:
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))


class TestKinds:
    def test_methods_of_a_class_are_found_either_way(self) -> None:
        program = "class Solution:\n    def solve(self, n): return n * n"
        assert grade_code(program, SQUARES).value == 1
        assert grade_code(program, {**SQUARES, "entry_point": "Solution.solve"}).value == 1

    @pytest.mark.parametrize(
        "body",
        [
            "def solve(self, n: List[int]) -> Optional[int]:\n        return defaultdict(lambda: inf, {n: n * n})[n]",
            "def solve(self, n):\n        return sorted([math.prod([n, n]), pow(n, 2, 10**9)])[0]",
            "def solve(self, n):\n        return reduce(lambda a, b: a * b, [n] * 2)\n    def reduce(self, n): return -1",
        ],
    )
    def test_a_solution_finds_what_leetcode_has_imported(self, body: str) -> None:
        program = f"class Solution:\n    {body}"
        assert grade_code(program, SQUARES).value == 1
        assert grade_code(program.replace("Solution", "Answer"), {**SQUARES, "entry_point": "Answer.solve"}).value == 0

    def test_the_names_of_a_program_come_before_those_of_the_starter_s(self) -> None:
        program = "def sqrt(n): return n * n\nclass Solution:\n    def solve(self, n): return sqrt(n)"
        assert grade_code(program, SQUARES).value == 1
        method = "class Solution:\n    def reduce(self, n): return n * n"  # is no function of functools
        assert grade_code(method, {**SQUARES, "entry_point": "reduce"}).value == 1

    def test_a_call_does_not_see_the_arguments_of_later_ones(self) -> None:
        spy = (
            "import gc\nlater = str(int('777') * 10 + 1)\n"
            "def solve(n):\n    return n * n if str(n) == later or repr(gc.get_objects()).count(later) <= 2 else 0"
        )
        tests = {**SQUARES, "cases": [{"args": [n], "expected": n * n} for n in (3, 7771)]}
        assert grade_code(spy, tests).value == 1

    def test_partial_credit_is_the_share_of_passed_tests(self) -> None:
        program = "import os\ndef solve(n):\n    if n == 5: os._exit(0)\n    return n * n"
        assert grade_code(program, SQUARES).value == 0
        result = grade_code(program, SQUARES, partial=True)
        assert result.value == pytest.approx(2 / 3)
        assert result.detail["tests"] == ["passed", "crashed", "passed"]

    def test_a_script_may_end_itself_and_start_threads(self) -> None:
        program = (
            "import sys, threading, atexit\n"
            "atexit.register(print, 'last')\n"
            "def main():\n    print(int(input()) ** 2)\n"
            "threading.Thread(target=main).start()\n"
            "sys.exit(0)"
        )
        assert grade_code(program, stdio("9\nlast\n", "3\n")).value == 1
        assert grade_code("print(9)\nexit(1)", stdio("9")).value == 0
        assert grade_code("if __name__ == '__main__':\n    print(9)\n    quit()", stdio("9")).value == 1

    def test_recursion_and_big_inputs_are_no_trouble(self) -> None:
        deep = (
            "import sys\nsys.setrecursionlimit(10**6)\ndef f(n): return 0 if n == 0 else 1 + f(n - 1)\nprint(f(50000))"
        )
        assert grade_code(deep, stdio("50000")).value == 1
        numbers = " ".join(map(str, range(200_000)))
        assert grade_code("print(sum(map(int, input().split())))", stdio("19999900000", numbers)).value == 1
        assert grade_code("def solve(x): return x", function(list(range(100_000)), list(range(100_000)))).value == 1

    def test_common_containers_and_numpy_are_plain_enough(self) -> None:
        program = "from collections import Counter\ndef solve(s): return Counter(s)"
        assert grade_code(program, function({"a": 2, "b": 1}, "aba")).value == 1
        program = "import numpy as np\ndef solve(n): return np.arange(n) * np.float64(2)"
        assert grade_code(program, function([0, 2, 4], 3)).value == 1

    @pytest.mark.parametrize("language", ["bash", "c", "cpp", "javascript"])
    def test_other_languages(self, language: str) -> None:
        programs = {
            "bash": "read n; echo $((n*n))",
            "c": '#include <stdio.h>\nint main(){long n;scanf("%ld",&n);printf("%ld\\n",n*n);return 0;}',
            "cpp": "#include <iostream>\nint main(){long n;std::cin>>n;std::cout<<n*n<<std::endl;}",
            "javascript": "const n = parseInt(require('fs').readFileSync(0)); console.log(n * n)",
        }
        tests = {"kind": "stdio", "cases": [{"stdin": f"{n}\n", "expected_stdout": f"{n * n}\n"} for n in (3, 5)]}
        completion = f"Here:\n```{language}\n{programs[language]}\n```\n"
        assert grade_code(completion, tests, language=language).value == 1
        assert (
            grade_code(completion.replace("n*n", "n+n").replace("n * n", "n + n"), tests, language=language).value == 0
        )

    def test_what_does_not_compile_has_failed(self) -> None:
        assert outcome(grade_code("int main( {", stdio("9"), language="c")) == "failed"
        assert outcome(grade_code("def solve(n: return", SQUARES)) == "failed"
        assert outcome(grade_code("no program at all.", SQUARES)) == "failed"

    def test_a_module_that_is_not_there_is_the_programs_fault(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("sys.path", [entry for entry in sys.path if "packages" not in entry])
        monkeypatch.setattr("reward_workers.code.POOL", pool := Pool())
        result = grade_code(f"import numpy\n{SQUARE}", SQUARES)
        assert outcome(result) == "failed"
        assert "ModuleNotFoundError" in result.detail["message"]
        pool.close()


class TestAsserts:
    def test_builtins_are_not_the_programs_to_define(self) -> None:
        cheat = "def solve(x): return 0\ndef all(x): return True\ndef len(x): return 3\ndef sorted(x): return 0"
        tests = asserts(
            "assert all([solve(3) == 9])", "assert len(str(solve(3))) == 3", "assert sorted([2, 1]) == solve(1)"
        )
        assert grade_code(cheat, tests, partial=True).value == 0

    def test_a_function_may_be_named_like_a_builtin(self) -> None:
        assert grade_code("def sum(a, b): return a + b", asserts("assert sum(10, 15) == 25")).value == 1
        tests = asserts("assert len(str(sum(10, 15))) == 2", entry_point="sum")
        assert grade_code("def sum(a, b): return a + b", tests).value == 1

    def test_a_check_function_in_the_set_up(self) -> None:
        tests = asserts(
            "check(solve)", setup="def check(candidate):\n    assert candidate(3) == 9\n    assert candidate(5) == 25"
        )
        assert grade_code(SQUARE, tests).value == 1
        assert grade_code("def solve(n): return 9", tests).value == 0

    def test_objects_of_the_programs_classes(self) -> None:
        stack = (
            "class Stack:\n    def __init__(self): self.items = []\n    def push(self, x): self.items.append(x)\n"
            "    def pop(self): return self.items.pop()\n    def __eq__(self, other): return True\n"
        )
        assert (
            grade_code(stack, asserts("s = Stack()\ns.push(3)\nassert s.items == [3]\nassert s.pop() == 3")).value == 1
        )
        for test in ("assert Stack() == 3", "assert 3 == Stack()", "assert Stack()", "assert Stack() in [1]"):
            assert grade_code(stack, asserts(test)).value == 0, test
        always = (
            "class E:\n    def __eq__(s, o): return True\n    def __bool__(s): return True\ndef solve(n): return E()"
        )
        for test in ("assert solve(3) == 9", "assert 9 == solve(3)", "assert solve(3)", "assert not (solve(3) != 9)"):
            assert grade_code(always, asserts(test)).value == 0, test

    def test_arguments_that_a_program_changes(self) -> None:
        program = "def put(items, key, value):\n    items[key] = value\ndef order(items):\n    items.sort()"
        tests = asserts(
            "x = [3, 1]\norder(x)\nassert x == [1, 3]", "d = {}\nput(d, 'a', (1, 2))\nassert d == {'a': (1, 2)}"
        )
        assert grade_code(program, tests).value == 1

    def test_exceptions_are_seen(self) -> None:
        tests = asserts(
            "try:\n    solve(-1)\nexcept ValueError as e:\n    assert str(e) == 'no'\nelse:\n    assert False"
        )
        assert grade_code("def solve(n):\n    raise ValueError('no')", tests).value == 1
        assert grade_code("def solve(n):\n    raise AssertionError", tests).value == 0
        assert grade_code("def solve(n):\n    return 1", tests).value == 0

    def test_names(self) -> None:
        tests = ["import math\nassert math.isclose(f(x=[y for y in range(3)]), LIMIT)"]
        assert names_in(tests, "", None) == (["LIMIT", "f"], {})


class TestExtraction:
    @pytest.mark.parametrize(
        ("completion", "program"),
        [
            ("print(1)", "print(1)"),
            ("", None),
            ("  \n", None),
            ("```python\nold\n```\nno, rather\n```py\nnew\n```", "new"),
            ("<think>```python\nthought\n```</think>\n```python\nsaid\n```", "said"),
            ("```python\nthought\n```</think>```python\nsaid\n```".replace("</think>", "\n</think>\n"), "said"),
            ("<think>\n```python\nthought\n```", None),
            ("<think>\n```python\nthought\n```\n</think>\nI give up.", "I give up."),
            ("```\nplain\n```", "plain"),
            ("```python\nprint(3)\n```\n```text\n3\n```", "print(3)"),
            ("```json\n{}\n```", None),
            ("```python\nunfinished", "unfinished"),
            ("````python\nprint('''\n```\n''')\n````", "print('''\n```\n''')"),
            ("~~~python\nx = 1\n~~~", "x = 1"),
            ("```{python}\nx\n```", "x"),
            ("```Python title='a'\nx\n```", "x"),
            ("```python3\r\nx = 1\r\ny\r\n```\r\n", "x = 1\ny"),
            ("1. This:\n   ```python\n   def f():\n       pass\n   ```", "def f():\n    pass"),
            ("Use ```inline``` code.\n```python\nx\n```", "x"),
            ("```python\n```", ""),
            ("```python\n\ufeffx = 1\n```", "x = 1"),
        ],
    )
    def test_policy(self, completion: str, program: str | None) -> None:
        assert extract_code(completion) == program

    def test_a_form_feed_ends_no_line(self) -> None:
        assert extract_code("```python\nx = '\x0c\u2028'\n```") == "x = '\x0c\u2028'"


class TestRows:
    @pytest.mark.parametrize(
        ("tests", "message"),
        [
            (None, "a mapping with a kind"),
            ("{", "not JSON"),
            ({"kind": "other"}, "function, stdio or asserts"),
            ({"kind": "function", "entry_point": "f", "cases": []}, "not empty"),
            ({"kind": "function", "entry_point": "f", "cases": [{"args": [1]}]}, "expected"),
            ({"kind": "function", "cases": [{"args": [1], "expected": 1}]}, "entry_point"),
            ({"kind": "function", "entry_point": "f", "cases": [{"args": 1, "expected": 1}]}, "args"),
            ({"kind": "function", "entry_point": "f", "cases": [{"arg": [1], "expected": 1}]}, "unknown key"),
            ({"kind": "stdio", "cases": [{"stdin": "1"}]}, "expected_stdout"),
            ({"kind": "asserts", "asserts": ["assert ("]}, "not Python"),
            ({"kind": "asserts", "asserts": ["assert f(1)"], "cases": []}, "unknown key"),
        ],
    )
    def test_tests_that_cant_be_used(self, tests: Any, message: str) -> None:
        result = grade_code(SQUARE, tests)
        assert result.status is Status.UNPARSEABLE_ANSWER
        assert message in result.detail["error"]
        with pytest.raises(ValueError, match=message):
            check_row(tests)

    def test_text_and_nulls_are_what_table_formats_make_of_tests(self) -> None:
        assert grade_code(SQUARE, json.dumps(SQUARES)).value == 1
        padded = {**SQUARES, "asserts": None, "setup": None}
        padded["cases"] = [{**c, "kwargs": None} for c in padded["cases"]]
        assert grade_code(SQUARE, padded).value == 1

    def test_a_solution_must_pass_its_tests(self) -> None:
        function = RewardFunction("code", "reward_workers.code.grade_code", options={"timeout_s": 2.0})
        function.check_row({"tests": SQUARES, "solution": SQUARE})
        with pytest.raises(RewardFunctionError, match="does not pass its tests"):
            function.check_row({"tests": SQUARES, "solution": "def solve(n): return 9"})
        with pytest.raises(RewardFunctionError, match="entry_point"):
            function.check_row({"tests": {**SQUARES, "entry_point": None}})

    @pytest.mark.parametrize(
        "options",
        [
            *({"timeout_s": 0}, {"memory_mb": -1}, {"output_kb": "many"}, {"partial": 1}, {"rtol": -1}),
            *({"language": "cobol"}, {"min_level": 4}, {"total_timeout_s": float("nan")}),
        ],
    )
    def test_options_that_make_no_sense(self, options: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match=next(iter(options))):
            grade_code(SQUARE, SQUARES, **options)
        with pytest.raises(RewardFunctionError, match=next(iter(options))):
            RewardFunction("code", "reward_workers.code.grade_code", options=options).check_options()

    def test_a_machine_that_serves(self) -> None:
        check_options(timeout_s=2.0)


class TestSandboxFailures:
    def test_a_lost_zygote_costs_one_try(self, monkeypatch: pytest.MonkeyPatch) -> None:
        spawn = Zygote.spawn
        victims: list[int] = []

        def spawn_once_then_kill(self: Zygote, *arguments: Any) -> Any:
            session = spawn(self, *arguments)
            if not victims:
                victims.append(self.pid)
                os.kill(self.pid, signal.SIGKILL)
            return session

        monkeypatch.setattr(Zygote, "spawn", spawn_once_then_kill)
        assert grade_code(SQUARE, SQUARES).value == 1
        assert victims

    def test_threads_grade_side_by_side(self) -> None:
        values: list[float | None] = []

        def grade() -> None:
            values.append(grade_code(SQUARE, SQUARES).value)

        for _ in range(3):  # each generation of threads ends before the next one uses its zygotes
            threads = [threading.Thread(target=grade) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
        assert values == [1.0] * 12


def test_values() -> None:
    def equal(found: Any, expected: Any) -> bool:
        return values_equal(decode(encode(found)), expected, Tolerance())

    assert equal(9.0, 9)
    assert equal(0.1 + 0.2, 0.3)
    assert equal({1: "a"}, {"1": "a"})
    assert equal({1, 2.0}, {1.0, 2})
    assert equal({(1, 2): [3]}, {(1, 2): (3,)})
    assert equal(float("nan"), float("nan"))
    assert equal(float("inf"), float("inf"))
    for found, expected in [
        *((True, 1), (1, True), (0, None), ("9", 9), ("", None), (b"a", "a"), ([1], [1, 1]), ([], {}), (8.9999999, 9)),
        *((10**400, 1.0), (float("nan"), 1.0), ({1}, [1]), ({1: 1}, {2: 1}), ({1: 1, "1": 1}, {"1": 1}), (1e-7, 0.0)),
    ]:
        assert not equal(found, expected), (found, expected)
