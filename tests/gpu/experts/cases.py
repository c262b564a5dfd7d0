"""Where the kernels of this folder run, and on what.

Interpreted on a CPU where TRITON_INTERPRET=1 was set before triton was imported (see `tests/conftest.py`), on
small shapes; else compiled, on a GPU, on larger ones. The tests are the same.
"""

from __future__ import annotations

import itertools
import os

import pytest
import torch

from bench.expert_records import Case, relative_error
from hetero_gpu.experts.layout import Gate

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if IS_INTERPRETED else "cuda")
WHERE = [] if IS_INTERPRETED else [pytest.mark.gpu]
"""`pytestmark` of a module of kernel tests."""

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
DOT_DTYPES = DTYPES[:2] if IS_INTERPRETED else DTYPES
"""Of the operands of a dot product: the interpreter multiplies bfloat16 as if its bits were integers."""

RATIO = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Relative error that rounding to the dtype explains: of the activations, the products and the output."""

GATES = {
    "silu": Gate(),
    "clamped": Gate("clamped_silu", limit=0.5),
    "gpt_oss": Gate("gpt_oss", is_interleaved=True, limit=0.7, alpha=1.702),
}

FORMATS = [
    Case("float32"),
    Case("float16"),
    Case("bfloat16", has_bias=True),
    Case("bfloat16", is_transposed=True, has_bias=True),
    Case("fp8", "float32", (128, 128)),
    Case("fp8", "bfloat16", (16, 24)),
    Case("fp8", "e8m0", (7, 10)),
    Case("int8", "float32", (1, None)),
    Case("int8", "float32", (16, 32)),
    Case("int4", "float16", (1, 32)),
    Case("int4", "bfloat16", (1, 128)),
    Case("fp4", "e8m0", (1, 32), has_bias=True),
]

COMBINATIONS = [
    *zip(FORMATS, itertools.cycle(GATES)),
    *((case, gate) for case in (FORMATS[1], FORMATS[3]) for gate in GATES),
]
"""Each format with some gate, and two formats (one transposed) with all."""

SHAPES = [(98, 36)] if IS_INTERPRETED else [(98, 36), (2880, 1000)]
"""(H, I): neither need be a power of two, nor a multiple of a block."""


def assert_close(name: str, reference: torch.Tensor, actual: torch.Tensor, ratio: float) -> None:
    """The root mean square of the error is at most `ratio` of that of the reference; no NaN anywhere."""
    assert reference.shape == actual.shape, f"{name}: {reference.shape} and {actual.shape}"
    error = relative_error(reference, actual)
    assert error <= ratio, f"{name}: relative error {error:.2e}, at most {ratio:.0e}"
