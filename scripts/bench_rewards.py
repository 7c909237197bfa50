"""The built-in rewards on one core: verdicts a second, and how right the graders of mathematics are, beside their peers.

    python scripts/bench_rewards.py [--only math,json,code,worker] [--seconds 2] [--repeats 3] [--peers FOLDER]

Everything is bound to one core. Each rate is the best of the repeats, by the clock and by the CPU time of this process and all
below it: on a machine with other work the second says what the core would do alone. Graders that are compared take turns.

Right and wrong are those of the labelled pairs (tests/data/math_pairs.jsonl), and of faults that users reported of other graders
(tests/data/reported_bugs.jsonl), which are no fair sample. Precision: of the answers that were paid, the share that is right.
Recall: of the right answers, the share that was paid. Pairs with options are left out: others have no such policies. Each grader is
called as its users would: math-verify and trl are given the right answer between dollar signs, the others bare. Most peers read
boxed answers only.

Peers are looked for in FOLDER alone, made by

    pip install --no-deps --target FOLDER trl verl tensordict pyvers openrlhf pylatexenc

A peer that is not there, or can't be imported, is skipped with a word. Tried in November 2026 and left out: open-instruct and
prime-rl are not on PyPI; verifiers 0.4, whose grader is math-verify on the last box, imports a dozen packages for remote sandboxes
first; lighteval 0.13 insists on latex2sympy2_extended 1.0.6, which math-verify 0.9 does not go with; latex2sympy2 1.9 is a parser
without a grader, generated for another antlr runtime.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import itertools
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reward_workers.code import POOL, grade_code
from reward_workers.math import grade_math
from reward_workers.reward import RewardFunction, RewardSet
from reward_workers.structured import grade_json
from reward_workers.worker import RewardWorker
from rollout_workers.trajectory import Trajectory

DATA = Path(__file__).resolve().parents[1] / "tests" / "data"
GROUP = 8
Judge = Callable[[str, str], bool]  # (completion, right answer): is it paid

# (right answer, stated, is it right); @ is a number that is new each time, so that no cache answers, # the same with commas.
NUMERIC = [
    *(("@", "@", True), (r"-\frac{@}{7}", "-@/7", True), ("#", "@", True)),
    *(("@.5", "@.50", True), ("@", "1@", False), (r"@\%", "@", True)),
]
SYMBOLIC = [  # what exact arithmetic does not decide
    (r"\sin 2x+@", r"@+2\sin x\cos x", True),
    (r"\frac{\sin x}{\cos x}+@", r"\tan x+@", True),
    (r"@\sin^2 x", r"@-@\cos^2 x", True),
    (r"@+\sum_{k=1}^{n} k", r"\frac{n(n+1)}{2}+@", True),
    (r"@\frac{\sqrt6+\sqrt2}{2}", r"@\sqrt{2+\sqrt{3}}", True),
    (r"\cos(x-y)-@", r"\cos x\cos y+\sin x\sin y-@", True),
]
PROGRAM = "def solve(n):\n    return n * n\n"
SCRIPT = "print(int(input()) ** 2)\n"
FUNCTION = {"kind": "function", "entry_point": "solve", "cases": [{"args": [n], "expected": n * n} for n in (3, 5, 12)]}
PROGRAMS: dict[str, tuple[str, dict[str, Any]]] = {
    "function with numpy": (f"import numpy\n{PROGRAM}", FUNCTION),
    "script": (SCRIPT, {"kind": "stdio", "cases": [{"stdin": "3\n", "expected_stdout": "9\n"}]}),
    "asserts, 2 processes": (
        PROGRAM,
        {"kind": "asserts", "asserts": ["assert solve(3) == 9", "assert solve(5) == 25"]},
    ),
}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1},
        "count": {"type": "integer", "minimum": 0},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}},
    },
    "required": ["name", "count"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Rate:
    """A second, by the clock and by CPU time."""

    clock: float
    cpu: float

    def best(self, other: Rate) -> Rate:
        return Rate(max(self.clock, other.clock), max(self.cpu, other.cpu))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(SECTIONS), help=f"sections, of {', '.join(SECTIONS)}")
    parser.add_argument("--seconds", type=float, default=2.0, help="how long each rate is measured, each time")
    parser.add_argument("--repeats", type=int, default=3, help="how often; the best counts")
    parser.add_argument("--peers", type=Path, help="a folder with the peers' packages")
    given = parser.parse_args()
    names = given.only.split(",")
    if unknown := [name for name in names if name not in SECTIONS]:
        parser.error(f"--only: there is no section {', '.join(unknown)}; there are {', '.join(SECTIONS)}")
    if given.peers is not None and not given.peers.is_dir():
        parser.error(f"--peers: {given.peers} is no folder")
    logging.disable(logging.WARNING)
    core = max(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})
    if given.peers is not None:
        sys.path.append(str(given.peers))  # behind what is installed
    bench = Bench(given.seconds, given.repeats, given.peers is not None)
    for name in names:
        SECTIONS[name](bench)


@dataclass(frozen=True)
class Bench:
    """How each rate is measured."""

    seconds: float
    repeats: int
    peers: bool

    def rates(self, works: Mapping[str, Callable[[], object]]) -> dict[str, Rate]:
        """Calls a second of each; they take turns."""
        best = dict.fromkeys(works, Rate(0.0, 0.0))
        for work in works.values():
            work()
        for _ in range(self.repeats):
            for name, work in works.items():
                best[name] = best[name].best(self._rate(work))
        return best

    def _rate(self, work: Callable[[], object]) -> Rate:
        count, cpu, begun = 0, cpu_s(), time.perf_counter()
        while (passed := time.perf_counter() - begun) < self.seconds:
            work()
            count += 1
        return Rate(count / passed, count / max(cpu_s() - cpu, 0.01))


def cpu_s() -> float:
    """CPU time of this process, of all below it, and of those of them that have ended, to 10 ms."""
    ticks, waiting = 0, [os.getpid()]
    while waiting:
        pid = waiting.pop()
        with contextlib.suppress(OSError):
            ticks += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]))
            for task in Path(f"/proc/{pid}/task").iterdir():
                waiting += map(int, (task / "children").read_text().split())
    return ticks / os.sysconf("SC_CLK_TCK")


def show(title: str, rates: dict[str, Rate], each: int = 1, target: float | None = None) -> None:
    """Lines of the table; `each` are verdicts a call, `target` is for the first line."""
    print(f"\n{title:34}{'a second':>12}{'by CPU time':>14}{'target':>9}")
    for name, rate in rates.items():
        wanted = "" if target is None else f"{target:9,.0f}"
        print(f"{name:34}{each * rate.clock:12,.0f}{each * rate.cpu:14,.0f}{wanted}")
        target = None


# Mathematics


def math(bench: Bench) -> None:
    graders: dict[str, Judge] = {"grade_math": ours, "math-verify": math_verify}
    if bench.peers:
        graders |= dict(importable_peers())
    numeric = {name: asking(name, judge, NUMERIC) for name, judge in graders.items()}
    symbolic = {name: asking(name, judge, SYMBOLIC) for name, judge in graders.items()}
    show("numeric answers", bench.rates(numeric), target=2000)
    rates = bench.rates(symbolic)
    show("symbolic answers", rates)
    of_ours, of_theirs = rates["grade_math"], rates["math-verify"]
    by_clock, by_cpu = of_ours.clock / of_theirs.clock, of_ours.cpu / of_theirs.cpu
    print(f"{'grade_math / math-verify':34}{by_clock:12.2f}{by_cpu:14.2f}{0.8:9}")
    pairs, faults = labelled_pairs(), reported_faults()
    print(f"\n{'':16}{f'{len(pairs)} labelled pairs':>26}{f'{len(faults)} reported faults':>26}")
    print(f"{'':16}" + f"{'precision':>16}{'recall':>10}" * 2)
    for name, judge in graders.items():
        figures = "".join(f"{precision:16.3f}{recall:10.3f}" for precision, recall in quality(judge, pairs, faults))
        print(f"{name:16}{figures}", flush=True)


def asking(name: str, judge: Judge, templates: list[tuple[str, str, bool]]) -> Callable[[], None]:
    """Ask one question after the other, each with a number of its own."""
    numbers = itertools.count(101)
    questions = ((n, *template) for n in map(str, numbers) for template in templates)

    def ask() -> None:
        n, answer, stated, right = next(questions)
        paid = judge(
            f"We try.\n\\boxed{{{stated.replace('@', n)}}}", answer.replace("@", n).replace("#", f"{int(n):,}")
        )
        if name == "grade_math" and paid != right:
            raise SystemExit(f"{stated} for {answer}, @ = {n}: paid {paid}")

    return ask


def labelled_pairs() -> list[tuple[str, str, bool]]:
    """(completion, right answer, is it right)."""
    pairs = [json.loads(line) for line in (DATA / "math_pairs.jsonl").read_text().splitlines()]
    return [(pair["completion"], pair["answer"], pair["correct"]) for pair in pairs if "options" not in pair]


def reported_faults() -> list[tuple[str, str, bool]]:
    """The same of what users reported."""
    reported = [json.loads(line) for line in (DATA / "reported_bugs.jsonl").read_text().splitlines()]
    return [
        (case["input"]["prediction"], case["input"]["gold"], case["expected"]["correct"])
        for case in reported
        if case["kind"] == "math" and "prediction" in case["input"]
    ]


def quality(judge: Judge, *sets: list[tuple[str, str, bool]]) -> Iterator[tuple[float, float]]:
    """Precision and recall on each set; a grader that raises does not pay."""
    for cases in sets:
        paid = [judge(completion, answer) for completion, answer, _ in cases]
        both = sum(p and right for p, (_, _, right) in zip(paid, cases, strict=True))
        yield both / max(sum(paid), 1), both / sum(right for _, _, right in cases)


def ours(completion: str, answer: str) -> bool:
    return grade_math(completion, answer).value == 1


def math_verify(completion: str, answer: str) -> bool:
    """Bare math-verify, with its own deadlines."""
    from math_verify import parse, verify
    from math_verify.errors import TimeoutException

    try:
        gold = parse(f"${answer}$") or parse(answer)
        return bool(verify(gold, parse(completion)))
    except (Exception, TimeoutException):  # noqa: BLE001  whatever it raises, it did not pay
        return False


def importable_peers() -> Iterator[tuple[str, Judge]]:
    """The peers' graders that are there."""
    for name, (module, make) in PEERS.items():
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                grader = importlib.import_module(module)
        except Exception as error:  # noqa: BLE001  an import of others' code may raise anything
            print(f"{name} is skipped: {type(error).__name__}: {str(error).splitlines()[0]}")
        else:
            yield name, quietly(make(grader))


def quietly(judge: Judge) -> Judge:
    """Without what it prints; one that raises does not pay."""

    def call(completion: str, answer: str) -> bool:
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                return judge(completion, answer)
        except Exception:  # noqa: BLE001  whatever it raises, it did not pay
            return False

    return call


def of_openrlhf(module: Any) -> Judge:
    return lambda completion, answer: bool(module.grade_answer(module.extract_boxed_answer(completion), answer))


def of_trl(module: Any) -> Judge:
    return lambda completion, answer: module.accuracy_reward([[{"content": completion}]], [f"${answer}$"]) == [1.0]


PEERS: dict[str, tuple[str, Callable[[Any], Judge]]] = {
    "trl": ("trl.rewards.accuracy_rewards", of_trl),
    "verl math": ("verl.utils.reward_score.math_reward", lambda m: lambda c, a: m.compute_score(c, a) == 1),
    "verl verify": ("verl.utils.reward_score.math_verify", lambda m: lambda c, a: m.compute_score(c, a) == 1),
    "verl dapo": (
        "verl.utils.reward_score.math_dapo",
        lambda m: lambda c, a: bool(m.compute_score(c, a, strict_box_verify=True)["acc"]),
    ),
    "verl prime": ("verl.utils.reward_score.prime_math", lambda m: lambda c, a: bool(m.compute_score(c, a)[0])),
    "openrlhf": ("openrlhf.utils.math_utils", of_openrlhf),
}


# The others


def structured(bench: Bench) -> None:
    numbers = itertools.count()

    def grade() -> None:
        n = next(numbers)
        gold = {"name": f"item {n}", "count": n, "tags": ["a", "b"]}
        wrong = n % 2
        completion = json.dumps(gold | {"count": n + wrong}, indent=2)
        if grade_json(f"```json\n{completion}\n```", SCHEMA, gold).value != 1 - wrong:
            raise SystemExit(f"a wrong verdict on {completion}")

    show("structured output", bench.rates({"grade_json": grade}))


def code(bench: Bench) -> None:
    def grading(program: str, tests: dict[str, Any]) -> Callable[[], None]:
        def grade() -> None:
            result = grade_code(program, tests)
            if result.value != 1:
                raise SystemExit(f"a program that is right did not pass: {result.detail}")

        return grade

    def bare() -> None:
        subprocess.run([sys.executable, "-I", "-c", PROGRAM], check=True)

    print(f"\nsandbox: {POOL.capabilities()}")
    # A call: a fresh process, confined, that loads a function and answers three calls. Bare: `python` started for each program.
    works = {"a function, 3 calls": grading(PROGRAM, FUNCTION)}
    works |= {name: grading(*run) for name, run in PROGRAMS.items()}
    works["bare python, unconfined"] = bare
    if bench.peers:
        try:
            prime = importlib.import_module("verl.utils.reward_score.prime_code")
        except Exception as error:  # noqa: BLE001  an import of others' code may raise anything
            print(f"verl's prime_code is skipped: {type(error).__name__}: {str(error).splitlines()[0]}")
        else:
            works["verl prime_code, a script"] = lambda: prime.compute_score(
                f"```python\n{SCRIPT}```", {"inputs": ["3\n"], "outputs": ["9\n"]}, continuous=False
            )
    show("programs", bench.rates(works), target=150)
    POOL.close()


def worker(bench: Bench) -> None:
    numbers = itertools.count(101)

    def group() -> None:
        n = next(numbers)
        trajectories = [
            Trajectory.from_messages(
                [{"role": "user", "content": "?"}, {"role": "assistant", "content": f"\\boxed{{{n + index % 2}}}"}],
                group_id="g",
                prompt_id="p",
                index=index,
            )
            for index in range(GROUP)
        ]
        results = judge.score_group(trajectories, {"answer": str(n)})
        if [result.value for result in results] != [1.0, 0.0] * (GROUP // 2):
            raise SystemExit(f"wrong verdicts on a group: {results}")

    rewards = RewardSet([RewardFunction("math", "reward_workers.math.grade_math")])
    with RewardWorker(rewards) as judge:
        rates = bench.rates({"verdicts": group})
    show(f"groups of {GROUP} through a process", rates, each=GROUP)


SECTIONS: dict[str, Callable[[Bench], None]] = {"math": math, "json": structured, "code": code, "worker": worker}


if __name__ == "__main__":
    main()
