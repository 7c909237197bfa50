"""Tests of a program, read from a data row's `tests` column.

    {"kind": "function", "entry_point": "solve", "cases": [{"args": [3], "kwargs": {}, "expected": 9}]}
    {"kind": "stdio", "cases": [{"stdin": "3\\n", "expected_stdout": "9\\n"}]}
    {"kind": "asserts", "asserts": ["assert solve(3) == 9"], "setup": "import math", "entry_point": "solve"}

`entry_point` may be dotted (`Solution.solve`); a method `solve` of a class `Solution` is found as `solve`, too, and a program with
such a class finds what LeetCode has imported for it (`List`, `defaultdict`, `heapq`, `inf`…). In asserts
`setup` (run once, before them) and `entry_point` may be left out. A column of text is read as JSON; keys that are null count
as absent, since table formats add them.
"""

from __future__ import annotations

import ast
import builtins
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reward_workers.sandbox.wire import NotPlainError, TooLargeError, encode

_ALIASES = {"np": "numpy", "numpy": "numpy"}


class TestsError(ValueError):
    """Tests that can't be used; the message names the key, what was found, and what would do."""

    __test__ = False


@dataclass(frozen=True)
class FunctionTests:
    """`calls` are (arguments, keyword arguments); `expected` has one value per call."""

    entry_point: str
    calls: tuple[tuple[list[Any], dict[str, Any]], ...]
    expected: tuple[Any, ...]


@dataclass(frozen=True)
class StdioTests:
    """Pairs of what is read and what must be written."""

    cases: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class AssertTests:
    """Python tests, the `names` that they take from the program, and the `modules`, by name, that they mean by others.

    `entry_point` is one of the names, or empty.
    """

    asserts: tuple[str, ...]
    setup: str
    names: tuple[str, ...]
    modules: Mapping[str, str]
    entry_point: str


Tests = FunctionTests | StdioTests | AssertTests


def read_tests(tests: Any) -> Tests:
    """Checked tests. Raises TestsError."""
    if isinstance(tests, str):
        try:
            tests = json.loads(tests)
        except ValueError as error:
            raise TestsError(f"tests: text that is not JSON: {error}") from error
    if not isinstance(tests, Mapping):
        raise TestsError(f"tests: expected a mapping with a kind, got {type(tests).__name__}")
    given = {key: value for key, value in tests.items() if value is not None}
    kind = given.pop("kind", None)
    if kind == "function":
        _only(given, "entry_point", "cases")
        return _function(given)
    if kind == "stdio":
        _only(given, "cases")
        return StdioTests(tuple(_stdio(case, f"tests.cases[{i}]") for i, case in enumerate(_list(given, "cases"))))
    if kind == "asserts":
        _only(given, "asserts", "setup", "entry_point")
        return _asserts(given)
    raise TestsError(f"tests.kind: expected function, stdio or asserts, got {kind!r}")


def _only(given: Mapping[str, Any], *known: str) -> None:
    if unknown := sorted(set(given) - set(known)):
        raise TestsError(f"tests.{unknown[0]}: unknown key; there are kind, {', '.join(known)}")


def _list(given: Mapping[str, Any], key: str) -> list[Any]:
    value: Any = given.get(key)
    if hasattr(value, "tolist"):  # an Arrow or numpy column
        value = value.tolist()
    if not isinstance(value, list | tuple) or not value:
        raise TestsError(f"tests.{key}: expected a list that is not empty, got {str(value)[:80]}")
    return list(value)


def _text(given: Mapping[str, Any], key: str, where: str, default: str | None = None) -> str:
    value = given.get(key, default)
    if not isinstance(value, str):
        raise TestsError(f"{where}.{key}: expected text, got {type(value).__name__}")
    return value


def _function(given: Mapping[str, Any]) -> FunctionTests:
    calls, expected = [], []
    for index, case in enumerate(_list(given, "cases")):
        where = f"tests.cases[{index}]"
        if not isinstance(case, Mapping) or "expected" not in case:
            raise TestsError(f"{where}: expected a mapping with args, kwargs and expected, got {str(case)[:80]}")
        if unknown := sorted(set(case) - {"args", "kwargs", "expected"}):
            raise TestsError(f"{where}.{unknown[0]}: unknown key; there are args, kwargs, expected")
        arguments = case.get("args")
        arguments = [] if arguments is None else arguments
        keywords = dict(case.get("kwargs") or {})
        if not isinstance(arguments, list | tuple):
            raise TestsError(f"{where}.args: expected a list, got {type(arguments).__name__}")
        try:
            encode((list(arguments), keywords, case["expected"]))
        except (NotPlainError, TooLargeError) as error:
            raise TestsError(f"{where}: {error}") from error
        calls.append((list(arguments), keywords))
        expected.append(case["expected"])
    return FunctionTests(_text(given, "entry_point", "tests"), tuple(calls), tuple(expected))


def _stdio(case: Any, where: str) -> tuple[str, str]:
    if not isinstance(case, Mapping):
        raise TestsError(f"{where}: expected a mapping with stdin and expected_stdout, got {str(case)[:80]}")
    if unknown := sorted(set(case) - {"stdin", "expected_stdout"}):
        raise TestsError(f"{where}.{unknown[0]}: unknown key; there are stdin, expected_stdout")
    given = {key: value for key, value in case.items() if value is not None}
    return _text(given, "stdin", where, ""), _text(given, "expected_stdout", where)


def _asserts(given: Mapping[str, Any]) -> AssertTests:
    asserts = _list(given, "asserts")
    if not all(isinstance(test, str) and test.strip() for test in asserts):
        raise TestsError(f"tests.asserts: expected pieces of Python, got {str(asserts)[:80]}")
    setup = _text(given, "setup", "tests", "")
    entry_point = None if "entry_point" not in given else _text(given, "entry_point", "tests")
    for where, code in (("tests.setup", setup), *((f"tests.asserts[{i}]", code) for i, code in enumerate(asserts))):
        try:
            ast.parse(code)
        except (SyntaxError, ValueError) as error:
            raise TestsError(f"{where}: not Python: {error}") from error
    names, modules = names_in(asserts, setup, entry_point)
    return AssertTests(tuple(asserts), setup, tuple(names), modules, (entry_point or "").split(".")[0])


def names_in(tests: Sequence[str], setup: str, entry_point: str | None) -> tuple[list[str], dict[str, str]]:
    """The names that tests take from the program: what they read, and neither they nor Python define; and those of modules.

    A program may be asked for a function with the name of a builtin one. That is told by `entry_point`, or by tests that
    call one builtin function and nothing else. Any other builtin stays Python's own, whatever the program defines; so does
    a module of the standard library, or numpy, of which tests only use attributes, though they forgot to import it.
    """
    read: set[str] = set()
    defined: set[str] = set()
    called: set[str] = set()
    names: list[str] = []  # as often as they are used
    bases: list[str] = []  # of attributes
    for node in ast.walk(ast.parse("\n".join([setup, *tests]))):
        if isinstance(node, ast.Name):
            names.append(node.id)
            (read if isinstance(node.ctx, ast.Load) else defined).add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.arg):
            defined.add(node.arg)
        elif isinstance(node, ast.alias):
            defined.add((node.asname or node.name).split(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            defined.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            bases.append(node.value.id)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            called.add(node.func.id)
    free = {name for name in read - defined if not hasattr(builtins, name)}
    entry = (entry_point or "").split(".")[0]
    modules = {
        name: _ALIASES.get(name, name)
        for name in free - {entry}
        if (name in sys.stdlib_module_names or name in _ALIASES) and bases.count(name) == names.count(name)
    }
    wanted = free - modules.keys()
    if entry:
        wanted.add(entry)
    elif not wanted and len(called) == 1:
        wanted = called
    return sorted(wanted), modules
