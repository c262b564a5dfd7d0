"""The staging ring on a CPU: a link whose copies read their buffer only when they are waited for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from hetero_gpu.staging import StagingRing


class FakeEvent:
    """Runs its copy when it is waited for: a buffer that is reused too early shows in the bytes."""

    def __init__(self, copy: Callable[[], object]) -> None:
        self._copy: Callable[[], object] | None = copy

    def synchronize(self) -> None:
        if self._copy is not None:
            self._copy()
            self._copy = None

    def query(self) -> bool:
        return self._copy is None


class FakeLink:
    """Counts its copies and does them late."""

    def __init__(self) -> None:
        self.allocated: list[int] = []
        self.events: list[FakeEvent] = []

    def allocate(self, num_bytes: int) -> torch.Tensor:
        self.allocated.append(num_bytes)
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def copy(self, source: torch.Tensor, target: torch.Tensor, stream: object) -> FakeEvent:
        self.events.append(FakeEvent(lambda: target.copy_(source)))
        return self.events[-1]


@pytest.mark.parametrize("num_bytes", [1, 99, 100, 101, 400, 1234])
@pytest.mark.parametrize("num_buffers", [1, 2, 4])
def test_bytes_arrive_whole(num_bytes: int, num_buffers: int) -> None:
    link = FakeLink()
    ring = StagingRing(buffer_bytes=100, num_buffers=num_buffers, link=link)
    source = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8)
    target = torch.zeros_like(source)
    last = ring.copy(source, target, None)
    expected = source.clone()
    source.zero_()  # the ring has taken what it needs
    assert last is link.events[-1]
    ring.synchronize()
    assert torch.equal(target, expected)
    assert link.allocated == [100] * num_buffers
    assert len(link.events) == -(-num_bytes // 100)


def test_the_ring_waits_only_when_it_has_to() -> None:
    link = FakeLink()
    ring = StagingRing(buffer_bytes=10, num_buffers=2, link=link)
    source = torch.arange(30, dtype=torch.uint8)
    ring.copy(source[:20], torch.zeros(20, dtype=torch.uint8), None)
    assert [event.query() for event in link.events] == [False, False]
    ring.copy(source[20:], torch.zeros(10, dtype=torch.uint8), None)
    assert [event.query() for event in link.events] == [True, False, False]


def test_lengths_must_agree() -> None:
    ring = StagingRing(buffer_bytes=10, link=FakeLink())
    with pytest.raises(AssertionError, match="copy of 3 to 4 bytes"):
        ring.copy(torch.zeros(3, dtype=torch.uint8), torch.zeros(4, dtype=torch.uint8), None)


@pytest.mark.gpu
def test_copies_on_a_real_stream() -> None:
    ring = StagingRing(buffer_bytes=1 << 16, num_buffers=2)
    source = torch.randint(0, 256, (1_000_003,), dtype=torch.uint8)
    target = torch.zeros(source.numel(), dtype=torch.uint8, device="cuda")
    stream = torch.cuda.Stream()
    ring.copy(source, target, stream).synchronize()
    assert torch.equal(target.cpu(), source)
