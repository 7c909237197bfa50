"""Tests run against a program, in a zygote's processes: one result per test.

Contract. What is expected never leaves this process, but for asserts: those are handed to a process of their own, which
never holds the program (`reward_workers.sandbox.checker`); the program sees nothing but the arguments of the call that it is
to answer, and what functions among them give it. Every test has a result: what was not run because the time was up has
timed out, and with `stop` what comes after the first test that was not passed is not run and not passed.

A program that dies or is killed in a test is started afresh for the next one. SandboxError propagates.
"""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from reward_workers.code_compare import Tolerance, outputs_equal, values_equal
from reward_workers.code_tests import AssertTests, FunctionTests, StdioTests, Tests
from reward_workers.sandbox import wire
from reward_workers.sandbox.host import Zygote
from reward_workers.sandbox.languages import COMPILE_MEMORY_MB, COMPILE_TIMEOUT_S, LANGUAGES, OUT_OF_MEMORY, Language
from reward_workers.sandbox.session import WALL_FACTOR, Ended, Limits, Outcome, Session

_ANSWERS = (wire.VALUE, wire.RAISED, wire.NOT_PLAIN)
_QUESTIONS = (wire.CALL, wire.GET, wire.RETURNED, wire.RAISED)
# A right answer is not much longer than what is expected: it has integers for floats at most. Any of so many bytes may come.
ANSWER_FACTOR, ANSWER_BYTES = 4, 4096


@dataclass(frozen=True)
class TestResult:
    """What became of one test."""

    __test__ = False

    outcome: Outcome
    message: str = ""


@dataclass
class Report:
    """Results in the order of the tests, and what the last process that wrote anything has written."""

    results: list[TestResult] = field(default_factory=list)
    stdout: bytes = b""
    stderr: bytes = b""

    def add(self, outcome: Outcome, message: str = "") -> None:
        self.results.append(TestResult(outcome, message))

    @property
    def failed(self) -> bool:
        return any(result.outcome is not Outcome.PASSED for result in self.results)

    def keep_output(self, session: Session) -> None:
        """Of a closed session."""
        if session.stdout or session.stderr or not self.stdout:
            self.stdout, self.stderr = session.stdout, session.stderr


@dataclass(frozen=True)
class Runner:
    """How programs are run: in `zygote`, each test within `limits`, all of them before `deadline` (monotonic clock)."""

    zygote: Zygote
    limits: Limits
    deadline: float
    tolerance: Tolerance
    stop: bool
    language: str = "python"

    def run(self, code: str, tests: Tests) -> Report:
        """Raises SandboxError."""
        report = Report()
        if isinstance(tests, FunctionTests):
            count = len(tests.calls)
            self._in_turn(report, count, lambda first: self._functions(report, code, tests, first))
        elif isinstance(tests, AssertTests):
            count = len(tests.asserts)
            self._in_turn(report, count, lambda first: self._asserts(report, code, tests, first))
        elif self.language == "python":
            count = len(tests.cases)
            self._in_turn(report, count, lambda first: self._script(report, code, tests, first))
        else:
            count = len(tests.cases)
            self._programs(report, code, tests)
        over = time.monotonic() >= self.deadline
        while len(report.results) < count:
            if over:
                report.add(Outcome.TIMEOUT, "not run: the time for all tests was up")
            else:
                report.add(Outcome.FAILED, "not run: a test before it was not passed")
        return report

    def _in_turn(self, report: Report, count: int, go: Callable[[int], None]) -> None:
        """Go on from the first test without a result until there is none, or the time is up, or one failed."""
        while len(report.results) < count and time.monotonic() < self.deadline and not (self.stop and report.failed):
            before = len(report.results)
            try:
                go(before)
            except Ended as ended:
                report.add(ended.outcome, str(ended))
            assert len(report.results) > before

    @contextmanager
    def _session(
        self,
        report: Report | None,
        limits: Limits | None = None,
        setup: bytes | None = None,
        stdin: int | None = None,
    ) -> Iterator[Session]:
        limits = limits or self.limits
        session = self.zygote.spawn(setup or limits.setup(), limits, self.deadline, stdin)
        try:
            yield session
        finally:
            session.close()
            if report is not None:
                report.keep_output(session)

    def _load(self, session: Session, report: Report, code: str, count: int) -> bool:
        """Load the code; when it can't be, that is the result of all the tests that are left."""
        try:
            answer = _answer(session, session.send(wire.LOAD, wire.encode(code)))
        except Ended as ended:
            outcome, message = ended.outcome, str(ended)
        else:
            if answer[0] == wire.VALUE and answer[2] == wire.encode(None):
                return True
            outcome, message = Outcome.FAILED, _complaint(answer)
        while len(report.results) < count:
            report.add(outcome, message)
        return False

    def _functions(self, report: Report, code: str, tests: FunctionTests, first: int) -> None:
        with self._session(report) as session:
            if not self._load(session, report, code, len(tests.calls)):
                return
            for (arguments, keywords), expected in list(zip(tests.calls, tests.expected, strict=True))[first:]:
                asked = (None, tests.entry_point, arguments, keywords, False)
                answer = _answer(session, session.send(wire.CALL, wire.encode(asked)))
                if answer[0] == wire.VALUE:
                    problem = self._problem(answer, expected)
                    report.add(Outcome.FAILED if problem else Outcome.PASSED, problem)
                else:
                    report.add(Outcome.FAILED, _complaint(answer))
                if self.stop and report.failed:
                    return

    def _problem(self, answer: wire.Frame, expected: Any) -> str:
        """What is wrong with an answer; empty if nothing is."""
        size = len(answer[2])
        wrong = f"a wrong answer of {size} bytes"
        if size > ANSWER_BYTES and size > ANSWER_FACTOR * len(wire.encode(expected)):  # it would be costly to look at
            return wrong
        found = _decoded(answer)
        if type(found) is not tuple or len(found) != 2:
            raise Ended(Outcome.FAILED, "the program forged an answer")
        try:
            if values_equal(found[0], expected, self.tolerance):
                return ""
            return wrong if size > ANSWER_BYTES else f"a wrong answer: {_shown(found[0])}"
        except RecursionError:
            return "a wrong answer, nested too deep to be looked at from here"

    def _asserts(self, report: Report, code: str, tests: AssertTests, first: int) -> None:
        with self._session(report) as program, self._session(None) as checker:
            if not self._load(program, report, code, len(tests.asserts)):
                return
            prepared = (tests.setup, list(tests.names), dict(tests.modules), tests.entry_point)
            broken = self._check(checker, program, wire.CHECK, prepared)
            for test in tests.asserts[first:]:
                said = broken or self._check(checker, program, wire.TEST, test)
                report.add(Outcome.FAILED if said else Outcome.PASSED, said or "")
                if self.stop and report.failed:
                    return

    def _check(self, checker: Session, program: Session, kind: bytes, asked: Any) -> str | None:
        """What the checker says of a test, None if it was passed; calls of the program are passed on and answered."""
        number = checker.send(kind, wire.encode(asked))
        until = time.monotonic() + WALL_FACTOR * self.limits.cpu_s  # for all calls of the test together
        while True:
            try:
                said, asking, payload = checker.answer(None, until)
            except Ended as ended:
                if ended.outcome is Outcome.CRASHED:  # of the tests, with what the program gave them
                    raise Ended(Outcome.FAILED, f"the tests ended early: {ended}") from ended
                raise
            if said in _QUESTIONS:
                answer = _answer(program, program.send(said, payload), until, (*_ANSWERS, wire.CALL))
                checker.send(answer[0], answer[2], asking)
            elif said == wire.VALUE and asking == number:
                verdict: str | None = wire.decode(payload)
                return verdict
            else:
                raise Ended(Outcome.FAILED, "the tests were disturbed")

    def _script(self, report: Report, code: str, tests: StdioTests, index: int) -> None:
        stdin, expected = tests.cases[index]
        limits = self._limits_for(expected)
        with _file(stdin) as descriptor, self._session(report, limits, stdin=descriptor) as session:
            session.send(wire.PROGRAM, wire.encode(code))
            session.finish()
        self._judge_output(report, session, expected)

    def _limits_for(self, expected: str) -> Limits:
        """What is expected to be written may be, whatever the limit."""
        return replace(self.limits, output_bytes=self.limits.output_bytes + 4 * len(expected))

    def _judge_output(self, report: Report, session: Session, expected: str) -> None:
        if session.status:
            last = session.stderr.decode(errors="replace").strip().rpartition("\n")[2][:500]
            outcome = Outcome.OOM if self.language != "python" and _says_no_memory(session) else Outcome.FAILED
            report.add(outcome, f"exit status {session.status}: {last}")
        elif outputs_equal(session.stdout.decode(errors="replace"), expected, self.tolerance):
            report.add(Outcome.PASSED)
        else:
            report.add(Outcome.FAILED, "wrong output")

    def _programs(self, report: Report, code: str, tests: StdioTests) -> None:
        language = LANGUAGES[self.language]
        with tempfile.TemporaryDirectory(prefix="program-", ignore_cleanup_errors=True) as name:
            folder = Path(name)
            folder.chmod(0o777)  # the compiler may run as another user
            source, binary = f"source{language.suffix}", "./program"  # relative: it may not be allowed to come in anew
            (folder / source).write_bytes(code.encode("utf-8", "surrogatepass"))
            values = {"source": source, "binary": binary, "memory_mb": self.limits.memory_mb}
            if language.compile and not self._compile(report, language, folder, values, len(tests.cases)):
                return
            folder.chmod(0o755)
            setup = self.limits.setup(
                argv=language.command(language.run, **values),
                folder=name,
                **{language.memory_limit: self.limits.memory_mb + language.overhead_mb << 20},
            )
            self._in_turn(report, len(tests.cases), lambda first: self._program(report, setup, tests, first))

    def _compile(self, report: Report, language: Language, folder: Path, values: dict[str, Any], count: int) -> bool:
        """Compile; when that fails, that is the result of all tests."""
        limits = replace(self.limits, cpu_s=COMPILE_TIMEOUT_S, memory_mb=COMPILE_MEMORY_MB)
        setup = limits.setup(
            argv=language.command(language.compile, **values),
            folder=str(folder),
            writable=True,
            address_space_bytes=limits.memory_mb << 20,
            file_bytes=limits.file_mb << 20,
        )
        session = self.zygote.spawn(setup, limits, self.deadline)
        try:
            session.finish()
            outcome = Outcome.FAILED
        except Ended as ended:
            outcome = ended.outcome
        finally:
            session.close()
        binary = folder / values["binary"]
        if session.status == 0 and binary.is_file() and not binary.is_symlink():
            binary.chmod(0o755)
            return True
        while len(report.results) < count:
            report.add(outcome, "it does not compile")
        return False

    def _program(self, report: Report, setup: bytes, tests: StdioTests, index: int) -> None:
        stdin, expected = tests.cases[index]
        limits = self._limits_for(expected)
        with _file(stdin) as descriptor, self._session(report, limits, setup, descriptor) as session:
            try:
                session.finish()
            except Ended as ended:
                if ended.outcome is Outcome.CRASHED and _says_no_memory(session):
                    raise Ended(Outcome.OOM, str(ended)) from ended
                raise
        self._judge_output(report, session, expected)


@contextmanager
def _file(text: str) -> Iterator[int]:
    """A descriptor to read the text from, in memory and for this process's children only."""
    descriptor = os.memfd_create("stdin", os.MFD_CLOEXEC)
    try:
        data = memoryview(text.encode("utf-8", "surrogatepass"))
        while data:
            data = data[os.write(descriptor, data) :]
        os.lseek(descriptor, 0, os.SEEK_SET)
        yield descriptor
    finally:
        os.close(descriptor)


def _says_no_memory(session: Session) -> bool:
    return any(words.encode() in session.stderr for words in OUT_OF_MEMORY)


def _answer(session: Session, number: int, until: float = math.inf, kinds: tuple[bytes, ...] = _ANSWERS) -> wire.Frame:
    """The program's answer. Raises Ended for one that is out of memory, too large or of an unknown kind."""
    answer = session.answer(number, until)
    if answer[0] == wire.OUT_OF_MEMORY:
        raise Ended(Outcome.OOM, "the program ran out of memory")
    if answer[0] == wire.TOO_LARGE:
        raise Ended(Outcome.OUTPUT_LIMIT, _complaint(answer))
    if answer[0] not in kinds:
        raise Ended(Outcome.FAILED, "the program forged an answer")
    return answer


def _decoded(answer: wire.Frame) -> Any:
    try:
        return wire.decode(answer[2])
    except wire.WireError as error:
        raise Ended(Outcome.FAILED, f"the program forged an answer: {error}") from error
    except RecursionError as error:
        raise Ended(Outcome.FAILED, "an answer that is nested too deep to be looked at from here") from error


def _complaint(answer: wire.Frame) -> str:
    """What the program says went wrong; its own words."""
    match _decoded(answer):
        case ((str() as name, *_), str() as text, _):
            return f"{name[:500]}: {text[:500]}"
    return "?"


def _shown(value: Any) -> str:
    if type(value) is int and value.bit_length() > 4000:
        return f"an integer of {value.bit_length()} bits"
    try:
        return repr(value)[:200]
    except ValueError:  # a long integer inside
        return type(value).__name__
