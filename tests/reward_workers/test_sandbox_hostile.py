"""What a policy that is rewarded for passing would try: objects, exceptions, forged answers.

Each table is one program with many attempts: it is graded once, and none of them may pass.
"""

from __future__ import annotations

import time
from typing import Any

import pytest

from reward_workers.code import grade_code
from reward_workers.sandbox import values, wire
from rollout_workers.trajectory import RewardResult, Status

SQUARE = "def solve(n): return n * n"
SQUARES = {"kind": "function", "entry_point": "solve", "cases": [{"args": [3], "expected": 9}]}
# Whatever is asked of it, it agrees.
ALWAYS = """
class E:
    __eq__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = __bool__ = lambda *_: True
    __ne__ = lambda *_: False
    __hash__ = lambda _: 0
    __len__ = lambda _: 1
    __iter__ = lambda self: iter([self])
    __float__ = lambda _: -1.0
    __int__ = __index__ = lambda _: -1
    __sub__ = __rsub__ = __add__ = __radd__ = __abs__ = __mod__ = __getitem__ = __str__ = __call__ = lambda self, *_: self
    __getattr__ = lambda self, _: self
"""
FORGE = """
import os, struct
from reward_workers.sandbox import wire
def say(kind, number, payload):
    data = struct.pack("<IcI", len(payload), kind, number) + payload
    while data:
        data = data[os.write(3, data):]
def standard(name, *arguments):
    return b"m" + wire.encode(name) + wire.encode(arguments)
"""


def grade(program: str, tests: dict[str, Any], **options: Any) -> RewardResult:
    """A verdict, after which an honest program passes."""
    result = grade_code(program, tests, **{"timeout_s": 2.0, **options})
    assert result.status is Status.SCORED, result
    assert grade_code(SQUARE, SQUARES).value == 1
    return result


def choices(attempts: list[str], expected: Any = 9) -> tuple[str, dict[str, Any]]:
    """`solve(i)` makes the attempt i, and what tests it."""
    program = "def solve(i):\n" + "".join(f"    if i == {i}: {attempt}\n" for i, attempt in enumerate(attempts))
    cases = [{"args": [i], "expected": expected} for i in range(len(attempts))]
    return program, {"kind": "function", "entry_point": "solve", "cases": cases}


def attempts_in(text: str) -> list[str]:
    """A table's entries, which lines or double semicolons part."""
    return [attempt.strip() for line in text.splitlines() for attempt in line.split(";;") if attempt.strip()]


def passed(attempts: list[str], result: RewardResult) -> list[str]:
    assert len(result.detail["tests"]) == len(attempts)
    return [attempt for attempt, outcome in zip(attempts, result.detail["tests"], strict=True) if outcome == "passed"]


VALUES = attempts_in(r"""
E() ;; [E()] ;; (E(),) ;; {'a': E()} ;; {E(): 1} ;; {E()} ;; [[[E()]]] ;; E ;; type('I', (int,), {})(9) ;; True
type('F', (float,), {})(9.0) ;; type('S', (str,), {'__eq__': lambda *a: True})('9') ;; '9' ;; b'9' ;; None ;; ...
type('L', (list,), {'__eq__': lambda *a: True})([9]) ;; NotImplemented ;; float('nan') ;; (lambda: (yield 9))()
__import__('unittest.mock').mock.ANY ;; lambda *a: 9 ;; ValueError(9) ;; __import__('math') ;; [9] ;; (9,) ;; {9}
type('P', (), {'__class__': int, '__eq__': lambda *a: True})() ;; __import__('collections').deque([9])
type('N', (E,), {'__module__': 'numpy', 'tolist': lambda s: E()})() ;; __import__('decimal').Decimal(9)
type('R', (), {'__reduce__': lambda s: (print, ('x',))})() ;; type('R', (), {'__repr__': lambda s: 'x' << 40})()
(x := []) or x.append(x) or x ;; type('x' * (1 << 22), (), {})() ;; [10 ** 5000] * 50 ;; {10 ** 5000: 1}
[None] * (4 << 20) ;; __import__('fractions').Fraction(9) ;; 9.0001 ;; 9 + 0j + 1e-3
__import__('enum').IntEnum('C', {'A': 9}).A
""")


def test_no_object_is_equal_to_what_is_expected() -> None:
    attempts = [f"return {value}" for value in VALUES]
    program, tests = choices(attempts)
    assert passed(attempts, grade(ALWAYS + program, tests, partial=True)) == []


RAISED = attempts_in(r"""
SystemExit(0) ;; KeyboardInterrupt() ;; GeneratorExit() ;; StopIteration(9) ;; AssertionError() ;; BaseException()
ExceptionGroup('x', [ValueError()]) ;; UnicodeDecodeError('a', b'', 0, 1, 'x') ;; ValueError('\ud800\0')
ValueError(10 ** 6000) ;; type('X', (Exception,), {'__str__': lambda s: 1 / 0})() ;; MemoryError()
type('X', (Exception,), {'__str__': lambda s: T('x')})()
type('X', (Exception,), {'args': property(lambda s: 1 / 0)})() ;; type(T('X'), (Exception,), {})()
StopAsyncIteration() ;; type('S', (StopIteration,), {})()
""")
TEXT = "class T(str):\n    __str__ = __getitem__ = lambda self, *_: self\n"
WEAK = ["assert all(map(lambda i: solve(i) == 9, [{i}]))", "assert [x for x in map(solve, [{i}])] == [9]"]


def test_no_exception_passes_a_test() -> None:
    attempts = [f"raise {error}" for error in RAISED]
    program, tests = choices(attempts)
    result = grade(TEXT + program, tests, partial=True)
    assert set(result.detail["tests"]) == {"failed", "oom"}
    result.detail["message"].encode()
    for test in WEAK:  # a StopIteration would end the loop, with nothing compared
        asserts = [test.format(i=i) for i in range(len(attempts))]
        assert passed(attempts, grade(TEXT + program, {"kind": "asserts", "asserts": asserts}, partial=True)) == []


FORGED = attempts_in(r"""
say(b'X', 2, wire.encode((('ValueError',), 10 ** 6000, ())))
say(b'X', 2, wire.encode((10 ** 6000,)))
say(b'N', 2, wire.encode(((10 ** 6000,), 'x', None)))
say(b'B', 2, wire.encode((10 ** 6000,)))
say(b'B', 2, b'\xff')
say(b'X', 2, wire.encode(5))
say(b'O', 2, b'')
say(b'X', 2, wire.encode(tuple([0] * 100000)))
say(b'V', 2, wire.encode('ab'))
say(b'V', 3, wire.encode((9, None)))
say(b'R', 2, b'')
say(b'C', 2, b'')
os.write(3, b'\xff' * 9)
say(b'V', 2, b't\2\0\0\0r\0\0\0\0N')
say(b'V', 2, b't\2\0\0\0' + standard('int', 9) + b'N')
say(b'V', 2, b't\2\0\0\0' + b'l\1\0\0\0' * 199 + b'NN')
say(b'V', 2, b't\2\0\0\0l' + struct.pack('<I', 3 << 20) + b'd\0\0\0\0' * (3 << 20) + b'N')
say(b'V', 2, b't\2\0\0\0l' + struct.pack('<I', 15 << 20) + b'N' * (15 << 20) + b'N')
os.close(3)
os.dup2(os.pipe()[1], 3)
os._exit(0)
""")


def test_a_forged_answer_is_a_failure_and_costs_the_judge_nothing() -> None:
    begun = time.process_time()
    for forged in FORGED:
        result = grade(f"{FORGE}def solve(n):\n    {forged}; os._exit(0)", SQUARES)
        assert result.detail["outcome"] in ("failed", "crashed", "oom", "output-limit"), forged
    assert time.process_time() - begun < 3


def test_a_judge_deep_in_calls_is_not_brought_down() -> None:
    def deeper(frames: int) -> RewardResult:
        if frames:
            return deeper(frames - 1)
        return grade_code(FORGE + f"def solve(n):\n    {FORGED[15]}", SQUARES)

    for frames in range(100, 900, 100):
        assert deeper(frames).value == 0


ASSERTS = attempts_in(r"""
9 == solve(3) ;; solve(3) in [9] ;; solve(3) in {9} ;; [solve(3)] == [9] ;; {'a': solve(3)} == {'a': 9} ;; solve(3)
not solve(3) != 9 ;; abs(solve(3) - 9) < 1e-6 ;; 8 < solve(3) < 10 ;; str(solve(3)) == '9' ;; 9 in solve(3)
isinstance(solve(3), int) ;; sorted(solve(3)) == [9] ;; set([solve(3)]) == {9} ;; max(solve(3), 9) == 9 ;; ~solve(3)
[9].count(solve(3)) == 1 ;; {9: 1}[solve(3)] == 1 ;; f'{solve(3)}' == '9' ;; solve(3) ** 2 == 81 ;; +solve(3)
solve(3) // 1 == 9 ;; (9).__eq__(solve(3)) is True ;; list(solve(3)) == [9] ;; ''.join(solve(3)) == '9'
solve(3)[0] == 9 ;; next(iter(solve(3))) == 9 ;; solve(3).x == 9 ;; solve(3)(1) == 9 ;; solve(3) == solve(3)
round(solve(3)) == 9 ;; len(solve(3)) == 9 ;; __import__('math').isclose(solve(3), 9) ;; float(solve(3)) == 9
__import__('unittest').TestCase().assertEqual(solve(3), 9) is None ;; __import__('operator').eq(solve(3), 9)
math.isclose(solve(3), 9) ;; np.allclose(solve(3), [9]) ;; collections.Counter(solve(3)) == {9: 1}
""")


def test_an_object_that_agrees_with_everything_passes_no_assert() -> None:
    owned = (
        "import types\nmath = np = collections = types.SimpleNamespace(**dict.fromkeys(['isclose', 'allclose'], E()))\n"
    )
    program = ALWAYS + owned + "def isinstance(*a): return True\ndef solve(n): return E()\n"
    asserts = [f"assert {test}" for test in ASSERTS]
    assert passed(asserts, grade(program, {"kind": "asserts", "asserts": asserts}, partial=True)) == []


STANDARD = attempts_in(r"""
('ndarray', 'O', (1,), b'12345678') ;; ('ndarray', 'i4,i4', (1,), b'12345678') ;; ('ndarray', '<i8', (0,), b'')
('ndarray', {'names': ['a'], 'formats': ['O']}, (1,), b'12345678') ;; ('Decimal', 'sNaN') ;; ('Decimal', 'x')
('namedtuple', 'x(__import__)', ('a',), (9,)) ;; ('namedtuple', 'T', ('__eq__', 'a b'), (9, 9)) ;; ('system', 'id')
('exception', 'SystemExit') ;; ('exception',) ;; ('exception', *['a'] * 1000) ;; ('exception', 'a\0', 'ValueError')
('range', 0, 10 ** 12, 1) ;; ('timedelta', 10 ** 30, 0, 0) ;; ('date', 'x') ;; ('exception', 'X', 'ValueError')
""")


def test_a_forged_standard_value_is_equal_to_nothing() -> None:
    tests = {"kind": "asserts", "asserts": ["assert solve(3) == 9"]}
    for forged in STANDARD:
        program = f"import numpy{FORGE}def solve(n):\n    say(b'V', 3, b't\\2\\0\\0\\0' + standard(*{forged}) + b'N')"
        assert grade(program, tests).detail["outcome"] == "failed", forged


CALLING = """
def solve(f):
    for argument in (E(), [E()], 1, None, {}):
        try: f(argument)
        except BaseException: pass
    return E()
"""


def test_a_function_that_a_test_gives_away_judges_nothing() -> None:
    asserts = [
        "def see(x):\n    assert x == 9\nsolve(see)",  # the program swallows what it raises
        *("seen = []\nsolve(seen.append)\nassert seen[-1] == 9", "seen = []\nsolve(seen.append)\nassert 9 in seen"),
        *("solve(getattr)", "solve(exec)", "solve(__import__('sys').exit)", "assert solve(lambda x: x == 9) == 9"),
    ]
    result = grade(ALWAYS + CALLING, {"kind": "asserts", "asserts": asserts}, partial=True)
    assert set(result.detail["tests"]) == {"failed"}
    asserts = ["def see(x):\n    assert x == 9\nsolve(see)", "assert solve(len).x == 9", "assert True"]
    result = grade(ALWAYS + CALLING, {"kind": "asserts", "asserts": asserts}, partial=True)
    assert result.detail["tests"] == ["failed", "failed", "passed"]


@pytest.mark.parametrize("entry_point", [None, "gcd"])
def test_a_set_up_that_imports_everything_answers_for_no_program(entry_point: str | None) -> None:
    tests = {"kind": "asserts", "asserts": ["assert gcd(4, 6) == 2"], "setup": "from math import *"}
    tests["entry_point"] = entry_point
    for program in ("x = 1", "def gcd(a, b): return 3"):
        assert grade(program, tests).value == 0
    assert grade("import math\ndef gcd(a, b): return math.gcd(a, b)", tests).value == 1
    tests["asserts"] = ["assert isclose(gcd(4, 6) / 4, solve(4))"]
    assert grade("gcd = lambda *_: 0\nisclose = lambda *_: True\ndef solve(n): return 9", tests).value == 0


def test_a_forged_call_of_a_function_is_harmless() -> None:
    for said in ("5", "(0,)", "(99, [], {})", "('x', [], {})", "(0, 5, 5)", "(0, [], {'a': 1})", "(-1, [9], {})"):
        program = (
            f"{FORGE}def solve(f):\n    say(b'C', 3, wire.encode({said}))\n    wire.read_frame(lambda n: os.read(3, n))"
        )
        tests = {"kind": "asserts", "asserts": ["assert solve(lambda x: x) == 9"]}
        assert grade(program, tests).detail["outcome"] == "failed", said
    assert (
        grade(f"{FORGE}def solve(n): say(b'C', 2, wire.encode((0, [], {{}})))", SQUARES).detail["outcome"] == "failed"
    )


def test_standard_values_are_made_of_nothing_else() -> None:
    for name, arguments in (("exception", ("StopIteration",)), ("exception", ("int",)), ("eval", ("1",))):
        with pytest.raises(wire.WireError):
            values.make_standard(name, arguments)
