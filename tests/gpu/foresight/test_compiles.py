"""The kernels of foresight compile for GPUs that are not here."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.absent_gpu import assert_compiles

pytest.importorskip("triton")

LAYER = """
from hetero_gpu.control import ControlRegion
from hetero_gpu.foresight import Candidates, JsdPrefetch, RefinedForecasts, Room
from tests.runtime.foresight.predictors import random_refinement
from hetero_gpu.tables import (
    DeviceTables, Landings, Running, Windows, await_late, create_prefetch, ensure, land
)

cpu = torch.device("cpu")
tables = DeviceTables(num_slots=1536, num_layers=48, num_experts=128, max_pairs=16, device=cpu)
region, active = ControlRegion(cpu, ring_size=4), torch.ones(2, dtype=torch.bool)
tables.attach(region)
tables.policy = "belady"
windows = Windows(tables, torch.zeros(2, 8, 48, 128))
candidates = Candidates(windows, per_layer=11)
landings = Landings(region, 4096)
land(tables, landings)
slots = ensure(
    tables, 0, torch.zeros(2, 8, dtype=torch.long), awaits_late=True, running=Running(windows, active)
)
await_late(tables, slots, landings)
windows.renew(range(24), active)
candidates.renew(range(24))
for is_shared in (True, False):
    JsdPrefetch(candidates, tables=tables, region=region, room=Room(16, is_shared)).ask(0)
nearer = JsdPrefetch(candidates, tables=tables, region=region, room=Room(16, True))
nearer.looks_at_next = True
nearer.ask(0)
refined = RefinedForecasts(windows, random_refinement(48, 128))
refined.with_tokens(torch.zeros(2, dtype=torch.long), active)
refined.with_next_router(1, torch.zeros(2, 128, dtype=torch.bfloat16), active)
create_prefetch(tables, 0, torch.zeros(4, dtype=torch.int32), region=region)
"""


def test_the_kernels_compile(tmp_path: Path) -> None:
    assert_compiles(LAYER, 90, tmp_path)
