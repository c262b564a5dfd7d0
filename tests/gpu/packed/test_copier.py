"""Packed copies on real streams: right bytes, in order, fenced where slabs and buffers are reused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hetero_gpu import make_copier
from hetero_gpu.host_memory import Registration
from hetero_gpu.packed import PackedLayout
from hetero_gpu.packed.copier import PackedCopier
from hetero_gpu.packed.layout import CHUNK_ELEMENTS
from hetero_gpu.packed.reference import pack_reference
from hetero_gpu.staging import StagingRing
from tests.gpu.packed.records import as_bytes, weights

LAYOUT = PackedLayout(5 * CHUNK_ELEMENTS + 64)
NUM_RECORDS = 7
SLEEP_CYCLES = 50_000_000
"""Some 30 ms: long beside any copy here."""

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def records() -> tuple[torch.Tensor, torch.Tensor]:
    """Plain records and the same packed, pinned; a row each."""
    plain = np.stack([as_bytes(weights(LAYOUT.num_elements, seed=i)) for i in range(NUM_RECORDS)])
    rows = [pack_reference(row, LAYOUT) for row in plain]
    packed = np.stack([row for row in rows if row is not None])
    return torch.from_numpy(plain), torch.from_numpy(packed).pin_memory()


def make_slabs(num_slabs: int = NUM_RECORDS) -> torch.Tensor:
    return torch.full((num_slabs, LAYOUT.plain_bytes), 0xA5, dtype=torch.uint8, device="cuda")


@pytest.mark.parametrize("num_buffers", [1, 2, 4])
@pytest.mark.parametrize("is_staged", [False, True], ids=["direct", "staged"])
def test_records_arrive_whole(
    records: tuple[torch.Tensor, torch.Tensor], num_buffers: int, is_staged: bool
) -> None:
    plain, packed = records
    options = {"copy": StagingRing(buffer_bytes=LAYOUT.packed_bytes, num_buffers=2).copy} if is_staged else {}
    copier = PackedCopier(torch.device("cuda"), LAYOUT, num_buffers=num_buffers, **options)
    slabs = make_slabs()
    transfers = [copier.submit(packed[i], slabs[i], after=copier.fence()) for i in range(NUM_RECORDS)]
    for transfer in transfers:
        transfer.wait()
    assert torch.equal(slabs.clone().cpu(), plain)
    copier.synchronize()
    assert all(transfer.is_done() for transfer in transfers)


def test_buffers_are_not_overwritten_before_they_are_decoded(
    records: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """The decode of the first records stands still behind a slow reader of their slabs."""
    plain, packed = records
    copier, slabs = PackedCopier(torch.device("cuda"), LAYOUT, num_buffers=2), make_slabs()
    torch.cuda._sleep(SLEEP_CYCLES)
    fence = copier.fence()
    for i in range(NUM_RECORDS):
        copier.submit(packed[i], slabs[i], after=fence)
    copier.synchronize()
    assert torch.equal(slabs.cpu(), plain)


def test_a_slab_is_written_after_its_last_read(records: tuple[torch.Tensor, torch.Tensor]) -> None:
    plain, packed = records
    copier, slabs = PackedCopier(torch.device("cuda"), LAYOUT), make_slabs(1)
    copier.submit(packed[0], slabs[0], after=copier.fence()).wait()
    torch.cuda._sleep(SLEEP_CYCLES)
    read = slabs.clone()  # late
    second = copier.submit(packed[1], slabs[0], after=copier.fence())
    assert not second.is_done()
    second.wait()
    assert torch.equal(slabs.clone().cpu()[0], plain[1])
    assert torch.equal(read.cpu()[0], plain[0])


def test_the_later_of_two_copies_into_a_slab_stays(records: tuple[torch.Tensor, torch.Tensor]) -> None:
    plain, packed = records
    copier, slabs = PackedCopier(torch.device("cuda"), LAYOUT, num_buffers=3), make_slabs(1)
    for i in range(NUM_RECORDS):
        copier.submit(packed[i], slabs[0], after=None)
    copier.synchronize()
    assert torch.equal(slabs.cpu()[0], plain[-1])


@pytest.mark.parametrize("kind", ["registered", "staging", "none"])
def test_the_face_makes_it(kind: str, records: tuple[torch.Tensor, torch.Tensor]) -> None:
    plain, packed = records
    registration = Registration(kind, "")  # type: ignore[arg-type]
    copier = make_copier(
        torch.device("cuda"), registration=registration, record_bytes=LAYOUT.packed_bytes, packing=LAYOUT
    )
    slabs = make_slabs(1)
    copier.submit(packed[2].clone(), slabs[0], after=copier.fence()).wait()
    assert torch.equal(slabs.clone().cpu()[0], plain[2])
