"""Run this folder's kernel tests without a GPU: in a process of its own, through Triton's interpreter.

Triton decides when it is imported whether its own functions are interpreted, so this process cannot.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

FOLDER = Path(__file__).resolve().parent
KERNEL_TESTS = ["test_weights.py", "test_decode.py", "test_prefill.py", "test_face.py"]


@pytest.mark.parametrize("name", KERNEL_TESTS)
def test_kernels_interpreted(name: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(FOLDER / name)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run(command, cwd=FOLDER.parents[2], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-1000:]
