"""The kernels around a call to the CPU compile for GPUs that are not here."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.absent_gpu import assert_compiles

pytest.importorskip("triton")

STEPS = """
from hetero_gpu.control import ControlRegion
from hetero_gpu import overlap
from hetero_gpu.in_place import Calls, Mailbox
from hetero_gpu.tables import DeviceTables, Dividing, Division, Running, Windows, ensure

overlap._can_overlap = lambda device: True

cpu = torch.device("cpu")
for rows, policy in ((1, "lru"), (2, "lookahead"), (4, "lfru")):
    tables = DeviceTables(num_slots=1500, num_layers=48, num_experts=128, max_pairs=8 * rows, device=cpu)
    tables.policy = policy
    region = ControlRegion(cpu)
    tables.attach(region)
    mailbox = Mailbox(cpu, rows=rows, hidden=2048, top_k=8)
    if rows == 4:  # host memory may lie below 2 GiB
        mailbox.head_at = mailbox.experts_at = mailbox.weights_at = 4096
        mailbox.hidden_at = mailbox.total_at = 8192
    index, weights = torch.zeros(rows, 8, dtype=torch.long), torch.ones(rows, 8, dtype=torch.bfloat16)
    hidden = torch.zeros(rows, 2048, dtype=torch.bfloat16)
    calls = Calls(mailbox, region, cpu)
    windows = Windows(tables, torch.zeros(rows, 3, 48, 128))
    running = Running(windows, torch.ones(rows, dtype=torch.bool)) if policy == "lookahead" else None
    ensure(tables, 3, index, running=running, dividing=Dividing(Division(tables, calls), hidden, weights))
    calls.add_answer(hidden, error_address=0)
"""


def test_the_kernels_compile(tmp_path: Path) -> None:
    assert_compiles(STEPS, 90, tmp_path)
