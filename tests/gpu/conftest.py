"""Kernels on a CPU, where Triton interprets them, and on a GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable

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


@pytest.fixture(autouse=True)
def _worst_uninitialised_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that nobody wrote holds infinities, so that a kernel which reads it shows in every run.

    What a fresh allocation really holds is chance: mostly zeros, at times numbers whose products warn.
    """
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, _poisoned(getattr(owner, name)))


def _poisoned(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(allocate)
    def allocate_poisoned(*args: object, **options: object) -> torch.Tensor:
        tensor = allocate(*args, **options)
        return tensor.fill_(float("inf")) if tensor.dtype.is_floating_point else tensor

    return allocate_poisoned
