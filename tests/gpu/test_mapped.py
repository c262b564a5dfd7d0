"""Memory that host and device address alike, and slabs of it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from hetero_gpu import MappedSlabs, SlabCache, mapped
from hetero_gpu.mapped import CudaMapper, MappedMemory
from hetero_scheduler import ExpertKey, SlotMachine, make_eviction
from tests.gpu.fake_copier import FakeCopier
from tests.gpu.fake_mapper import FakeMapper


def test_both_views_are_the_same_bytes() -> None:
    mapper = FakeMapper()
    memory = MappedMemory(8192, mapper)
    memory.host[4096:] = 7
    assert memory.device.tolist() == [0] * 4096 + [7] * 4096
    memory.close()
    memory.close()
    assert (mapper.num_freed, mapper.allocated) == (1, {})


def test_memory_without_an_alias_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    mapper = FakeMapper()

    def refuse(address: int, num_bytes: int) -> torch.Tensor:
        raise RuntimeError("not mapped for the device")

    monkeypatch.setattr(mapper, "alias", refuse)
    with pytest.raises(RuntimeError, match="not mapped"):
        MappedMemory(4096, mapper)
    assert mapper.num_freed == 1


def test_a_slab_is_filled_where_it_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    mapper = FakeMapper()
    monkeypatch.setattr(mapped, "CudaMapper", lambda: mapper)
    slabs, copier = MappedSlabs(2, 4096), FakeCopier()
    cache = SlabCache(
        slabs=slabs,
        machine=SlotMachine(2, num_layers=1, num_experts=3),
        eviction=make_eviction("lru", num_layers=1, num_experts=3),
        copier=copier,
        record=lambda key: torch.full((4096,), key.expert, dtype=torch.uint8),
    )
    for expert in range(3):
        key = ExpertKey(0, expert)
        cache.begin_layer(0, frozenset([key]))
        assert cache.load(key)
        cache.wait(key)
        assert cache.slab(key).unique().tolist() == [expert]
        assert slabs.landing(cache.slot(key)).unique().tolist() == [expert]
        cache.release([key])
    cache.close()
    slabs.close()
    assert mapper.num_freed == 1


@pytest.mark.gpu
def test_kernels_read_what_the_host_wrote() -> None:
    memory = MappedMemory(1 << 20)
    values = torch.arange(1 << 18, dtype=torch.int32)
    memory.host.view(torch.int32).copy_(values)
    assert memory.device.is_cuda
    assert torch.equal((memory.device.view(torch.int32) + 1).cpu(), values + 1)
    memory.host.zero_()
    assert not (memory.device + 0).any()
    memory.close()


@pytest.mark.gpu
def test_products_read_weights_where_they_lie() -> None:
    memory = MappedMemory(512 * 256 * 2)
    weight = torch.randn(512, 256).to(torch.bfloat16)
    memory.host.view(torch.bfloat16).view(512, 256).copy_(weight)
    lying = memory.device.view(torch.bfloat16).view(512, 256)
    x = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16)
    assert torch.equal(x @ lying.T, x @ weight.cuda().T)
    memory.close()


@pytest.mark.gpu
def test_the_driver_refuses_more_than_there_is() -> None:
    with pytest.raises(MemoryError, match="maps no"):
        CudaMapper().allocate(1 << 50)
    assert int(torch.ones(1, device="cuda")) == 1


def test_boards_without_triton_have_it_too() -> None:
    program = (
        "import sys; sys.modules['triton'] = None; import hetero_gpu.cuda_transfer, hetero_gpu.slabs; "
        "assert 'hetero_gpu.mapped' in sys.modules"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
