"""The device orchestrator without a GPU: its kernels in Triton's interpreter, its step not captured."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hetero_gpu.control import ControlRegion, Word
from hetero_gpu.experts.decode import DecodeExperts
from hetero_gpu.experts.prefill import GroupedExperts
from hetero_gpu.tables import DeviceTables, MappedBank
from hetero_runtime.assembly import Parts, assemble
from hetero_runtime.config import load_config
from hetero_runtime.experts.kernel_format import expert_format
from hetero_runtime.hf.conversion import expert_modules
from hetero_runtime.hf.forward import SequenceState
from hetero_runtime.hf.hooks import attach
from hetero_runtime.hf.pregate import PreGate
from hetero_runtime.hf.sequences import StaticSequences
from hetero_runtime.orchestrator import Orchestrator, Phase
from hetero_runtime.orchestrator.captured_prefetch import (
    MOST_OUTSTANDING,
    Asker,
    AskOneLayerAhead,
    CapturedPrefetch,
)
from hetero_runtime.orchestrator.device import DeviceOrchestrator
from hetero_runtime.orchestrator.eager import EagerOrchestrator
from hetero_runtime.orchestrator.grouped import GroupedOrchestrator
from hetero_runtime.planned import plan_for
from hetero_scheduler import Popularity
from tests.architectures import build_checkpoint, prompt_ids
from tests.gpu.control.fake_link import FakeLink

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the interpreter stands in where there is no GPU"
)

Extend = Callable[[torch.Tensor], torch.Tensor]
"""Append ids to the only row and give the logits of the last one."""
MakeAsker = Callable[[Parts, DeviceTables, ControlRegion, torch.Tensor], Asker]


def load(folder: Path, eviction: str, residency: float = 0.25) -> Parts:
    config = {
        "model": {"path": str(folder)},
        "device": "cpu",
        "memory": {"residency": residency},
        "preset": "seqmoe" if eviction == "belady" else "lru",
        "eviction": {"policy": eviction},
        "execution": {"max_length": 64, "max_rows": 1},
    }
    return assemble(plan_for(load_config(config)).config)


def asks_by_pregate(parts: Parts, tables: DeviceTables, region: ControlRegion, active: torch.Tensor) -> Asker:
    look_ahead = PreGate(parts.model, num_guesses=tables.max_pairs, active=active)
    return AskOneLayerAhead(look_ahead, tables=tables, region=region)


def on_device(
    parts: Parts, top_k: int, link: FakeLink | None = None, *, make_asker: MakeAsker = asks_by_pregate
) -> DeviceOrchestrator:
    """The orchestrator, over tables and slabs in host memory. With a `link` it prefetches."""
    cpu = torch.device("cpu")
    modules = list(expert_modules(parts.model).values())
    kernel_form = expert_format(parts.store.layout, parts.store.forms, modules[0])
    assert isinstance(parts.orchestrator, EagerOrchestrator)
    prefill = GroupedOrchestrator(
        parts.cache,
        slabs=parts.slabs,
        experts=GroupedExperts(kernel_form, top_k, max_tokens=64, dtype=torch.float32, device=cpu),
        eviction=parts.orchestrator.eviction,
        popularity=Popularity(parts.store.num_layers, parts.store.num_experts),
        is_fetching_ahead=True,
    )
    bank = MappedBank(parts.store.records.data_ptr(), parts.store.layout.record_bytes)
    tables = DeviceTables(
        num_slots=parts.slabs.num_slabs,
        num_layers=parts.store.num_layers,
        num_experts=parts.store.num_experts,
        max_pairs=top_k,
        device=cpu,
    )
    active = torch.ones(1, dtype=torch.bool)
    prefetch = None
    if link is not None:
        link.stop_poisoning()
        region = ControlRegion(cpu, ring_size=MOST_OUTSTANDING)
        tables.attach(region)
        prefetch = CapturedPrefetch(
            make_asker(parts, tables, region, active),
            tables=tables,
            region=region,
            bank=bank,
            records=parts.store.records,
            slabs=parts.slabs,
            engine=link.engine,
        )
    orchestrator = DeviceOrchestrator(
        prefill,
        cache=parts.cache,
        slabs=parts.slabs,
        bank=bank,
        tables=tables,
        experts=DecodeExperts(kernel_form, top_k, max_tokens=1, dtype=torch.float32, device=cpu),
        active=active,
        prefetch=prefetch,
    )
    attach(modules, orchestrator.run_layer)
    return orchestrator


def greedy(orchestrator: Orchestrator, prefill: Extend, decode: Extend, num_steps: int) -> list[int]:
    with orchestrator.pass_(Phase.PREFILL, checkpoint=lambda: None):
        tokens = [int(prefill(prompt_ids(9)[0]).argmax())]
    for _ in range(num_steps):
        with orchestrator.pass_(Phase.DECODE, checkpoint=lambda: None):
            tokens.append(int(decode(torch.tensor(tokens[-1:])).argmax()))
    return tokens


@pytest.mark.parametrize(
    ("name", "top_k", "eviction"),
    [
        ("Mixtral", 2, "lru"),
        ("GptOssMxfp4", 2, "lfu"),
        pytest.param("MiniMaxM2", 2, "lfru", marks=pytest.mark.slow),
    ],
)
def test_decode_on_the_device_gives_the_eager_tokens(
    tmp_path: Path, name: str, top_k: int, eviction: str
) -> None:
    parts = load(build_checkpoint(name, tmp_path), eviction)
    eager = SequenceState(parts.model)
    expected = greedy(parts.orchestrator, eager.extend, eager.extend, num_steps=3)
    before = parts.cache.stats()
    orchestrator = on_device(parts, top_k)
    sequences = StaticSequences(parts.model, rows=1, max_length=64)
    got = greedy(
        orchestrator,
        lambda ids: sequences.prefill(0, ids),
        lambda token: sequences.decode(token)[0],
        num_steps=3,
    )
    assert got == expected
    counted = orchestrator.device_stats()
    assert counted.required == counted.hits + counted.misses == 3 * top_k * parts.store.num_layers
    assert counted.bytes_moved == counted.misses * parts.store.layout.record_bytes
    assert parts.cache.stats().required > before.required  # prefill was counted on the host
    orchestrator.check()
    parts.close()


@pytest.mark.parametrize(
    "trouble",
    [pytest.param("slow", marks=pytest.mark.slow), pytest.param("none", marks=pytest.mark.slow), "killed"],
)
def test_prefetching_changes_no_token(tmp_path: Path, trouble: str) -> None:
    parts = load(build_checkpoint("Mixtral", tmp_path), "lru", residency=0.6)
    eager = SequenceState(parts.model)
    expected = greedy(parts.orchestrator, eager.extend, eager.extend, num_steps=3)
    link = FakeLink(delay=500 if trouble == "slow" else 0)
    orchestrator = on_device(parts, 2, link)
    sequences = StaticSequences(parts.model, rows=1, max_length=64)

    def decode(token: torch.Tensor) -> torch.Tensor:
        if trouble == "killed" and sequences.length(0) == 10:
            worker = orchestrator._prefetch._worker  # type: ignore[union-attr]
            worker._region.write(Word.STOP, 1)
            worker._thread.join()
        return sequences.decode(token)[0]

    def run() -> list[int]:
        return greedy(orchestrator, lambda ids: sequences.prefill(0, ids), decode, num_steps=3)

    if trouble == "killed":
        with pytest.raises(RuntimeError, match="the prefetch worker ended"):
            run()
        sequences.reset(0)
    assert run() == expected  # a dead worker is told of once, and then done without
    stats = orchestrator.device_stats()
    assert stats.prefetches > 0
    assert stats.required == stats.hits + stats.late + stats.misses
    orchestrator.check()
    orchestrator.close()
    parts.close()
