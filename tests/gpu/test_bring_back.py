"""What leaves a slab comes back whole, whatever is copied over it meanwhile."""

from __future__ import annotations

import itertools

import pytest
import torch

from hetero_gpu import HostCopier, LinkCopier, make_copier
from hetero_gpu.host_memory import Registration

RECORD_BYTES = 3 << 20
SLEEP_CYCLES = 20_000_000
"""Some 10 ms: long beside a copy."""


def _records(count: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (count, RECORD_BYTES), dtype=torch.uint8, generator=draw)


def _exchange(copier: LinkCopier, device: torch.device, buffer: torch.Tensor) -> None:
    """One record after another through one slab; each comes back before it is lost."""
    records = _records(6)
    slab = torch.empty(RECORD_BYTES, dtype=torch.uint8, device=device)
    copied = copier.submit(records[0], slab, after=None)
    for before, record in itertools.pairwise(records):
        there = copier.bring_back(slab, buffer, copied=copied)
        copied = copier.submit(record, slab, after=None)
        there.synchronize()
        assert torch.equal(buffer, before)
    copied.wait()
    copier.synchronize()
    assert torch.equal(slab.cpu(), records[-1])


def test_host() -> None:
    _exchange(HostCopier(), torch.device("cpu"), torch.empty(RECORD_BYTES, dtype=torch.uint8))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["staging", "registered"])
def test_cuda(kind: str) -> None:
    device = torch.device("cuda")
    registration = Registration("staging" if kind == "staging" else "registered", "")
    copier = make_copier(device, registration=registration, record_bytes=RECORD_BYTES)
    buffer = torch.empty(RECORD_BYTES, dtype=torch.uint8, pin_memory=True)
    _exchange(copier, device, buffer)
    torch.cuda._sleep(SLEEP_CYCLES)  # computation that is busy does not hold it up
    _exchange(copier, device, buffer)
    copier.close()
