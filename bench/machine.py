"""What a number depends on: the machine, the versions, the commit and the command."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
COMMIT_VARIABLE = "BENCH_COMMIT"
UNKNOWN_COMMIT = "unknown"
VERSIONED_PACKAGES = ("torch", "triton", "transformers", "numba", "numpy")


def machine_facts() -> dict[str, Any]:
    """What the numbers depend on: processor, memory, accelerator, and versions (None: not installed)."""
    import psutil

    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "ram_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpu": _gpu(),
        "os": platform.platform(),
        "python": platform.python_version(),
        **{package: _version(package) for package in VERSIONED_PACKAGES},
    }


def git_commit() -> str:
    """The commit that was measured, with `-dirty` where tracked files differ from it.

    A copy of the tree without its history says which commit it is through the variable BENCH_COMMIT.
    """
    if named := os.environ.get(COMMIT_VARIABLE):
        return named
    try:
        commit = _git("rev-parse", "HEAD")
        return f"{commit}-dirty" if _git("status", "--porcelain", "--untracked-files=no") else commit
    except (OSError, subprocess.CalledProcessError):
        return UNKNOWN_COMMIT


def command_line() -> str:
    """The command that started this process, as it can be typed in the repository's root."""
    module = getattr(sys.modules.get("__main__"), "__spec__", None)
    start = ["python", "-m", module.name.removesuffix(".__main__")] if module else ["python", sys.argv[0]]
    return shlex.join([*start, *sys.argv[1:]])


def _git(*words: str) -> str:
    return subprocess.run(
        ["git", *words], cwd=ROOT, capture_output=True, text=True, check=True, timeout=30
    ).stdout.strip()


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE) if info.is_file() else []
    return names[0] if names else platform.processor() or platform.machine()


def _gpu() -> str | None:
    if _version("torch") is None:
        return None
    import torch

    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    count = torch.cuda.device_count()
    return (
        f"{count} x {properties.name}, {properties.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"
    )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
