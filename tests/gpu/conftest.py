"""Kernels on a CPU, where Triton interprets them, and on a GPU."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(params=["interpreted", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where the kernels run; one process can only do one of the two."""
    pytest.importorskip("triton")
    from hetero_gpu.control.memory_order import IS_INTERPRETED

    if (request.param == "interpreted") != IS_INTERPRETED:
        pytest.skip("Triton's interpreter is " + ("on" if IS_INTERPRETED else "off") + " in this process")
    return torch.device("cpu" if request.param == "interpreted" else "cuda")
