"""The kernel that reads host memory, against its reference: interpreted on a CPU, real on a GPU."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from tests.gpu.low_memory import low_memory

pytest.importorskip("triton")


@pytest.fixture
def zero_copy(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module with its kernel interpreted, which is decided when the kernel is defined."""
    module = importlib.import_module("hetero_gpu.zero_copy")
    with monkeypatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        yield importlib.reload(module)
    importlib.reload(module)


@pytest.mark.parametrize("num_programs", [1, 3, 8], ids=lambda n: f"programs{n}")
@pytest.mark.parametrize("num_bytes", [4, 252, 32768, 32772, 300_000], ids=lambda n: f"bytes{n}")
def test_interpreted_kernel_equals_reference(
    zero_copy: ModuleType, num_bytes: int, num_programs: int
) -> None:
    source = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8)
    room, expected = (torch.full((num_bytes + 64,), 0xA5, dtype=torch.uint8) for _ in range(2))
    zero_copy.copy_from_host_reference(source, expected[:num_bytes])
    zero_copy.copy_from_host(source.data_ptr(), room[:num_bytes], num_programs=num_programs)
    assert torch.equal(room, expected)


def test_a_source_below_2_gib(zero_copy: ModuleType) -> None:
    source = low_memory(4096)
    source.copy_(torch.randint(0, 256, (4096,), dtype=torch.uint8))
    copied = torch.zeros_like(source)
    zero_copy.copy_from_host(source.data_ptr(), copied)
    assert torch.equal(copied, source)


@pytest.mark.parametrize(
    ("shift", "destination", "message"),
    [
        (0, torch.zeros(8), "contiguous uint8, not torch.float32"),
        (0, torch.zeros(32, dtype=torch.uint8)[::2], "contiguous uint8"),
        (4, torch.zeros(16, dtype=torch.uint8), "aligned to 16 bytes"),
        (0, torch.zeros(32, dtype=torch.uint8)[1:17], "aligned to 16 bytes"),
        (0, torch.zeros(18, dtype=torch.uint8), "18 bytes: must be a multiple of 4"),
    ],
    ids=["dtype", "strided", "source", "destination", "size"],
)
def test_what_the_kernel_cannot_do_is_refused(
    zero_copy: ModuleType, shift: int, destination: torch.Tensor, message: str
) -> None:
    source = torch.zeros(64, dtype=torch.uint8)
    with pytest.raises(ValueError, match=message):
        zero_copy.copy_from_host(source.data_ptr() + shift, destination)


@pytest.mark.gpu
@pytest.mark.parametrize("num_bytes", [4, 252, 32772, 9_437_184], ids=lambda n: f"bytes{n}")
def test_device_kernel_equals_reference(num_bytes: int) -> None:
    from hetero_gpu.mapped import device_address
    from hetero_gpu.zero_copy import copy_from_host, copy_from_host_reference

    source = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8).pin_memory()
    room, expected = (torch.full((num_bytes + 64,), 0xA5, dtype=torch.uint8, device="cuda") for _ in range(2))
    copy_from_host_reference(source, expected[:num_bytes])
    copy_from_host(device_address(source.data_ptr()), room[:num_bytes])
    assert torch.equal(room, expected)


@pytest.mark.gpu
def test_memory_that_is_not_registered_has_no_device_address() -> None:
    from hetero_gpu.mapped import device_address

    torch.cuda.init()
    torch.zeros(1, device="cuda")
    with pytest.raises(RuntimeError, match="is not mapped for the device"):
        device_address(torch.zeros(4096, dtype=torch.uint8).data_ptr())
