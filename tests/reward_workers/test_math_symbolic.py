"""math-verify behind its process: verdicts, deadlines, memory, threads, replacement. Starts processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from reward_workers import math_symbolic
from reward_workers.math import grade_math
from reward_workers.math_symbolic import SymbolicError, SymbolicVerifier
from reward_workers.reward import Status

pytestmark = pytest.mark.thorough

SLOW = r"\sum_{k=1}^{10^{9}} \sin(k) \cos(k^{2})"  # minutes of algebra


@pytest.fixture(scope="module")
def verifier() -> Iterator[SymbolicVerifier]:
    one = SymbolicVerifier(timeout_s=10, memory_mb=2048)
    yield one
    one.close()


@pytest.mark.parametrize(
    ("gold", "stated", "equal"),
    [
        (r"\sin(2x)", r"2 \sin(x) \cos(x)", True),
        (r"\sin(2x)", r"2 \sin(x)", False),
        (r"\int_0^1 x^2 dx", r"\frac{1}{3}", True),
        (r"\sum_{k=1}^{n} k", r"\frac{n(n+1)}{2}", True),
        (r"\sum_{k=1}^{n} k", r"\frac{m(m+1)}{2}", False),
        (r"\frac{1}{2004!}", r"\frac{1}{2006!}", False),
        (r"\forall x, f(x)", r"f(x)", False),
        (r"1 + \foo{3}", "1", False),
        (r"\infty", r"-\infty", False),
        (r"\sqrt{2+\sqrt{3}}", r"\frac{\sqrt{6}+\sqrt{2}}{2}", True),
        (r"\sqrt 4", "2", True),
        (r"\tan\frac{x}{2}", r"\frac{1-\cos x}{\sin x}", True),
        (r"\sqrt{x^2}", "x", False),  # only where x is not negative
        (r"\sqrt{(x-y)^2}", "x-y", False),
        (r"\lfloor x\rfloor", r"\lceil x\rceil-1", False),  # only where x is not whole
        (r"\max(x, y)", "y", False),
    ],
)
def test_verdicts(verifier: SymbolicVerifier, gold: str, stated: str, equal: bool) -> None:
    assert verifier.equal(gold, stated) is equal


def test_out_of_time_is_a_status_and_the_next_question_is_answered() -> None:
    verifier = SymbolicVerifier(timeout_s=1.0, memory_mb=2048)
    try:
        assert verifier.equal("x+x", "2x")
        start = time.monotonic()
        with pytest.raises(SymbolicError) as caught:
            verifier.equal(r"\lfloor 9^{9^{9}} \rfloor", r"\lfloor 9^{9^{9}}+\frac{1}{2} \rfloor")
        assert caught.value.status in (Status.TIMED_OUT, Status.ERRORED)
        assert time.monotonic() - start < 1.0 + 2.0
        assert verifier.equal("x+x", "2x")
    finally:
        verifier.close()


def test_a_verifier_that_is_out_of_time_is_no_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(self: SymbolicVerifier, gold: str, stated: str) -> bool:
        raise SymbolicError(Status.TIMED_OUT, "no result within 5 s")

    monkeypatch.setattr(SymbolicVerifier, "equal", late)
    result = grade_math(r"\boxed{2\sin x\cos x}", r"\sin 2x")
    assert (result.value, result.status) == (None, Status.TIMED_OUT)
    assert "no result" in result.detail["error"]
    assert grade_math(r"\boxed{2\sin x\cos x}", r"\sin 2x", symbolic=False).value == 0


def test_out_of_memory_is_an_error_of_the_verifier() -> None:
    with pytest.raises(SymbolicError) as caught:
        SymbolicVerifier(timeout_s=20, memory_mb=120).equal("x", "y")
    assert caught.value.status is Status.ERRORED


def test_several_threads_at_once(verifier: SymbolicVerifier) -> None:
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda n: verifier.equal(f"{n}x+x", f"{n + 1}x"), range(12)))
    assert answers == [True] * 12


def test_processes_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(math_symbolic, "CALLS", 2)
    verifier = SymbolicVerifier(timeout_s=10, memory_mb=2048)
    before = threading.active_count()
    assert [verifier.equal("x+x", "2x") for _ in range(5)] == [True] * 5
    verifier.close()
    assert threading.active_count() <= before
