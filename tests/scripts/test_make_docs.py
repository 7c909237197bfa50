"""The generated pages are current, and the comments of the schema reach its page."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "make_docs.py"

SOURCE = """
@dataclass
class Inner:
    rank: int = 0  # 0: none
    path: str = MISSING


@dataclass
class Group:
    # Spoken for
    # together.
    a: float = 1.0
    b: float = 2.0
    own: str = "x"  # its | own
    silent: bool = False
    one: Inner = field(default_factory=Inner)
    many: dict[str, Inner] = field(default_factory=dict)  # by name
    maybe: Inner | None = None  # optional


@dataclass
class Config:
    group: Group = field(default_factory=Group)
"""


def test_pages_are_current() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_page_of_keys_from_dataclasses() -> None:
    page = runpy.run_path(str(SCRIPT))["config_page"](SOURCE)
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert rows == [
        "| `group.a` | float | `1.0` | Spoken for together. |",
        "| `group.b` | float | `2.0` | Spoken for together. |",
        "| `group.own` | str | `x` | its \\| own |",
        "| `group.silent` | bool | `false` |  |",
        "| `group.one.rank` | int | `0` | 0: none |",
        "| `group.one.path` | str | required |  |",
        "| `group.many` | dict[str, Inner] | `{}` | by name |",
        "| `group.many.<name>.rank` | int | `0` | 0: none |",
        "| `group.many.<name>.path` | str | required |  |",
        "| `group.maybe` | Inner \\| None | `null` | optional |",
        "| `group.maybe.rank` | int | `0` | 0: none |",
        "| `group.maybe.path` | str | required |  |",
    ]
