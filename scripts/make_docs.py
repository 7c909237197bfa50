"""Writes docs/metrics.md from the metric catalogue and docs/config.md from the configuration's dataclasses.

    python scripts/make_docs.py            write both
    python scripts/make_docs.py --check    write nothing, exit with 1 if one of them is out of date

A key's meaning is the comment on its line in orchestrator/config.py; a comment on lines of its own speaks for
the keys below it that have none, up to the next comment.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import sys
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path

from orchestrator.metrics import BOOKKEEPING, CATALOGUE, SECTIONS, Metric

ROOT = Path(__file__).resolve().parent.parent
NOTE = "<!-- Made by scripts/make_docs.py. Change the source, not this file. -->"


def metrics_page() -> str:
    lines = [
        NOTE,
        "# Metrics",
        "",
        "Every metric of a run, as in `runs/<run.name>/metrics.jsonl` and in W&B. The x-axis is "
        "`policy_version`: a batch's metrics carry the version that the batch led to, an evaluation's the "
        "version it evaluated. What could not be measured is absent; what was not finite is null. Unit "
        "`share` is a number from 0 to 1, `1` another number without unit. The source is "
        "`orchestrator/metrics.py`.",
        "",
        "## Bookkeeping",
        "",
        *_metric_table(BOOKKEEPING),
    ]
    families: dict[str, list[Metric]] = {}
    for metric in CATALOGUE:
        families.setdefault(metric.name.split("/")[0] if "/" in metric.name else "", []).append(metric)
    for family, metrics in families.items():
        if family:
            lines += ["", f"## {family}", "", SECTIONS[family], ""]
            lines += _metric_table(metrics)
        else:
            lines += _metric_rows(metrics)
    return "\n".join(lines) + "\n"


def _metric_table(metrics: Sequence[Metric]) -> list[str]:
    return ["| name | meaning | unit |", "|---|---|---|", *_metric_rows(metrics)]


def _metric_rows(metrics: Sequence[Metric]) -> list[str]:
    return [f"| `{metric.name}` | {_cell(metric.meaning)} | {metric.unit} |" for metric in metrics]


def config_page(source: str) -> str:
    """The page for a module of config dataclasses, from its source text; the class `Config` is the root."""
    comments = _comments(source)
    classes = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
    lines = [
        NOTE,
        "# Configuration",
        "",
        "Every key, as in `headway train group.key=value`. `<name>` stands for a name of your own; null "
        "means not set. The source is `orchestrator/config.py`.",
    ]
    for group, declaration in _fields(classes["Config"]):
        lines += ["", f"## {group}", "", "| key | type | default | meaning |", "|---|---|---|---|"]
        for key, item in _keys(classes[ast.unparse(declaration.annotation)], group, classes):
            kind, meaning = ast.unparse(item.annotation), comments[item.lineno]
            lines.append(f"| `{key}` | {_cell(kind)} | {_default(item.value)} | {_cell(meaning)} |")
    return "\n".join(lines) + "\n"


def _fields(node: ast.ClassDef) -> list[tuple[str, ast.AnnAssign]]:
    return [
        (item.target.id, item)
        for item in node.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    ]


def _keys(node: ast.ClassDef, prefix: str, classes: dict[str, ast.ClassDef]) -> Iterator[tuple[str, ast.AnnAssign]]:
    """Dotted keys below a class with their fields, those of nested classes in place."""
    for name, item in _fields(node):
        key = f"{prefix}.{name}"
        names = [part.id for part in ast.walk(item.annotation) if isinstance(part, ast.Name)]
        nested = [classes[part] for part in names if part in classes]
        if not nested or not isinstance(item.annotation, ast.Name):
            yield key, item
        for inner in nested:
            yield from _keys(inner, f"{key}.<name>" if "dict" in names else key, classes)


def _default(node: ast.expr | None) -> str:
    """A default as one would write it on the command line."""
    if node is None or ast.unparse(node) == "MISSING":
        return "required"
    if isinstance(node, ast.Call):  # field(default_factory=...)
        factory = ast.unparse(node.keywords[0].value)
        return {"dict": "`{}`", "list": "`[]`"}.get(factory, "`{}`")
    value = ast.literal_eval(node)
    return f"`{value}`" if isinstance(value, str) else f"`{json.dumps(value)}`"


def _comments(source: str) -> dict[int, str]:
    """Line number of a field -> the comment that explains it."""
    trailing: dict[int, str] = {}
    alone: dict[int, str] = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            text = token.string.removeprefix("#").strip()
            (alone if token.line.lstrip().startswith("#") else trailing)[token.start[0]] = text
    comments: dict[int, str] = {}
    above: list[str] = []
    for number, line in enumerate(source.splitlines(), start=1):
        if number in alone:
            above = [*above, alone[number]] if number - 1 in alone else [alone[number]]
        elif number in trailing or not line.strip():
            above = []
        comments[number] = trailing.get(number, " ".join(above))
    return comments


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only tell whether the pages are current")
    check = parser.parse_args().check
    pages = {
        ROOT / "docs" / "metrics.md": metrics_page(),
        ROOT / "docs" / "config.md": config_page((ROOT / "orchestrator" / "config.py").read_text()),
    }
    stale = [path for path, text in pages.items() if not path.exists() or path.read_text() != text]
    for path in stale:
        if check:
            print(f"{path.relative_to(ROOT)} is out of date: run python scripts/make_docs.py")
        else:
            path.parent.mkdir(exist_ok=True)
            path.write_text(pages[path])
            print(f"wrote {path.relative_to(ROOT)}")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
