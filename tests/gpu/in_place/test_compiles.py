"""The kernels around a call to the CPU compile for GPUs that are not here."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.absent_gpu import assert_compiles

pytest.importorskip("triton")

STEPS = """
from hetero_gpu.control import ControlRegion
from hetero_gpu.in_place import Division, Mailbox, add_answer, call, divide
from hetero_gpu.tables import DeviceTables

cpu = torch.device("cpu")
for rows, policy in ((1, "lru"), (2, "lookahead"), (4, "lfru")):
    tables = DeviceTables(num_slots=1500, num_layers=48, num_experts=128, max_pairs=8 * rows, device=cpu)
    tables.policy = policy
    region, division = ControlRegion(cpu), Division(tables)
    mailbox = Mailbox(cpu, rows=rows, hidden=2048, top_k=8)
    if rows == 4:  # host memory may lie below 2 GiB
        mailbox.head_at = mailbox.experts_at = mailbox.weights_at = 4096
        mailbox.hidden_at = mailbox.total_at = 8192
    index, weights = torch.zeros(rows, 8, dtype=torch.long), torch.ones(rows, 8, dtype=torch.bfloat16)
    hidden = torch.zeros(rows, 2048, dtype=torch.bfloat16)
    divide(tables, 3, index, weights, division=division)
    call(3, hidden, weights, division=division, mailbox=mailbox, region=region)
    add_answer(hidden, division=division, mailbox=mailbox, region=region, error_address=0)
"""


def test_the_kernels_compile(tmp_path: Path) -> None:
    assert_compiles(STEPS, 90, tmp_path)
