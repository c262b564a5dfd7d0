"""Registration with a fake CUDA that refuses when told to, and with the real one where there is one."""

from __future__ import annotations

import pytest
import torch

from hetero_gpu.host_memory import register


class FakeRegistrar:
    """Registers up to `capacity` bytes, like a machine with a pin quota."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.registered: dict[int, int] = {}

    def register(self, address: int, num_bytes: int) -> int:
        if sum(self.registered.values()) + num_bytes > self.capacity:
            return 2
        self.registered[address] = num_bytes
        return 0

    def unregister(self, address: int) -> int:
        del self.registered[address]
        return 0

    def explain(self, code: int) -> str:
        return f"out of memory ({code})"


def test_all_bytes_are_registered_in_chunks_and_released_once() -> None:
    memory, cuda = torch.zeros(1000, dtype=torch.uint8), FakeRegistrar(1000)
    registration = register(memory, chunk_bytes=300, registrar=cuda)
    assert registration.kind == "registered"
    start = memory.data_ptr()
    assert cuda.registered == {start: 300, start + 300: 300, start + 600: 300, start + 900: 100}
    registration.release()
    registration.release()
    assert not cuda.registered


def test_a_quota_leads_to_staging_and_leaves_nothing_registered() -> None:
    cuda = FakeRegistrar(700)
    registration = register(
        torch.zeros(1000, dtype=torch.uint8), chunk_bytes=300, registrar=cuda, can_pin=lambda: True
    )
    assert registration.kind == "staging"
    assert "then refused: out of memory (2)" in registration.reason
    assert "small pinned buffers" in registration.reason
    assert not cuda.registered


def test_where_nothing_can_be_pinned_copies_are_plain() -> None:
    registration = register(
        torch.zeros(10, dtype=torch.uint8), chunk_bytes=10, registrar=FakeRegistrar(0), can_pin=lambda: False
    )
    assert registration.kind == "none"
    assert "not even small buffers can be pinned" in registration.reason


@pytest.mark.gpu
def test_registered_memory_is_pinned_and_copies_right() -> None:
    memory = torch.randint(0, 256, (8 << 20,), dtype=torch.uint8)
    registration = register(memory, chunk_bytes=1 << 20)
    assert registration.kind == "registered", registration.reason
    assert memory[: 1 << 20].is_pinned()
    assert torch.equal(memory[: 1 << 20].to("cuda", non_blocking=True).cpu(), memory[: 1 << 20])
    registration.release()


@pytest.mark.gpu
def test_a_refusal_does_not_haunt_the_next_kernel() -> None:
    memory = torch.zeros(1 << 20, dtype=torch.uint8)
    first = register(memory, chunk_bytes=1 << 20)
    again = register(memory, chunk_bytes=1 << 20)  # already registered: CUDA refuses
    assert (first.kind, again.kind) == ("registered", "staging")
    assert int(torch.ones(4, device="cuda").sum()) == 4
    first.release()
