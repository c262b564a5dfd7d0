"""Layers that prefetch from a bank of packed records: what they bring, and what each of them launches."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from hetero_gpu import SlabPool
from hetero_gpu.control import ControlRegion
from hetero_gpu.packed import PackedLayout
from hetero_gpu.tables import DeviceTables, MappedBank, ensure, gather
from hetero_runtime.orchestrator.captured_prefetch import AskOneLayerAhead, CapturedPrefetch
from hetero_runtime.plan.captured import MOST_OUTSTANDING
from hetero_scheduler import SlotState
from tests.gpu.control.fake_link import FakeLink
from tests.gpu.tables.test_prefetch import NUM_EXPERTS, NUM_LAYERS, packed_records

interpreter = pytest.importorskip("triton.runtime.interpreter")

CPU = torch.device("cpu")
NUM_SLOTS, TOP_K, NUM_PASSES = 8, 2, 4
LAYOUT = PackedLayout(2048)


class Layers:
    """Each layer requires two experts, and the next layer's were asked for; a worker brings them."""

    def __init__(self) -> None:
        self.plain, packed = packed_records(LAYOUT)
        self.bank = MappedBank(packed.data_ptr(), LAYOUT.packed_bytes, LAYOUT)
        self.slabs = SlabPool(NUM_SLOTS, LAYOUT.plain_bytes, CPU)
        self.tables = DeviceTables(
            num_slots=NUM_SLOTS, num_layers=NUM_LAYERS, num_experts=NUM_EXPERTS, max_pairs=TOP_K, device=CPU
        )
        self.tables.pools.copy_(torch.tensor([[0, NUM_SLOTS]] * NUM_LAYERS))
        region = ControlRegion(CPU, ring_size=MOST_OUTSTANDING)
        self.tables.attach(region)
        link = FakeLink(delay=0)
        link.stop_poisoning()
        self.prefetch = CapturedPrefetch(
            AskOneLayerAhead(self.ahead),
            tables=self.tables,
            region=region,
            bank=self.bank,
            records=packed,
            slabs=self.slabs,
            engine=link.engine,
        )
        self.step = 0

    def chosen(self, layer: int, step: int) -> list[int]:
        return [(layer + step) % NUM_EXPERTS, (layer + step + 2) % NUM_EXPERTS]

    def ahead(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        step, layer = (self.step, layer + 1) if layer + 1 < NUM_LAYERS else (self.step + 1, 0)
        keys = [layer * NUM_EXPERTS + expert for expert in self.chosen(layer, step)]
        return torch.tensor(keys, dtype=torch.int32)

    def run(self, layer: int) -> None:
        chosen = torch.tensor([self.chosen(layer, self.step)])
        pending = self.prefetch.begin_layer(layer, chosen)
        slots = ensure(self.tables, layer, chosen, awaits_late=True, **pending._asdict())
        gather(self.tables, layer, bank=self.bank, slabs=self.slabs)
        self.prefetch.ask_and_await(layer, torch.zeros(1, 1), slots)
        expected = self.plain[layer * NUM_EXPERTS + chosen[0]]
        assert torch.equal(self.slabs.memory[slots[0].long()], expected)
        if layer == NUM_LAYERS - 1:
            self.prefetch.end_step()
            self.step += 1


@pytest.fixture
def layers() -> Iterator[Layers]:
    made = Layers()
    yield made
    made.prefetch.close()


def test_packed_records_are_there_when_their_layer_runs(layers: Layers) -> None:
    for _ in range(NUM_PASSES):
        for layer in range(NUM_LAYERS):
            layers.run(layer)
    layers.prefetch.finish()
    layers.tables.raise_if_failed()
    layers.prefetch.raise_if_failed()
    stats = layers.tables.stats()
    assert stats.prefetches > 0
    assert stats.late + stats.hits_prefetched > 0
    assert not (layers.tables.export().state == SlotState.FETCH).any(), "every task has come to its end"
    assert stats.required == NUM_LAYERS * TOP_K * NUM_PASSES


def test_a_layer_launches_so_much(layers: Layers, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[str] = []
    run = interpreter.InterpretedFunction.run

    def noted(kernel: object, *args: object, **options: object) -> None:
        launched.append(kernel.fn.__name__)  # type: ignore[attr-defined]
        run(kernel, *args, **options)

    monkeypatch.setattr(interpreter.InterpretedFunction, "run", noted)
    layers.run(0)
    assert launched == [
        "_ensure_kernel",
        "_gather_packed_kernel",
        "_await_kernel",
        "_unpack_kernel",
    ]
