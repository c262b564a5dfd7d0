"""Experts with random weights behind a slab cache, for whichever orchestrator is under test."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch
from transformers import OlmoeConfig
from transformers.models.olmoe.modeling_olmoe import OlmoeExperts

from hetero_gpu import Copier, SlabCache, SlabPool
from hetero_runtime.experts.record import RecordLayout
from hetero_scheduler import ExpertKey, SlotMachine, make_eviction

NUM_EXPERTS, TOP_K, HIDDEN = 8, 2, 16


class Sizes(NamedTuple):
    """Of a layer's experts."""

    num_experts: int = NUM_EXPERTS
    top_k: int = TOP_K
    hidden: int = HIDDEN
    inner: int = 12


class CacheRig:
    """`experts`: transformers' own modules, on the CPU. `cache`: over records of them, on `device`."""

    def __init__(
        self,
        num_slots: int,
        copier: Copier,
        *,
        num_layers: int = 2,
        layer_slots: list[int] | None = None,
        sizes: Sizes = Sizes(),  # noqa: B008 (a tuple)
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        policy: str = "lru",
    ) -> None:
        self.sizes, self.num_layers = sizes, num_layers
        config = OlmoeConfig(
            hidden_size=sizes.hidden,
            intermediate_size=sizes.inner,
            num_experts=sizes.num_experts,
            num_experts_per_tok=sizes.top_k,
        )
        config._experts_implementation = "eager"
        torch.manual_seed(0)
        self.experts = [OlmoeExperts(config).to(dtype) for _ in range(num_layers)]
        for module in self.experts:
            for parameter in module.parameters():
                parameter.data.normal_(0, 0.3)
        up, down = (2 * sizes.inner, sizes.hidden), (sizes.hidden, sizes.inner)
        self.layout = RecordLayout.of([("gate_up_proj", dtype, up), ("down_proj", dtype, down)])
        self.eviction = make_eviction(policy, num_layers=num_layers, num_experts=sizes.num_experts)
        self.slabs = SlabPool(num_slots, self.layout.record_bytes, torch.device(device))
        is_pinned = device == "cuda"
        records = {
            key: self._record(key).pin_memory() if is_pinned else self._record(key) for key in self.all_keys()
        }
        self.cache = SlabCache(
            slabs=self.slabs,
            machine=SlotMachine(
                num_slots, num_layers=num_layers, num_experts=sizes.num_experts, layer_slots=layer_slots
            ),
            eviction=self.eviction,
            copier=copier,
            record=records.__getitem__,
        )

    def all_keys(self) -> list[ExpertKey]:
        return [
            ExpertKey(layer, e) for layer in range(self.num_layers) for e in range(self.sizes.num_experts)
        ]

    def _record(self, key: ExpertKey) -> torch.Tensor:
        record = torch.zeros(self.layout.record_bytes, dtype=torch.uint8)
        for name, view in self.layout.view(record).items():
            view.copy_(self.experts[key.layer].get_parameter(name).detach()[key.expert])
        return record


def given_up_at(layer: int) -> Callable[[], None]:
    """A checkpoint that gives the pass up before its layer number `layer`."""
    layers_begun = itertools.count()

    def stop_at_layer() -> None:
        if next(layers_begun) == layer:
            raise RuntimeError("no longer wanted")

    return stop_at_layer
