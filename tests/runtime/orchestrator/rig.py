"""Experts with random weights behind a slab cache, for whichever orchestrator is under test."""

from __future__ import annotations

import torch
from transformers import OlmoeConfig
from transformers.models.olmoe.modeling_olmoe import OlmoeExperts

from hetero_gpu import Copier, SlabCache, SlabPool
from hetero_runtime.experts.record import RecordLayout
from hetero_scheduler import ExpertKey, SlotMachine, make_eviction

NUM_EXPERTS, TOP_K, HIDDEN, INNER = 8, 2, 16, 12


class CacheRig:
    """`experts`: transformers' own modules, on the CPU. `cache`: over records of them, on `device`."""

    def __init__(
        self,
        num_slots: int,
        copier: Copier,
        *,
        num_layers: int = 2,
        layer_slots: list[int] | None = None,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> None:
        config = OlmoeConfig(
            hidden_size=HIDDEN, intermediate_size=INNER, num_experts=NUM_EXPERTS, num_experts_per_tok=TOP_K
        )
        config._experts_implementation = "eager"
        torch.manual_seed(0)
        self.experts = [OlmoeExperts(config).to(dtype) for _ in range(num_layers)]
        for module in self.experts:
            for parameter in module.parameters():
                parameter.data.normal_(0, 0.3)
        self.layout = RecordLayout.of(
            [("gate_up_proj", dtype, (2 * INNER, HIDDEN)), ("down_proj", dtype, (HIDDEN, INNER))]
        )
        self.num_layers = num_layers
        self.eviction = make_eviction("lru", num_layers=num_layers, num_experts=NUM_EXPERTS)
        self.slabs = SlabPool(num_slots, self.layout.record_bytes, torch.device(device))
        is_pinned = device == "cuda"
        records = {
            key: self._record(key).pin_memory() if is_pinned else self._record(key) for key in self.all_keys()
        }
        self.cache = SlabCache(
            slabs=self.slabs,
            machine=SlotMachine(
                num_slots, num_layers=num_layers, num_experts=NUM_EXPERTS, layer_slots=layer_slots
            ),
            eviction=self.eviction,
            copier=copier,
            record=records.__getitem__,
        )

    def all_keys(self) -> list[ExpertKey]:
        return [ExpertKey(layer, e) for layer in range(self.num_layers) for e in range(NUM_EXPERTS)]

    def _record(self, key: ExpertKey) -> torch.Tensor:
        record = torch.zeros(self.layout.record_bytes, dtype=torch.uint8)
        for name, view in self.layout.view(record).items():
            view.copy_(self.experts[key.layer].get_parameter(name).detach()[key.expert])
        return record
