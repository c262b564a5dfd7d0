"""The slot tables' kernels compile for GPUs that are not here, starting early as they do there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.absent_gpu import assert_compiles

pytest.importorskip("triton")

STEP = """
from hetero_gpu import overlap
from hetero_gpu.control import ControlRegion
from hetero_gpu.packed.layout import PackedLayout
from hetero_gpu.slabs import SlabPool
from hetero_gpu.tables import DeviceTables, Landings, MappedBank, await_late, create_prefetch, ensure, land
from hetero_gpu.tables import Wanted, unpack_landed

overlap._can_overlap = lambda device: True
cpu = torch.device("cpu")
region = ControlRegion(cpu, ring_size=4)
tables = DeviceTables(num_slots=512, num_layers=16, num_experts=64, max_pairs=8, device=cpu)
tables.attach(region)
landings = Landings(region, 64, is_staged=True)
land(tables, landings)
slots = ensure(tables, 0, torch.zeros(1, 8, dtype=torch.int64), awaits_late=True, landings=landings)
tables.policy = "lookahead"
ensure(tables, 1, torch.zeros(1, 8, dtype=torch.int64))
create_prefetch(tables, 0, torch.zeros(2, dtype=torch.int32), region=region, kept_back=3)
await_late(tables, slots, landings)
await_late(tables, slots, landings, wanted=Wanted(1, torch.zeros(2, dtype=torch.int32)))
staging, slabs = torch.zeros(4, 64, dtype=torch.uint8), SlabPool(4, 64, cpu)
layout = PackedLayout(1 << 20)
packed = {"region": region, "staging": staging, "bank": MappedBank(0, layout.packed_bytes, layout)}
for late_layer in (None, 3):
    unpack_landed(tables, slabs=slabs, late_layer=late_layer, **packed)
assert all("griddepcontrol.wait" in each.asm["ptx"] for each in compiled)
"""


def test_the_kernels_compile(tmp_path: Path) -> None:
    assert_compiles(STEP, 90, tmp_path)
