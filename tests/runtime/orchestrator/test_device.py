"""The device orchestrator without a GPU: its kernels in Triton's interpreter, its step not captured."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hetero_gpu.experts.decode import DecodeExperts
from hetero_gpu.experts.prefill import GroupedExperts
from hetero_gpu.tables import DeviceTables, MappedBank
from hetero_runtime.assembly import Parts, assemble
from hetero_runtime.config import load_config
from hetero_runtime.experts.kernel_format import expert_format
from hetero_runtime.hf.conversion import expert_modules
from hetero_runtime.hf.forward import SequenceState
from hetero_runtime.hf.hooks import attach
from hetero_runtime.hf.sequences import StaticSequences
from hetero_runtime.orchestrator import Orchestrator, Phase
from hetero_runtime.orchestrator.device import DeviceOrchestrator
from hetero_runtime.orchestrator.eager import EagerOrchestrator
from hetero_runtime.orchestrator.grouped import GroupedOrchestrator
from hetero_runtime.planned import plan_for
from tests.architectures import build_checkpoint, prompt_ids

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the interpreter stands in where there is no GPU"
)

Extend = Callable[[torch.Tensor], torch.Tensor]
"""Append ids to the only row and give the logits of the last one."""


def load(folder: Path, eviction: str) -> Parts:
    config = {
        "model": {"path": str(folder)},
        "device": "cpu",
        "memory": {"residency": 0.25},
        "eviction": {"policy": eviction},
        "execution": {"max_length": 64, "max_rows": 1},
    }
    return assemble(plan_for(load_config(config)).config)


def on_device(parts: Parts, top_k: int) -> DeviceOrchestrator:
    """The orchestrator, over tables and slabs in host memory."""
    cpu = torch.device("cpu")
    modules = list(expert_modules(parts.model).values())
    kernel_form = expert_format(parts.store.layout, parts.store.forms, modules[0])
    assert isinstance(parts.orchestrator, EagerOrchestrator)
    prefill = GroupedOrchestrator(
        parts.cache,
        slabs=parts.slabs,
        experts=GroupedExperts(kernel_form, top_k, max_tokens=64, dtype=torch.float32, device=cpu),
        eviction=parts.orchestrator.eviction,
        is_fetching_ahead=True,
    )
    orchestrator = DeviceOrchestrator(
        prefill,
        cache=parts.cache,
        slabs=parts.slabs,
        bank=MappedBank(parts.store.records.data_ptr(), parts.store.layout.record_bytes),
        tables=DeviceTables(
            num_slots=parts.slabs.num_slabs,
            num_layers=parts.store.num_layers,
            num_experts=parts.store.num_experts,
            max_pairs=top_k,
            device=cpu,
        ),
        experts=DecodeExperts(kernel_form, top_k, max_tokens=1, dtype=torch.float32, device=cpu),
        active=torch.ones(1, dtype=torch.bool),
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
