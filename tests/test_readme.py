"""The README is true where a program can tell: its tree, its commands, its result files."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from hetero_runtime.cli import app

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PACKAGES = (
    "hetero_runtime",
    "scheduler/hetero_scheduler",
    "gpu/hetero_gpu",
    "cpu_kernels/hetero_cpu_kernels",
)


def tree_paths() -> list[str]:
    """Paths in the tree of "The house", from the indentation of its lines."""
    block = README.split("## The house")[1].split("```")[1]
    paths, parents = [], [""] * 8
    for line in block.strip("\n").splitlines():
        depth = (len(line) - len(line.lstrip())) // 4
        name = line.split()[0]
        path = (parents[depth - 1] if depth else "") + name
        parents[depth] = path
        paths.append(path)
    return paths


def test_tree_names_what_exists() -> None:
    assert [path for path in tree_paths() if not (ROOT / path).exists()] == []


def test_tree_misses_no_module() -> None:
    named = set(tree_paths())
    modules = [
        path.relative_to(ROOT).as_posix() for package in PACKAGES for path in (ROOT / package).rglob("*.py")
    ]
    missing = [path for path in modules if path not in named and not path.endswith("/__init__.py")]
    assert [path for path in missing if not path.startswith("hetero_runtime/bundled/")] == []


def test_every_line_of_the_tree_has_a_comment() -> None:
    block = README.split("## The house")[1].split("```")[1]
    assert [line for line in block.strip("\n").splitlines() if len(line.split()) < 2] == []


def test_commands_that_the_readme_shows_exist() -> None:
    known = {each.name for each in (*app.registered_commands, *app.registered_groups)}
    shown = set(re.findall(r"hetero-runtime +([a-z-]+)", README))
    assert shown
    assert shown <= known, shown - known


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`(\w+\.json)`", README)) - {"config.json"}))
def test_result_files_that_the_readme_quotes_exist(name: str) -> None:
    assert (ROOT / "bench" / "results" / name).is_file()


def test_the_commit_of_each_result_file_is_the_one_that_the_readme_says() -> None:
    """Of every file that it quotes: one that was measured anew stands at its new commit."""
    quoted = set(re.findall(r"`(\w+\.json)`", README)) - {"config.json"}
    said = {
        name: commit
        for commit, names in re.findall(r"\b([0-9a-f]{7}): ((?:`\w+\.json`(?:, )?)+)", README)
        for name in re.findall(r"`(\w+\.json)`", names)
    }
    assert said.keys() == quoted
    for name, commit in said.items():
        found = json.loads((ROOT / "bench" / "results" / name).read_text(encoding="utf-8"))["commit"]
        assert found.startswith(commit), f"{name} was measured at {found}, README says {commit}"
