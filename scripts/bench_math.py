"""Precision, recall and speed of grade_math beside bare math-verify, on the labelled cases of the tests.

    python scripts/bench_math.py [--repeats 5]

Precision: of the answers that were paid, the share that is right. Recall: of the right answers, the share that was paid.
Pairs with options are policies that math-verify does not have: they are left out of the comparison. Speed is measured in one
run, in one thread, on the same pairs; computer algebra included, with warm processes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import time
from collections.abc import Callable
from pathlib import Path

from reward_workers.math import grade_math

DATA = Path(__file__).resolve().parents[1] / "tests" / "data"
# (answer, stated); @ is a number that is new each time, so that no cache answers.
NUMERIC = [("@", "@"), (r"-\frac{@}{7}", "-@/7"), ("@,000", "@000"), ("@.5", "@.50"), ("@", "1@"), (r"@\%", "@")]
SYMBOLIC = [  # what exact arithmetic does not decide
    (r"\sin 2x+@", r"@+2\sin x\cos x"),
    (r"\frac{\sin x}{\cos x}+@", r"\tan x+@"),
    (r"@\sin^2 x", r"@-@\cos^2 x"),
    (r"\sum_{k=1}^{n} k+@", r"\frac{n(n+1)}{2}+@"),
    (r"@\frac{\sqrt6+\sqrt2}{2}", r"@\sqrt{2+\sqrt{3}}"),
    (r"\cos(x-y)-@", r"\cos x\cos y+\sin x\sin y-@"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="how often each speed is measured; the best counts")
    repeats = parser.parse_args().repeats
    logging.disable(logging.WARNING)
    cases = labelled()
    print(f"{len(cases)} labelled cases, {sum(right for _, _, right in cases)} of them right")
    print(f"{'':14}{'precision':>10}{'recall':>10}{'wrong ones paid':>18}{'right ones unpaid':>20}")
    for name, judge in (("grade_math", ours), ("math-verify", theirs)):
        paid = [judge(completion, answer) for completion, answer, _ in cases]
        both = sum(p and right for p, (_, _, right) in zip(paid, cases, strict=True))
        right = sum(right for _, _, right in cases)
        print(f"{name:14}{both / sum(paid):10.3f}{both / right:10.3f}{sum(paid) - both:18}{right - both:20}")
    print(f"\n{'':14}{'numeric /s':>12}{'symbolic /s':>13}")
    speeds = {
        name: (rate(judge, NUMERIC, 200, repeats), rate(judge, SYMBOLIC, 4, repeats))
        for name, judge in (("grade_math", ours), ("math-verify", theirs))
    }
    for name, (numeric, symbolic) in speeds.items():
        print(f"{name:14}{numeric:12.0f}{symbolic:13.1f}")
    print(f"{'ratio':14}" + "".join(f"{a / b:{w}.2f}" for a, b, w in zip(*speeds.values(), (12, 13), strict=True)))


def labelled() -> list[tuple[str, str, bool]]:
    """(completion, answer, is it right) of the reported faults and the pairs."""
    reported = [json.loads(line) for line in (DATA / "reported_bugs.jsonl").read_text().splitlines()]
    pairs = [json.loads(line) for line in (DATA / "math_pairs.jsonl").read_text().splitlines()]
    return [
        (case["input"]["prediction"], case["input"]["gold"], case["expected"]["correct"])
        for case in reported
        if case["kind"] == "math" and "prediction" in case["input"]
    ] + [(pair["completion"], pair["answer"], pair["correct"]) for pair in pairs if "options" not in pair]


def ours(completion: str, answer: str) -> bool:
    return grade_math(completion, answer).value == 1


def theirs(completion: str, answer: str) -> bool:
    """Bare math-verify as its users call it, with its own deadlines; a gold without a frame is put into one."""
    from math_verify import parse, verify
    from math_verify.errors import TimeoutException

    try:
        gold = parse(answer) or parse(f"${answer}$")
        return bool(verify(gold, parse(completion)))
    except (Exception, TimeoutException):  # noqa: BLE001  whatever it raises, it did not pay
        return False


def rate(judge: Callable[[str, str], bool], pairs: list[tuple[str, str]], rounds: int, repeats: int) -> float:
    """Verdicts a second, the best of `repeats`."""
    best = 0.0
    numbers = itertools.count(101)
    for _ in range(repeats):
        texts = [
            (f"We try.\n\\boxed{{{stated.replace('@', n)}}}", answer.replace("@", n))
            for n in map(str, itertools.islice(numbers, rounds))
            for answer, stated in pairs
        ]
        judge(*texts[0])
        start = time.perf_counter()
        for completion, answer in texts:
            judge(completion, answer)
        best = max(best, len(texts) / (time.perf_counter() - start))
    return best


if __name__ == "__main__":
    main()
