"""Set up every test alike: few threads, fixed seeds, no network, and `gpu` tests skipped without a GPU.

torch is not imported here unless a test asks for it, so the tests of planning and policies stay quick.
"""

from __future__ import annotations

import ctypes
import os
import random
import sys

import numpy as np
import pytest

# Read by torch, numba and transformers when they are first imported, so they are set before any test is.
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"


def _has_cuda_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


if not _has_cuda_driver():
    # Triton decides this when it is first imported; without a driver its kernels can only be interpreted.
    os.environ.setdefault("TRITON_INTERPRET", "1")

SEED = 20240


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests marked `gpu`, with the reason, where there is no CUDA device."""
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    if torch.cuda.is_available():
        return
    reason = f"no CUDA device (torch {torch.__version__})"
    for item in gpu_items:
        item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def _fixed_seeds() -> None:
    """Start every test from the same random state, whichever tests ran before it."""
    random.seed(SEED)
    np.random.seed(SEED)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(SEED)
