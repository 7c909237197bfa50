"""math-verify behind a process with a deadline: whether two expressions are equal, where exact arithmetic can't tell.

Contract.
- A verdict in bounded time and memory, or `SymbolicError` with its status: out of time, or broken. Computer algebra may hold
  the interpreter lock for ever, so it runs in a process that is killed from outside and started again; its own
  timeouts rely on signals, which do not reach other threads than the main one, and are off.
- Both expressions must be read whole, and have the same free symbols, to be equal. Numbers are compared to many
  digits of their own size, not to a number of decimal places: 1/2004! and 1/2006! differ.
- Several threads may ask at once; each is served by a process of its own, of which `WARM` are kept. Processes are
  replaced after `CALLS` calls, since the algebra's caches grow.
"""

from __future__ import annotations

import functools
import logging
import os
import random
import re
import resource
import threading
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from reward_workers.math_notation import FUNCTIONS
from reward_workers.math_syntax import Node, walk
from reward_workers.math_values import symbols_of
from reward_workers.process import ProcessStartError
from reward_workers.reward import RewardFunction, RewardSet, Status
from reward_workers.worker import RewardWorker
from rollout_workers.trajectory import Trajectory

logger = logging.getLogger(__name__)

WARM = 2
CALLS = 2_000
DIGITS = 40  # to which numbers must agree
PLACES = 8  # at which formulas are compared
_IMAGINARY = re.compile(r"(?<![A-Za-z\\])i(?![A-Za-z])")
_UNBRACED = re.compile(r"\\sqrt (\w)")


class SymbolicError(Exception):
    """No verdict. `status` is `timed_out` or `errored`."""

    def __init__(self, status: Status, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass
class _Generation:
    """The processes in use until they are replaced."""

    worker: RewardWorker
    calls: int = 0
    users: int = 0


class SymbolicVerifier:
    """Asks math-verify in processes of its own; `timeout_s` is for one question, `memory_mb` the address space of one process."""

    def __init__(self, timeout_s: float, memory_mb: int) -> None:
        function = RewardFunction(
            "math_verify", "reward_workers.math_symbolic.MathVerify", options={"memory_mb": memory_mb}
        )
        self._rewards = RewardSet([function])
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._generation: _Generation | None = None

    def equal(self, gold: Node | str, stated: Node | str) -> bool:
        """Whether two expressions, trees or LaTeX, are equal; False also for what can't be read. Raises SymbolicError."""
        generation = self._take()
        try:
            columns = {"answer": gold, "stated": stated}
            result = generation.worker.score_group([Trajectory.from_messages([])], columns)[0]
        except ProcessStartError as error:
            raise SymbolicError(Status.ERRORED, f"math-verify can't be started: {error}") from error
        finally:
            self._give_back(generation)
        if result.value is None:
            raise SymbolicError(result.status, f"math-verify: {result.detail['math_verify']['error']}")
        return bool(result.value)

    def close(self) -> None:
        """End the processes that nobody is using; others end with the question that they are at."""
        with self._lock:
            generation, self._generation = self._generation, None
        if generation is not None and not generation.users:
            generation.worker.close()

    def _take(self) -> _Generation:
        with self._lock:
            if self._generation is None:
                worker = RewardWorker(self._rewards, timeout_s=self._timeout_s, retries=0, processes=WARM)
                self._generation = _Generation(worker)
            generation = self._generation
            generation.calls += 1
            generation.users += 1
            if generation.calls >= CALLS:
                self._generation = None  # the next call starts anew; the last user of this one ends it
            return generation

    def _give_back(self, generation: _Generation) -> None:
        with self._lock:
            generation.users -= 1
            over = generation is not self._generation and not generation.users
        if over:
            generation.worker.close()


def verifier(timeout_s: float, memory_mb: int) -> SymbolicVerifier:
    """This process's verifier with these limits. Its processes end when this one does."""
    return _verifier(timeout_s, memory_mb, os.getpid())


@functools.lru_cache(maxsize=4)
def _verifier(timeout_s: float, memory_mb: int, process: int) -> SymbolicVerifier:
    """One for each process: a forked child must not speak through its parent's lines."""
    return SymbolicVerifier(timeout_s, memory_mb)


class MathVerify:
    """The reward function that runs in the process: 1 if what is `stated` equals the `answer`, else 0."""

    def __init__(self, memory_mb: int) -> None:
        limit = memory_mb * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        import latex2sympy2_extended
        import math_verify

        logging.getLogger("math_verify").setLevel(
            logging.ERROR
        )  # it warns that its timeouts are off: they are meant to be
        self._parse = latex2sympy2_extended.latex2sympy
        self._verify = math_verify.verify

    def __call__(self, completion: str, answer: Node | str, stated: Node | str) -> float:
        # One choice for both: a real x and another one are different symbols.
        is_real = not any(_is_complex(expression) for expression in (answer, stated))
        ours, theirs = (self._read(expression, is_real) for expression in (answer, stated))
        return float(ours is not None and theirs is not None and self._equal(ours, theirs))

    def _read(self, expression: Node | str, is_real: bool) -> Any:
        """A sympy object, None for what is not read whole."""
        try:
            if isinstance(expression, Node):
                return _to_sympy(expression, is_real)
            text = _UNBRACED.sub(r"\\sqrt{\1}", expression.replace(r"\cr", r"\\"))
            return self._parse(text, is_real=is_real, convert_degrees=False, normalization_config=None)
        except MemoryError:
            raise
        except Exception:  # noqa: BLE001  whatever the grammar and its listeners raise means the same
            return None

    def _equal(self, gold: Any, stated: Any) -> bool:
        if getattr(gold, "free_symbols", None) != getattr(stated, "free_symbols", None):
            return False
        difference = self._difference(gold, stated)
        if difference is not None:
            return difference
        if self._same_everywhere(gold, stated):
            return True
        return bool(
            self._verify(gold, stated, float_rounding=DIGITS, numeric_precision=DIGITS + 15, timeout_seconds=None)
        )

    def _same_everywhere(self, gold: Any, stated: Any) -> bool:
        """Whether two expressions agree to DIGITS digits wherever they are looked at: quicker than a proof, and as good as one
        for formulas as people write them. Negative places count, so that sqrt(x^2) is not x.
        """
        import sympy

        if not all(isinstance(value, sympy.Expr) for value in (gold, stated)):
            return False
        names = "Sum Product Integral Limit Derivative floor ceiling Max Min Abs Piecewise"  # differ in places, or take long
        unsafe = (*(getattr(sympy, name) for name in names.split()), sympy.core.function.AppliedUndef)
        symbols = sorted(gold.free_symbols, key=str)
        if not symbols or gold.has(*unsafe) or stated.has(*unsafe):
            return False
        source = random.Random(20_261_130)
        for _ in range(PLACES):
            point = {symbol: sympy.Rational(source.randrange(-30_000, 30_000), 10_007) for symbol in symbols}
            if self._difference(gold.subs(point), stated.subs(point)) is not True:
                return False
        return True

    def _difference(self, gold: Any, stated: Any) -> bool | None:
        """For two numbers whether they agree to DIGITS digits of their size; None if either is something else."""
        if not (getattr(gold, "is_number", False) and getattr(stated, "is_number", False)):
            return None
        a, b = (value.doit().evalf(DIGITS + 15) for value in (gold, stated))
        if not (a.is_finite and b.is_finite):
            return bool(a == b)
        scale = max(abs(a), abs(b))
        return bool(scale == 0 or abs(a - b) <= scale * 10 ** (-DIGITS))


def _is_complex(expression: Node | str) -> bool:
    if isinstance(expression, str):
        return bool(_IMAGINARY.search(expression))
    return Node("const", "i") in walk(expression)


def _to_sympy(node: Node, is_real: bool) -> Any:
    """The sympy object of a tree. Raises KeyError for an operation that sympy does not have."""
    import sympy

    args = [_to_sympy(arg, is_real) for arg in node.args]
    name = str(node.value)
    match node.kind:
        case "num":
            assert isinstance(node.value, Fraction)
            return sympy.Rational(node.value.numerator, node.value.denominator)
        case "sym":
            return sympy.Symbol(name, real=is_real)
        case "const":
            return {"pi": sympy.pi, "e": sympy.E, "i": sympy.I, "oo": sympy.oo}[name]
        case "add" | "mixed":
            return sympy.Add(*args)
        case "mul":
            return sympy.Mul(*args)
        case "div":
            return args[0] / args[1]
        case "neg":
            return -args[0]
        case "pow":
            return args[0] ** args[1]
    if name.endswith("()"):
        return sympy.Function(name[:-2])(*args)
    if name in ("log", "lg"):
        return sympy.log(args[0], args[1] if len(args) > 1 else 10)
    functions = {"abs": "Abs", "ln": "log", "max": "Max", "min": "Min", "binom": "binomial", "ceil": "ceiling"}
    if name.startswith("arc"):
        return getattr(sympy, f"a{name[3:]}")(*args)
    # Of symbols sympy knows the greatest common divisor of polynomials only: that of m and n is 1 there.
    if name not in FUNCTIONS | {"factorial", "binom"} or (name in ("gcd", "lcm") and symbols_of(node)):
        raise KeyError(name)
    return getattr(sympy, functions.get(name, name))(*args)
