"""Compile kernels for GPUs that are not here: the interpreter takes what the compiler refuses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_PRELUDE = """
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

class Absent:
    get_current_device = get_current_stream = lambda self, device=None: 0
    get_current_target = lambda self: GPUTarget("cuda", {capability}, 32)

run, compiled = JITFunction.run, []
JITFunction.run = lambda *args, **options: compiled.append(run(*args, **{{**options, "warmup": True}}))
driver.set_active(Absent())
"""
_CHECK = """
assert compiled, "nothing was launched"
assert all(".target sm_{capability}" in each.asm["ptx"] for each in compiled)
"""


def assert_compiles(program: str, capability: int, cache: Path) -> None:
    """Every kernel that `program` launches compiles for `capability`; none is run. `cache`: an empty folder.

    In a process of its own, since Triton decides once whether it interprets.
    """
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "TRITON_CACHE_DIR": str(cache),  # so that it does compile
        "TRITON_INTERPRET": "0",
    }
    program = _PRELUDE.format(capability=capability) + program + _CHECK.format(capability=capability)
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
