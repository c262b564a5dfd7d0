"""One wheel for every machine: nothing in it is compiled, and no import asks for another processor."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[1]
PARTS = ("hetero_runtime", "scheduler", "gpu", "cpu_kernels")
PACKAGES = ("hetero_runtime", "hetero_scheduler", "hetero_gpu", "hetero_cpu_kernels")
BUILD = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"
IMPORT_ALL = """
import importlib, pkgutil, platform, sys
extras = "lm_eval", "matplotlib", "fastapi", "uvicorn", "kt_kernel"
machine = sys.argv[1]
platform.machine = lambda: machine
platform.processor = lambda: machine
platform.uname = lambda: type("Uname", (), {"machine": machine, "system": "Linux"})()
count = 0
for package in sys.argv[2:]:
    found = importlib.import_module(package)
    for module in pkgutil.walk_packages(found.__path__, package + "."):
        if module.name.endswith("__main__"):
            continue
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            if error.name.partition(".")[0] not in extras:
                raise
        count += 1
print(count)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of the sources, without a network."""
    pytest.importorskip("setuptools", minversion="77")
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("out")
    for name in PARTS:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    done = subprocess.run(
        [sys.executable, "-c", BUILD, str(out)], cwd=source, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return out / done.stdout.splitlines()[-1]


def test_the_wheel_is_for_any_machine(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")
    with ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (name for name in names if name.endswith(".dist-info/WHEEL"))
        lines = archive.read(metadata).decode().splitlines()
    assert "Root-Is-Purelib: true" in lines
    assert [line for line in lines if line.startswith("Tag:")] == ["Tag: py3-none-any"]
    assert [name for name in names if re.search(r"\.(so|dylib|pyd|a|o|ptx|cubin)(\.|$)", name)] == []
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == set(PACKAGES)


def test_every_module_imports_where_the_machine_says_aarch64() -> None:
    """With the libraries of this machine, and nothing compiled: its compiler makes no code for Arm here (what
    it would make is looked at in tests/cpu_kernels). No module asks for x86 when it is imported."""
    paths = [str(ROOT), *(str(ROOT / name) for name in ("gpu", "scheduler", "cpu_kernels"))]
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, "aarch64", *PACKAGES],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "NUMBA_DISABLE_JIT": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) > 400
