"""The interpreter takes what the compiler refuses: the kernel is compiled too, for GPUs that are not here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

COMPILE = """
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

from hetero_gpu.predict import DevicePredictor
from hetero_scheduler.predict.mamba2_block import Mamba2Sizes
from hetero_scheduler.predict.mamba2_model import GroupModel, GroupShape

model = GroupModel(GroupShape(24, 128, 8, sizes=Mamba2Sizes(96, 32, 32)))
dtype = torch.{dtype}
predictor = DevicePredictor([model], torch.ones(2, dtype=torch.bool), weight_dtype=dtype, logits_dtype=dtype)
predictor.observe(23, predictor.router_logits[23])
assert ".target sm_{capability}" in compiled[0].asm["ptx"]
"""


@pytest.mark.parametrize(("capability", "dtype"), [(87, "bfloat16"), (90, "float32")], ids=["orin", "h200"])
def test_the_kernel_compiles(capability: int, dtype: str, tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "TRITON_CACHE_DIR": str(tmp_path),  # so that it does compile
        "TRITON_INTERPRET": "0",
    }
    program = COMPILE.format(capability=capability, dtype=dtype)
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
