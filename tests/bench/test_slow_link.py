"""A slow link brings what it should, and carries as much besides as was asked for."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.slow_link import ExtraBytes, LinkRates, SlowLink, read_besides, slow_gather
from hetero_gpu.control import CopyEngine
from hetero_gpu.tables import gather, gather_reference, unpack_landed
from hetero_runtime.orchestrator import captured_prefetch
from hetero_runtime.orchestrator import device as device_orchestrator
from tests.gpu.absent_gpu import assert_compiles
from tests.gpu.control.fake_link import FakeLink
from tests.gpu.tables.test_gather import NUM_EXPERTS, NUM_LAYERS, listed, pools

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the interpreter stands in where there is no GPU"
)

CPU = torch.device("cpu")
NUM_KEYS, RECORD_BYTES = NUM_LAYERS * NUM_EXPERTS, 4096
STEPS = """
from bench.slow_link import read_besides
from hetero_gpu.tables import MappedBank

for record_bytes in (12_582_912, 12_976_128):
    keys, count = torch.zeros(8, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    read_besides(MappedBank(1 << 40, record_bytes), keys, count, num_keys=1024, extra_bytes=14_000_000)
"""
_COPY = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_int, ctypes.c_int64
)


def copy_through(engine: CopyEngine, to: torch.Tensor, source: torch.Tensor) -> int:
    code: int = _COPY(engine.copy)(to.data_ptr(), source.data_ptr(), source.nbytes, 1, engine.stream)
    return code


def test_copies_bring_others_before_them() -> None:
    link, slow = FakeLink(), SlowLink()
    engine = slow.through(link.engine)
    record, slab = torch.arange(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    with slow.slowed(ExtraBytes(load=0, copy=160), 64, CPU):
        assert copy_through(engine, slab, record) == 0
        assert link.num_started == 4, "64, 64 and 32 bytes, then the record"
        query = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64)(engine.query)
        ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64, ctypes.c_int64)(engine.record)(
            engine.events[0], engine.stream
        )
        assert [query(engine.events[0]) for _ in range(4)][-1] == 0
        assert torch.equal(slab, record)
    assert copy_through(engine, slab, record) == 0
    assert link.num_started == 5, "full speed again"


def test_a_failing_copy_is_told() -> None:
    link, slow = FakeLink(fail_at=1), SlowLink()
    engine = slow.through(link.engine)
    record = torch.arange(64, dtype=torch.uint8)
    with slow.slowed(ExtraBytes(load=0, copy=64), 64, CPU):
        assert copy_through(engine, torch.zeros(64, dtype=torch.uint8), record) == 700


def test_engines_made_inside_go_through(monkeypatch: pytest.MonkeyPatch) -> None:
    link, slow = FakeLink(), SlowLink()
    monkeypatch.setattr(CopyEngine, "cuda", lambda _device: link.engine)
    with slow.wired():
        made = CopyEngine.cuda(CPU)
    assert (made.copy == link.engine.copy, made.query == link.engine.query) == (False, True)
    assert CopyEngine.cuda(CPU) is link.engine


@pytest.mark.parametrize("extra", [16, RECORD_BYTES, 3 * RECORD_BYTES + 1024])
def test_loads_read_other_records(extra: int) -> None:
    records, bank, _, _ = pools(CPU, RECORD_BYTES)
    tables = listed(CPU, [(0, 2), (3, 5)])
    sums = read_besides(bank, tables.miss_key, tables.miss_count, num_keys=NUM_KEYS, extra_bytes=extra)
    words, places = records.view(-1).numpy().view(np.int32), NUM_KEYS - -(-extra // RECORD_BYTES) + 1
    expected = np.int32(0)
    with np.errstate(over="ignore"):
        for key in (2, 5):
            begin = (key + places // 2) % places * (RECORD_BYTES // 4)
            expected += words[begin : begin + extra // 4].sum(dtype=np.int32)
        assert sums.numpy().sum(dtype=np.int32) == expected


def test_the_kernel_compiles(tmp_path: Path) -> None:
    assert_compiles(STEPS, 90, tmp_path)


def test_more_than_the_bank_has_is_refused() -> None:
    _, bank, _, _ = pools(CPU, RECORD_BYTES)
    tables = listed(CPU, [(0, 2)])
    with pytest.raises(ValueError, match="28672 bytes of 6 records of 4096"):
        read_besides(
            bank, tables.miss_key, tables.miss_count, num_keys=NUM_KEYS, extra_bytes=7 * RECORD_BYTES
        )


@pytest.mark.parametrize("is_late", [False, True])
def test_a_slow_load_brings_what_a_quick_one_brings(is_late: bool) -> None:
    records, bank, slabs, expected = pools(CPU, RECORD_BYTES)
    tables = listed(CPU, [(0, 2), (3, 5)])
    gather_reference(tables, records, expected)
    if is_late:
        tables.late_slot.copy_(tables.miss_slot)
        tables.late_key.copy_(tables.miss_key)
        tables.late_count.copy_(tables.miss_count)
        tables.miss_count.zero_()
    slow_gather(2048)(tables, 1, bank=bank, slabs=slabs, is_late=is_late)
    assert torch.equal(slabs.memory, expected.memory)
    assert tables.stats().bytes_moved == 2 * RECORD_BYTES, "what is carried besides is not counted"


def test_steps_captured_inside_load_slowly() -> None:
    modules = (device_orchestrator, captured_prefetch)
    with SlowLink().slowed(ExtraBytes(16, 16), RECORD_BYTES, CPU):
        assert all(module.gather is not gather for module in modules)
        assert captured_prefetch.unpack_landed is not unpack_landed
    assert all(module.gather is gather for module in modules)
    assert captured_prefetch.unpack_landed is unpack_landed


def test_how_much_makes_a_rate() -> None:
    assert LinkRates(50, 50, 50).slowed_to(25, 1600) == ExtraBytes(load=1600, copy=1600)
    assert LinkRates(40, 30, 50).slowed_to(25, 1600) == ExtraBytes(load=1200, copy=320)
    with pytest.raises(ValueError, match=r"a link of 20.0 and 50.0 GB/s cannot be slowed to 25"):
        LinkRates(20, 50, 50).slowed_to(25, 1600)


def test_rates_are_measured() -> None:
    records, bank, _, _ = pools(CPU, RECORD_BYTES)
    rates = LinkRates.of(records, bank, (NUM_LAYERS, NUM_EXPERTS), CPU)
    assert min(rates.load, rates.copy, rates.read) > 0
