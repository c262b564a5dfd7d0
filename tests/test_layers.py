"""Who may import whom, how long a module may be, and what starting up may load.

Reads the sources with `ast`, so an import inside a function or under TYPE_CHECKING counts too.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAX_LINES = 400
FORBIDDEN_NAMES = {"utils.py", "common.py", "helpers.py"}


@dataclass(frozen=True)
class Layer:
    """One package: where it lies, and the third-party and project packages it may import."""

    package: str
    folder: str
    may_import: frozenset[str]

    @property
    def root(self) -> Path:
        return ROOT / self.folder / self.package


# Arrays and their compiler are everybody's; llvmlite is numba's own intermediate language.
_JIT = {"numpy", "numba", "llvmlite"}
LAYERS = (
    Layer("hetero_scheduler", "scheduler", frozenset(_JIT)),
    Layer("hetero_cpu_kernels", "cpu_kernels", frozenset({*_JIT, "torch", "kt_kernel"})),
    Layer("hetero_gpu", "gpu", frozenset({*_JIT, "torch", "triton", "hetero_scheduler"})),
    Layer(
        "hetero_runtime",
        ".",
        frozenset(
            {
                *_JIT,
                "torch",
                "triton",
                "safetensors",
                "annotated_types",
                "pydantic",
                "yaml",
                "typer",
                "rich",
                "psutil",
            }
            | {"jinja2", "PIL", "fastapi", "uvicorn", "lm_eval", "matplotlib"}
            | {"hetero_scheduler", "hetero_cpu_kernels", "hetero_gpu"}
        ),
    ),
)
# Packages that only one folder of a layer may import.
RESERVED = {
    "hetero_scheduler": {"torch": "predict"},
    "hetero_runtime": dict.fromkeys(("transformers", "tokenizers", "huggingface_hub", "accelerate"), "hf"),
}
# Planning, configuration and the command line start without these.
LIGHT_MODULES = ("hetero_runtime", "hetero_runtime.config", "hetero_runtime.plan", "hetero_runtime.cli")
HEAVY = ("torch", "transformers", "triton", "numba", "matplotlib", "PIL")


def _python_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.py") if "bundled" not in path.parts)


def _imports(source: str) -> Iterator[tuple[int, str]]:
    """Line and top-level package of every absolute import; relative ones stay inside their package."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.split(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.lineno, node.module.split(".")[0]


def _is_allowed(layer: Layer, path: Path, package: str) -> bool:
    if package == layer.package or package in sys.stdlib_module_names or package in layer.may_import:
        return True
    folder = RESERVED.get(layer.package, {}).get(package)
    return folder is not None and path.relative_to(layer.root).parts[0] == folder


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.package)
def test_imports_follow_the_layers(layer: Layer) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {package}"
        for path in _python_files(layer.root)
        for line, package in _imports(path.read_text(encoding="utf-8"))
        if not _is_allowed(layer, path, package)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.package)
def test_every_folder_with_modules_is_a_package(layer: Layer) -> None:
    folders = {path.parent for path in _python_files(layer.root)}
    missing = [str(folder.relative_to(ROOT)) for folder in folders if not (folder / "__init__.py").is_file()]
    assert not missing, f"no __init__.py, so the wheel would leave them out: {sorted(missing)}"


def _product_files() -> list[Path]:
    roots = [*(layer.root for layer in LAYERS), ROOT / "bench"]
    return [path for root in roots for path in _python_files(root)]


def test_modules_are_short() -> None:
    long = {
        str(path.relative_to(ROOT)): count
        for path in _product_files()
        if (count := len(path.read_text(encoding="utf-8").splitlines())) > MAX_LINES
    }
    assert not long, f"over {MAX_LINES} lines: {long}"


def test_no_module_is_a_drawer_for_everything() -> None:
    found = [str(path.relative_to(ROOT)) for path in _product_files() if path.name in FORBIDDEN_NAMES]
    assert not found, f"name these after what they hold: {found}"


@pytest.mark.parametrize("module", LIGHT_MODULES)
def test_start_up_loads_nothing_heavy(module: str) -> None:
    paths = [str(ROOT / folder) for folder in {layer.folder for layer in LAYERS}]
    code = (
        f"import sys; sys.path[:0] = {paths!r}; import {module}; "
        f"print(*sorted(set({HEAVY!r}) & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [], f"importing {module} also loads: {done.stdout.strip()}"


@pytest.mark.parametrize(
    ("path", "package", "allowed"),
    [
        ("predict/mamba.py", "torch", True),
        ("slots.py", "torch", False),
        ("slots.py", "hetero_runtime", False),
        ("slots.py", "enum", True),
    ],
)
def test_the_rule_itself(path: str, package: str, allowed: bool) -> None:
    scheduler = LAYERS[0]
    assert _is_allowed(scheduler, scheduler.root / path, package) is allowed


def test_imports_in_functions_are_seen() -> None:
    source = "def load():\n    from torch.nn import Linear\n    from . import near\n    import os.path\n"
    assert list(_imports(source)) == [(2, "torch"), (4, "os")]
