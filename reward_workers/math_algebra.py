"""Exact values of expressions: sums of products with rational coefficients, one over another.

Contract. Pure and exact: numbers are never rounded, so 1/2004! and 1/2006! differ. Time and memory are bounded: what would
grow beyond the limits raises TooComplexError before it is computed.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from reward_workers.math_notation import NotMathError, TooComplexError
from reward_workers.math_syntax import Node

MAX_BITS = 40_000  # of a numerator or a denominator
MAX_WORK = 2_000_000  # of one evaluation, in units of about a microsecond
MAX_TERMS = 400
MAX_POWER = 64  # to which a sum of several terms is raised
MAX_CHOSEN = 8  # of a symbolic binomial coefficient that is expanded
_SYMMETRIC = frozenset(("gcd", "lcm", "max", "min"))
MAX_PRIME = 20_000  # by which numbers under roots and logarithms are factored

Monomial = tuple[tuple[str, Fraction], ...]  # atoms with their exponents, in order
Sum = Mapping[Monomial, Fraction]
ONE: Monomial = ()


@dataclass(frozen=True)
class Ratio:
    """A sum of products over another. Atoms are symbols, `#2` for the prime 2 (under a root), `pi`, `e`, `i`, `oo`, or an
    application such as `sin(...)`, named by its canonical arguments.
    """

    top: Sum
    bottom: Sum

    @property
    def rational(self) -> Fraction | None:
        """The value if it is a rational number."""
        if self.bottom != {ONE: Fraction(1)} or self.top.keys() - {ONE}:
            return None
        return self.top.get(ONE, Fraction(0))

    @property
    def key(self) -> str:
        """A name; equal keys mean equal values."""
        top, bottom = _name(self.top), _name(self.bottom)
        return top if bottom == "1" else f"({top})/({bottom})"


def number(value: Fraction | int) -> Ratio:
    _check(Fraction(value))
    return Ratio({ONE: Fraction(value)} if value else {}, {ONE: Fraction(1)})


def atom(name: str) -> Ratio:
    return Ratio({((name, Fraction(1)),): Fraction(1)}, {ONE: Fraction(1)})


def add(a: Ratio, b: Ratio) -> Ratio:
    if a.bottom == b.bottom:
        return Ratio(_plus(a.top, b.top), a.bottom)
    return _ratio(_plus(_times(a.top, b.bottom), _times(b.top, a.bottom)), _times(a.bottom, b.bottom))


def negate(a: Ratio) -> Ratio:
    return Ratio({m: -c for m, c in a.top.items()}, a.bottom)


def multiply(a: Ratio, b: Ratio) -> Ratio:
    return _ratio(_times(a.top, b.top), _times(a.bottom, b.bottom))


def divide(a: Ratio, b: Ratio) -> Ratio:
    if not b.top:
        raise NotMathError("a division by zero")
    return _ratio(_times(a.top, b.bottom), _times(a.bottom, b.top))


def multiple(a: Ratio, b: Ratio) -> Fraction | None:
    """The rational number c other than 0 for which a = c b, 1 where both are 0; None if there is none."""
    if not a.top or not b.top:
        return None if a.top or b.top else Fraction(1)
    left, right = _times(a.top, b.bottom), _times(b.top, a.bottom)
    if left.keys() != right.keys():
        return None
    first = next(iter(left))
    factor = left[first] / right[first]
    return factor if all(left[m] == factor * right[m] for m in left) else None


def same(a: Ratio, b: Ratio) -> bool:
    """Whether the difference vanishes identically. False is not certain: see `equal`."""
    if a.bottom == b.bottom:
        return a.top == b.top
    return _times(a.top, b.bottom) == _times(b.top, a.bottom)


def _ratio(top: Sum, bottom: Sum) -> Ratio:
    """Lowest form as far as one term below goes: it moves up with negative exponents."""
    if len(bottom) == 1:
        ((monomial, coefficient),) = bottom.items()
        if monomial or coefficient != 1:
            inverse = {tuple((a, -e) for a, e in monomial): 1 / coefficient}
            return Ratio(_times(top, inverse), {ONE: Fraction(1)})
        return Ratio(top, bottom)
    lead = bottom[max(bottom)]
    if lead != 1:
        top, bottom = {m: c / lead for m, c in top.items()}, {m: c / lead for m, c in bottom.items()}
    return Ratio(top, bottom)


class _Work(threading.local):
    """What may still be spent on the evaluation that is running in this thread."""

    left = MAX_WORK

    def spend(self, work: int) -> None:
        self.left -= work
        if self.left < 0:
            raise TooComplexError("an expression that takes too long to expand")


_WORK = _Work()


def _bits(total: Sum) -> int:
    return max((max(c.numerator.bit_length(), c.denominator.bit_length()) for c in total.values()), default=0)


def _plus(a: Sum, b: Sum) -> Sum:
    _WORK.spend(len(a) + len(b) * (1 + _bits(a) * _bits(b) // 200_000))
    total = dict(a)
    for monomial, coefficient in b.items():
        value = total.get(monomial, 0) + coefficient
        if value:
            total[monomial] = value
        else:
            total.pop(monomial, None)
    return _checked(total)


def _times(a: Sum, b: Sum) -> Sum:
    _WORK.spend(len(a) * len(b) * (3 + _bits(a) * _bits(b) // 200_000))
    total: dict[Monomial, Fraction] = {}
    for m, c in a.items():
        for n, d in b.items():
            factor, monomial = _join(m, n)
            value = total.get(monomial, 0) + c * d * factor
            if value:
                total[monomial] = value
            else:
                total.pop(monomial, None)
    return _checked(total)


def _join(m: Monomial, n: Monomial) -> tuple[Fraction, Monomial]:
    """The product of two monomials: a rational factor, and what is left."""
    if not m and not n:
        return Fraction(1), ONE
    exponents = dict(m)
    for name, exponent in n:
        exponents[name] = exponents.get(name, Fraction(0)) + exponent
    factor = Fraction(1)
    for name, exponent in list(exponents.items()):
        if name[0] == "#":  # whole powers of a prime are numbers
            whole = math.floor(exponent)
            factor *= _rational_power(Fraction(int(name[1:])), whole)
            exponents[name] = exponent - whole
        elif name == "i" and exponent.denominator == 1:
            turns = int(exponent) % 4
            factor *= -1 if turns >= 2 else 1
            exponents[name] = Fraction(turns % 2)
    return factor, tuple(sorted((name, exponent) for name, exponent in exponents.items() if exponent))


def _check(value: Fraction) -> None:
    bits = max(value.numerator.bit_length(), value.denominator.bit_length())
    if bits > MAX_BITS:
        raise TooComplexError(f"a number of {bits} bits; at most {MAX_BITS} are compared")


def _checked(total: dict[Monomial, Fraction]) -> Sum:
    if len(total) > MAX_TERMS:
        raise TooComplexError(f"a sum of {len(total)} terms; at most {MAX_TERMS} are compared")
    for coefficient in total.values():
        _check(coefficient)
    return total


def _rational_power(base: Fraction, exponent: int) -> Fraction:
    bits = max(base.numerator.bit_length(), base.denominator.bit_length()) - 1
    if abs(base) != 1 and (
        abs(exponent).bit_length() > 64 or bits * abs(exponent) > MAX_BITS or abs(exponent) > MAX_BITS
    ):
        raise TooComplexError(f"a number of more than {MAX_BITS} bits")
    if base == 0 and exponent < 0:
        raise NotMathError("a division by zero")
    if abs(base) == 1:
        return base if exponent % 2 else Fraction(1)
    return base**exponent


def _name(total: Sum) -> str:
    parts = []
    for monomial, coefficient in sorted(total.items()):
        factors = [name if exponent == 1 else f"{name}^{exponent}" for name, exponent in monomial]
        if coefficient != 1 or not factors:
            factors.insert(0, str(coefficient) if _printable(coefficient) else f"{hash(coefficient):x}")
        parts.append("*".join(factors))
    return " + ".join(parts) or "0"


def _printable(value: Fraction) -> bool:
    return max(value.numerator.bit_length(), value.denominator.bit_length()) < 10_000


@functools.lru_cache(maxsize=2048)
def _factors(n: int) -> tuple[tuple[int, int], ...]:
    """Primes with exponents; a cofactor without primes up to MAX_PRIME stays whole, as if it were one."""
    found: list[tuple[int, int]] = []
    if n.bit_length() > 2_000:
        raise TooComplexError("a root or a logarithm of a number of more than 2000 bits")
    p = 2
    while p <= MAX_PRIME and p * p <= n:
        count = 0
        while n % p == 0:
            n //= p
            count += 1
        if count:
            found.append((p, count))
        p += 1 if p == 2 else 2
    if n > 1:
        root = math.isqrt(n)
        found.append((root, 2) if root * root == n else (n, 1))
    return tuple(found)


def _primes(value: Fraction) -> list[tuple[int, int]]:
    """Primes of a positive rational number with their exponents, negative ones from the denominator."""
    return [*_factors(value.numerator), *((p, -e) for p, e in _factors(value.denominator))]


def power(base: Ratio, exponent: Ratio) -> Ratio:
    n = exponent.rational
    if n is None:
        return _exponential(base, exponent)
    if n.denominator == 1:
        return _whole_power(base, int(n))
    value = base.rational
    if value is not None:
        return _root(value, n)
    if base.bottom == {ONE: Fraction(1)} and len(base.top) == 1:
        ((monomial, coefficient),) = base.top.items()
        # The root of an even power is an absolute value; of an odd one it has the same domain as the result.
        odd = n.denominator % 2
        if coefficient > 0 and all((odd or e.numerator % 2 or a in ("pi", "e")) and a != "i" for a, e in monomial):
            result = _root(coefficient, n)
            exponents = {m_a: m_e * n for m_a, m_e in monomial}
            return multiply(result, _ratio({tuple(sorted(exponents.items())): Fraction(1)}, {ONE: Fraction(1)}))
    return atom(f"({base.key})^({n})")


def _whole_power(base: Ratio, n: int) -> Ratio:
    value = base.rational
    if value is not None:
        return number(_rational_power(value, n))
    if n < 0:
        return divide(number(1), _whole_power(base, -n))
    terms = max(len(base.top), len(base.bottom))
    if (
        (n > MAX_POWER and terms > 1)
        or n > 10**6
        or math.comb(min(n, MAX_POWER) + terms - 1, terms - 1) > 4 * MAX_TERMS
    ):
        if n == 0:
            return number(1)
        raise TooComplexError(f"a sum of {terms} terms to a power of {n.bit_length()} bits")
    result, square = number(1), base
    while n:
        if n & 1:
            result = multiply(result, square)
        n >>= 1
        if n:
            square = multiply(square, square)
    return result


def _root(value: Fraction, exponent: Fraction) -> Ratio:
    """A rational number to a power that is not whole; of negative numbers the real odd root, or i times the root."""
    if value == 0:
        if exponent < 0:
            raise NotMathError("a division by zero")
        return number(0)
    result = number(1)
    if value < 0:
        if exponent.denominator % 2:
            result = number(-1 if exponent.numerator % 2 else 1)
        elif exponent.denominator == 2:
            result = _whole_power(atom("i"), exponent.numerator % 4)
        else:
            raise NotMathError("an even root of a negative number")
    if abs(exponent) > MAX_BITS:
        raise TooComplexError("an exponent that is too large")
    for prime, count in _primes(abs(value)):
        total = count * exponent
        whole = math.floor(total)
        result = multiply(result, number(_rational_power(Fraction(prime), whole)))
        if total != whole:
            result = multiply(result, Ratio({((f"#{prime}", total - whole),): Fraction(1)}, {ONE: Fraction(1)}))
    return result


def _exponential(base: Ratio, exponent: Ratio) -> Ratio:
    """b^(c m + d n + ...) as the product of (b^m)^c, (b^n)^d, ..., with the primes of b apart."""
    if exponent.bottom != {ONE: Fraction(1)}:
        return atom(f"({base.key})^({exponent.key})")
    value = base.rational
    if value is not None and value > 0:
        bases = [(str(prime), Fraction(count)) for prime, count in _primes(value)]
    elif len(base.key) == 1 or base.key == "pi":
        bases = [(base.key, Fraction(1))]
    else:
        bases = [(f"({base.key})", Fraction(1))]
    result = number(1)
    for monomial, coefficient in exponent.top.items():
        if monomial == ONE:
            result = multiply(result, power(base, number(coefficient)))
            continue
        name = _name({monomial: Fraction(1)})
        for one, count in bases:
            part: Monomial = ((f"{one}^({name})", coefficient * count),)
            result = multiply(result, Ratio({part: Fraction(1)}, {ONE: Fraction(1)}))
    return result


def evaluate(node: Node) -> Ratio:
    """The exact value of a tree. Raises NotMathError (division by zero, an unknown operation) or TooComplexError."""
    _WORK.left = MAX_WORK
    return _evaluate(node)


def _evaluate(node: Node) -> Ratio:
    args = [_evaluate(arg) for arg in node.args] if node.kind != "add" else []
    match node.kind:
        case "num":
            assert isinstance(node.value, Fraction)
            return number(node.value)
        case "sym" | "const":
            return atom(str(node.value))
        case "add":
            return functools.reduce(add, (_evaluate(arg) for arg in node.args))
        case "mixed":
            return add(args[0], args[1])
        case "mul":
            return multiply(args[0], args[1])
        case "div":
            return divide(args[0], args[1])
        case "neg":
            return negate(args[0])
        case "pow":
            return power(args[0], args[1])
    return _apply(str(node.value), args)


def _apply(name: str, args: list[Ratio]) -> Ratio:
    values = [arg.rational for arg in args]
    whole = [int(v) if v is not None and v.denominator == 1 else None for v in values]
    if name == "exp" and len(args) == 1:
        return power(atom("e"), args[0])
    if name == "sqrt" and len(args) == 1:
        return power(args[0], number(Fraction(1, 2)))
    if name == "ln" and len(args) == 1 and values[0] is not None:
        return _logarithm(values[0])
    if name == "log" and len(args) == 2 and values[0] is not None and values[1] is not None:
        return divide(_logarithm(values[0]), _logarithm(values[1]))
    if name == "binom" and len(args[0].top) <= 2 and whole[0] is None and whole[1] in range(MAX_CHOSEN + 1):
        return _chosen(args[0], int(values[1] or 0))
    if name == "factorial" and whole[0] is not None:
        return number(_factorial(whole[0]))
    if name == "binom" and None not in whole:
        n, k = int(values[0] or 0), int(values[1] or 0)
        if n < 0 or min(abs(k), abs(n - k)) > 5_000 or n.bit_length() > 64:
            raise TooComplexError("a binomial coefficient that is too large")
        return number(math.comb(n, k) if k >= 0 else 0)
    if name == "abs" and values[0] is not None:
        return number(abs(values[0]))
    if name in ("floor", "ceil") and values[0] is not None:
        return number(math.floor(values[0]) if name == "floor" else math.ceil(values[0]))
    known = [v for v in values if v is not None]
    if len(known) == len(args) and name in ("max", "min"):
        return number(max(known) if name == "max" else min(known))
    if None not in whole and name in ("gcd", "lcm"):
        return number((math.gcd if name == "gcd" else math.lcm)(*(w for w in whole if w is not None)))
    keys = [arg.key for arg in args]
    return atom(f"{name}({', '.join(sorted(keys) if name in _SYMMETRIC else keys)})")


def _chosen(n: Ratio, k: int) -> Ratio:
    """The binomial coefficient of a sum and a number: n (n - 1) ... (n - k + 1) / k!."""
    result = number(1)
    for i in range(k):
        result = multiply(result, divide(add(n, number(-i)), number(i + 1)))
    return result


def _factorial(n: int) -> int:
    if n < 0:
        raise NotMathError("the factorial of a negative number")
    if n > 3_500:
        raise TooComplexError("the factorial of a number beyond 3500")
    return math.factorial(n)


def _logarithm(value: Fraction) -> Ratio:
    if value <= 0:
        raise NotMathError("the logarithm of a number that is not positive")
    result = number(0)
    for prime, count in _primes(value):
        result = add(result, multiply(number(count), atom(f"ln({prime})")))
    return result
