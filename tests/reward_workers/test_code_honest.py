"""Programs that are right and unusual: they must pass, whatever they do to their streams, however they are fenced."""

from __future__ import annotations

import os
from typing import Any

import pytest

from reward_workers.code import grade_code
from reward_workers.sandbox.host import Zygote

SQUARE = "def solve(n): return n * n"
SQUARES = {"kind": "function", "entry_point": "solve", "cases": [{"args": [n], "expected": n * n} for n in (3, 5)]}
SCRIPT = {"kind": "stdio", "cases": [{"stdin": f"{n}\n", "expected_stdout": f"{n * n}\n"} for n in (3, 5)]}

FUNCTIONS = {
    "indented": "    def solve(n):\n        return n*n",
    "indented in a fence": "```python\n    def solve(n):\n        return n*n\n```",
    "byte order mark": "\ufeff" + SQUARE,
    "carriage returns": "def solve(n):\r\n    return n*n\r\n",
    "fence at the end of a line": f"```python\n{SQUARE}```\nThis squares n.",
    "partial": "import functools\nsolve = functools.partial(pow, exp=2)",
    "no output": f"import sys\nsys.stdout = sys.stderr = None\n{SQUARE}",
    "closed output": f"import sys\nsys.stdout.close()\n{SQUARE}",
    "closed descriptor": f"import os\nprint('x')\nos.close(1)\n{SQUARE}",
    "large stack": (
        "import sys, threading\nsys.setrecursionlimit(10 ** 6)\nthreading.stack_size(1 << 29)\n"
        "def depth(k): return 0 if k == 0 else 1 + depth(k - 1)\n"
        "def solve(n):\n    found = []\n    thread = threading.Thread(target=lambda: found.append(depth(50000)))\n"
        "    thread.start()\n    thread.join()\n    return n * n if found == [50000] else 0"
    ),
    "threads": (
        "from concurrent.futures import ThreadPoolExecutor\ndef solve(n):\n"
        "    with ThreadPoolExecutor(32) as pool: return sum(pool.map(lambda _: n, range(n)))"
    ),
    "asyncio": (
        "import asyncio\nasync def square(n):\n    await asyncio.sleep(0)\n    return n * n\n"
        "def solve(n): return asyncio.run(square(n))"
    ),
}
SCRIPTS = {
    "/dev/stdin": "n = int(open('/dev/stdin').read())\nprint(n * n)",
    "/dev/stdout": "n = int(input())\nprint(n * n, file=open('/dev/stdout', 'w'))",
    "descriptor 0": "n = int(open(0).read())\nprint(n * n)",
    "never closed": "import os\nout = os.fdopen(1, 'w')\nout.write(str(int(input()) ** 2))",
    "never flushed": (
        "import io, sys\nsys.stdout = io.StringIO()\nprint(int(input()) ** 2)\n"
        "sys.__stdout__.write(sys.stdout.getvalue())"
    ),
    "closed": "import sys\nprint(int(input()) ** 2)\nsys.stdout.close()",
    "none": "import sys\nprint(int(input()) ** 2, flush=True)\nsys.stdout = None",
    "end of an object": "import os\nclass D:\n    def __del__(self): os.write(1, str(int(input()) ** 2).encode())\nd = D()",
    "its own file": "import os\nos.path.abspath(__file__)\nprint(int(input()) ** 2)",
    "carriage return": "print(int(input()) ** 2, end='\\r\\n')",
    "own streams": (
        "import io, os, sys\nclass Out(io.IOBase):\n    def __init__(self): self.parts = []\n"
        "    def write(self, text): self.parts.append(text)\n"
        "    def flush(self):\n        os.write(1, ''.join(self.parts).encode())\n        self.parts.clear()\n"
        "sys.stdout = Out()\nprint(int(input()) ** 2)"
    ),
}
COUNT = "def count(n):\n    for i in range(n): yield i * i\n"
CLASS = """
class Box:
    def __init__(self, items): self.items = items; self.next = None
    def __len__(self): return len(self.items)
    def __getitem__(self, i): return self.items[i]
    def __setitem__(self, i, value): self.items[i] = value
    def __iter__(self): return iter(self.items)
    def __str__(self): return f"Box({self.items})"
    def __float__(self): return 0.5
def last(box):
    while box.next: box = box.next
    return box.items
"""
ERRORS = """
import json
class Odd(ValueError):
    def __str__(self): return "odd"
def solve(n):
    if n == 0: raise KeyError("a")
    if n == 1: raise Odd(1, 2)
    if n == 2: json.loads("{")
    if n == 3: b"\\xff".decode()
"""
STANDARD = """
import datetime, decimal, fractions
from collections import deque, namedtuple
import numpy as np
Pair = namedtuple("Pair", "a b")
def solve(n):
    return [fractions.Fraction(1, 2), decimal.Decimal("0.1"), datetime.date(2020, 1, 2), Pair(1, 2), deque([1]), range(3),
            bytearray(b"x"), np.arange(6.0).reshape(2, 3), datetime.timedelta(1)][n]
def kind(x): return type(x).__name__
def fill(x): x[...] = 7
"""
FUNCTIONAL = """
def apply(f, *a): return f(*a)
def twice(f): return lambda x: f(f(x))
def safe(f):
    try: return f()
    except KeyError as e: return e.args
def fold(f, items):
    total = items[0]
    for item in items[1:]: total = f(total, item)
    return total
def square(x): return x * x
def threads(f):
    from concurrent.futures import ThreadPoolExecutor
    with ThreadPoolExecutor(4) as pool: return list(pool.map(f, range(8)))
def same(f): return f
"""
ASSERTS = {
    FUNCTIONAL: r"""
assert apply(lambda x: x + 1, 3) == 4 and apply(len, 'abc') == 3 and apply(int, '7') == 7

assert twice(lambda x: x * 2)(3) == 12

def bad(): raise KeyError('k')
assert safe(bad) == ('k',)

assert fold(lambda a, b: a + b, [[1], [2, 3]]) == [1, 2, 3]

assert apply(lambda x: square(square(x)), 2) == 16

assert threads(lambda n: square(n) + 1) == [n * n + 1 for n in range(8)]

def f(): pass
assert same(f) is f

from unittest.mock import Mock
seen = Mock(return_value=5)
assert apply(seen, 1, 2) == 5
seen.assert_called_once_with(1, 2)

assert apply(lambda a: a.append(4), x := [3]) is None
""",
    COUNT: r"""
assert list(count(3)) == [0, 1, 4]

it = count(2)
assert next(it) == 0
assert next(it) == 1
assert next(it, 9) == 9

assert sum(count(4)) == 14

a, b = count(2)
assert (a, b) == (0, 1)

assert 4 in count(3) and 5 not in count(3)

import itertools
assert list(itertools.islice(count(10 ** 9), 3)) == [0, 1, 4]

assert sorted(count(3)) == [0, 1, 4]
""",
    CLASS: r"""
assert len(Box([1, 2])) == 2

b = Box([1])
b[0] = 5
assert b[0] == 5 and b.items == [5]

assert list(Box([3])) == [3]

assert str(Box([1])) == 'Box([1])' == f'{Box([1])}'

a = Box([1])
a.next = Box([2])
assert last(a) == [2]

assert math.isclose(Box([]), 0.5)

assert float(Box([])) == 0.5
""",
    ERRORS: r"""
try:
    solve(0)
except KeyError as e:
    assert str(e) == "'a'" and e.args == ('a',)
else:
    assert False

try:
    solve(1)
except ValueError as e:
    assert str(e) == 'odd'
else:
    assert False

try:
    solve(1)
except Odd as e:
    assert True
else:
    assert False

try:
    solve(2)
except ValueError as e:
    assert True
else:
    assert False

try:
    solve(3)
except UnicodeDecodeError as e:
    assert e.start == 0
else:
    assert False
""",
    STANDARD: r"""
from fractions import Fraction
assert solve(0) == Fraction(1, 2) == 0.5

assert solve(3) == (1, 2) and solve(3).a == 1

import decimal
assert solve(1) == decimal.Decimal('0.1')

import datetime
assert solve(2) == datetime.date(2020, 1, 2)

from collections import deque
assert solve(4) == deque([1])

assert solve(5) == range(3)

assert solve(6) == b'x'

import numpy as np
assert solve(7).shape == (2, 3) and np.allclose(solve(7)[1], [3, 4, 5])

assert solve(8).days == 1

import numpy as np
x = np.zeros(2)
fill(x)
assert kind(x) == 'ndarray' and x.tolist() == [7, 7]

import datetime
assert kind(datetime.date(2020, 1, 1)) == 'date'

from decimal import Decimal
assert kind(Decimal(1)) == 'Decimal'
""",
}


@pytest.mark.parametrize("program", FUNCTIONS.values(), ids=FUNCTIONS)
def test_functions(program: str) -> None:
    result = grade_code(program, SQUARES)
    assert result.value == 1, result.detail["message"]


@pytest.mark.parametrize("program", SCRIPTS.values(), ids=SCRIPTS)
def test_scripts(program: str) -> None:
    result = grade_code(program, SCRIPT)
    assert result.value == 1, result.detail


@pytest.mark.parametrize(
    ("program", "text"), ASSERTS.items(), ids=["functions", "iterators", "objects", "errors", "values"]
)
def test_asserts(program: str, text: str) -> None:
    asserts = text.strip().split("\n\n")
    result = grade_code(program, {"kind": "asserts", "asserts": asserts})
    assert result.value == 1, result.detail["message"]


@pytest.mark.parametrize(
    ("program", "language"),
    [
        ("read n < /dev/stdin; echo seen > /dev/stderr; echo $((n * n)) > /dev/stdout", "bash"),
        ("const n = parseInt(require('fs').readFileSync('/dev/stdin')); console.log(n * n)", "javascript"),
    ],
)
def test_other_languages_open_their_streams_by_name(program: str, language: str) -> None:
    result = grade_code(program, SCRIPT, language=language)
    assert result.value == 1, result.detail


def test_named_tuples_are_tuples() -> None:
    tests: dict[str, Any] = {**SQUARES, "cases": [{"args": [1], "expected": [[1, 2]]}]}
    program = (
        "from typing import NamedTuple\nclass Q(NamedTuple):\n    a: int\n    b: int\ndef solve(n): return [Q(1, 2)]"
    )
    assert grade_code(program, tests).value == 1


def test_an_output_that_is_expected_to_be_long_may_be() -> None:
    text = "\n".join(map(str, range(300_000)))
    tests = {"kind": "stdio", "cases": [{"stdin": "", "expected_stdout": text}]}
    assert grade_code("print('\\n'.join(map(str, range(300_000))))", tests).value == 1
    assert grade_code("while True: print('x' * 1000)", tests).detail["outcome"] == "output-limit"


def test_modules_that_asserts_forgot_to_import_are_pythons_own() -> None:
    tests = {"kind": "asserts", "asserts": ["assert math.isclose(solve(3), 9)", "assert np.allclose(solve(3), 9)"]}
    assert grade_code(SQUARE, tests).value == 1
    assert grade_code("class math:\n    isclose = lambda *_: True\nnp = math\ndef solve(n): return 0", tests).value == 0
    tests = {"kind": "asserts", "asserts": ["assert queue(3) == 9"], "entry_point": "queue"}
    assert grade_code("def queue(n): return n * n", tests).value == 1


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give programs users of their own")
def test_no_two_zygotes_have_one_user() -> None:
    """The kernel counts a user's threads on the whole machine: one's programs could use up what the other's may have."""
    zygotes = [Zygote(slot=7, namespaces=False) for _ in range(3)]
    try:
        assert len({zygote.layers.uid for zygote in zygotes}) == 3
    finally:
        for zygote in zygotes:
            zygote.close()
