"""Code: `grade_code` runs the program of a completion against tests, confined (`reward_workers.sandbox`).

Contract. The score is 1 if all tests are passed, else 0 (or, with `partial`, the share of tests that are passed). A program
that is wrong, slow, hungry, noisy or that crashes is scored; only a failure of the sandbox is not: its status is
`errored`, after tries on fresh zygotes. Tests that can't be used are `unparseable_answer`. Below `min_level` nothing is run,
and `SandboxUnavailable` says what the machine lacks.

`detail["outcome"]`: passed, failed, timeout, oom, output-limit, crashed or sandbox-error, of the first test that was not
passed. What a process claims about itself (out of memory) decides between kinds of failure, never between failing and passing.

As a reward function of a run: `reward.functions.NAME.path=reward_workers.code.grade_code`, with a data column `tests`. Before
the run starts every row's tests are read, and where rows have a column `solution`, it must pass them (`check_row`).
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from reward_workers.code_compare import Tolerance
from reward_workers.code_extraction import extract_code
from reward_workers.code_runs import Report, Runner
from reward_workers.code_tests import StdioTests, Tests, TestsError, read_tests
from reward_workers.function import RewardFunctionError, gold_written_by, rows_checked_by
from reward_workers.sandbox.languages import LANGUAGES
from reward_workers.sandbox.pool import POOL
from reward_workers.sandbox.probes import DEFAULT_MIN_LEVEL, LEVELS, SandboxUnavailable
from reward_workers.sandbox.session import Limits, Outcome, SandboxError
from rollout_workers.trajectory import RewardResult, Status

logger = logging.getLogger(__name__)

SANDBOX_TRIES = 3  # of a grading whose sandbox failed
DETAIL_CHARACTERS = 4000  # of each stream that are kept
_PRELOADED = re.compile(r"^[ \t]*(?:import|from)[ \t]+numpy\b", re.MULTILINE)


@dataclass(frozen=True)
class CodeOptions:
    """The options of `grade_code`.

    `timeout_s` is CPU time for one test; by the clock it is three times that, so that a busy machine changes no verdict.
    `total_timeout_s` is for all of a program's tests, by the clock: keep it below `reward.timeout_s`. `memory_mb` comes on
    top of what the interpreter has; in other languages it is for all processes of a program together. `output_kb` limits
    what each test may write, beside what is expected. `partial`: the share of passed tests is the score, and all tests are
    run. `rtol` and `atol`: see `code_compare.Tolerance`. `min_level`: see `sandbox.probes`.
    """

    timeout_s: float = 5.0
    memory_mb: int = 512
    total_timeout_s: float = 20.0
    output_kb: int = 1024
    partial: bool = False
    language: str = "python"
    rtol: float = 1e-6
    atol: float = 1e-9
    min_level: int = DEFAULT_MIN_LEVEL

    def __post_init__(self) -> None:
        for name in ("timeout_s", "total_timeout_s", "memory_mb", "output_kb"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise ValueError(f"grade_code: {name} must be above 0, got {value!r}")
        for name in ("memory_mb", "output_kb"):
            if not isinstance(getattr(self, name), int):
                raise ValueError(f"grade_code: {name} must be a whole number, got {getattr(self, name)!r}")
        for name in ("rtol", "atol"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
                raise ValueError(f"grade_code: {name} must be 0 or more, got {value!r}")
        if not isinstance(self.partial, bool):
            raise ValueError(f"grade_code: partial must be true or false, got {self.partial!r}")
        if self.language != "python" and self.language not in LANGUAGES:
            known = ", ".join(("python", *LANGUAGES))
            raise ValueError(f"grade_code: language must be one of {known}, got {self.language!r}")
        if self.min_level not in LEVELS:
            raise ValueError(
                f"grade_code: min_level must be one of {', '.join(map(str, LEVELS))}, got {self.min_level!r}"
            )


def check_row(
    tests: Mapping[str, Any] | str,
    solution: str | None = None,
    *,
    timeout_s: float = CodeOptions.timeout_s,
    memory_mb: int = CodeOptions.memory_mb,
    total_timeout_s: float = CodeOptions.total_timeout_s,
    output_kb: int = CodeOptions.output_kb,
    language: str = CodeOptions.language,
    rtol: float = CodeOptions.rtol,
    atol: float = CodeOptions.atol,
    min_level: int = CodeOptions.min_level,
) -> None:
    """Raises ValueError for a row that `grade_code` can't judge: tests that can't be used, a `solution` (code, or a
    completion with a code block) that does not pass them, and, as SandboxUnavailable, a machine below `min_level`.
    """
    options = CodeOptions(timeout_s, memory_mb, total_timeout_s, output_kb, False, language, rtol, atol, min_level)
    _check_row(tests, options, solution)


def check_options(**options: Any) -> None:
    """Raises RewardFunctionError for options that make no sense, and for a machine that can't run programs safely."""
    try:
        POOL.capabilities().require(CodeOptions(**options).min_level)
    except (ValueError, SandboxError) as error:
        raise RewardFunctionError(str(error)) from error


def write_solution(solution: str | None, language: str = CodeOptions.language) -> str | None:
    """The row's solution as a completion: fenced, unless it is one already."""
    if solution is None or "```" in solution or "~~~" in solution:
        return solution
    return f"```{language}\n{solution.strip(chr(10))}\n```"


@rows_checked_by(check_row)
@gold_written_by(write_solution)
def grade_code(
    completion: str,
    tests: Mapping[str, Any] | str,
    *,
    timeout_s: float = CodeOptions.timeout_s,
    memory_mb: int = CodeOptions.memory_mb,
    total_timeout_s: float = CodeOptions.total_timeout_s,
    output_kb: int = CodeOptions.output_kb,
    partial: bool = CodeOptions.partial,
    language: str = CodeOptions.language,
    rtol: float = CodeOptions.rtol,
    atol: float = CodeOptions.atol,
    min_level: int = CodeOptions.min_level,
) -> RewardResult:
    """The verdict on the program in `completion` (see `code_extraction`) by `tests` (see `code_tests`).

    Options are those of `CodeOptions`. Raises ValueError for an option that makes no sense and SandboxUnavailable for
    a machine whose sandbox is below `min_level`.
    """
    options = CodeOptions(timeout_s, memory_mb, total_timeout_s, output_kb, partial, language, rtol, atol, min_level)
    try:
        read = _read(tests, options)
    except TestsError as error:
        return RewardResult(None, Status.UNPARSEABLE_ANSWER, detail={"error": str(error)})
    code = extract_code(completion, language)
    if code is None:
        return _verdict(None, 0, Outcome.FAILED, "there is no program in the completion", Report())
    return _grade(code, read, options)


grade_code.check_options = check_options  # type: ignore[attr-defined]


def _check_row(tests: Any, options: CodeOptions, solution: Any) -> None:
    """Raises ValueError for tests that can't be used and for a solution that does not pass them."""
    read = _read(tests, options)
    if solution is None:
        return
    code = extract_code(solution, options.language) if isinstance(solution, str) else None
    if code is None:
        raise ValueError(f"column solution: expected a program, got {str(solution)[:80]!r}")
    result = _grade(code, read, options)
    if result.detail["outcome"] != Outcome.PASSED:
        said = result.detail.get("message") or result.detail.get("error") or ""
        raise ValueError(f"its solution does not pass its tests ({result.detail['outcome']}: {said})")


def _read(tests: Any, options: CodeOptions) -> Tests:
    read = read_tests(tests)
    if options.language != "python" and not isinstance(read, StdioTests):
        raise TestsError(f"tests.kind: programs in {options.language} are tested by kind stdio only")
    return read


def _grade(code: str, tests: Tests, options: CodeOptions) -> RewardResult:
    limits = Limits(options.timeout_s, options.memory_mb, options.output_kb << 10)
    tolerance = Tolerance(options.rtol, options.atol)
    preload = ("numpy",) if options.language == "python" and _PRELOADED.search(code) else ()
    for attempt in range(1, SANDBOX_TRIES + 1):
        try:
            POOL.capabilities().require(options.min_level)
            with POOL.borrow(preload) as zygote:
                deadline = time.monotonic() + options.total_timeout_s  # what comes before is not the program's time
                runner = Runner(zygote, limits, deadline, tolerance, not options.partial, options.language)
                report = runner.run(code, tests)
            break
        except SandboxUnavailable:
            raise
        except SandboxError as error:
            logger.warning("the sandbox failed (try %d of %d): %s", attempt, SANDBOX_TRIES, error)
            problem = str(error)
    else:
        detail = {
            "outcome": Outcome.SANDBOX_ERROR.value,
            "error": problem,
            "code": _printable(code[:DETAIL_CHARACTERS]),
        }
        return RewardResult(None, Status.ERRORED, detail=detail)
    passed = sum(result.outcome is Outcome.PASSED for result in report.results)
    first = next((result for result in report.results if result.outcome is not Outcome.PASSED), report.results[-1])
    value = passed / len(report.results) if options.partial else float(passed == len(report.results))
    return _verdict(code, value, first.outcome, first.message, report)


def _verdict(code: str | None, value: float, outcome: Outcome, message: str, report: Report) -> RewardResult:
    passed = sum(result.outcome is Outcome.PASSED for result in report.results)
    metrics = {f"{kind.value}": float(outcome is kind) for kind in (Outcome.TIMEOUT, Outcome.OOM, Outcome.CRASHED)}
    detail = {
        "outcome": outcome.value,
        "message": _printable(message),
        "passed": passed,
        "tests": [result.outcome.value for result in report.results],
        "stdout": report.stdout.decode(errors="replace")[:DETAIL_CHARACTERS],
        "stderr": report.stderr.decode(errors="replace")[-DETAIL_CHARACTERS:],
        "code": _printable((code or "")[:DETAIL_CHARACTERS]),
    }
    return RewardResult(float(value), metrics=metrics, detail=detail)


def _printable(text: str) -> str:
    """Text that can be written anywhere: surrogates of a program's making are no characters."""
    return text.encode("utf-8", "replace").decode()
