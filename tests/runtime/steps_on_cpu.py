"""Engines in graph mode without a GPU: steps run as they are, uncaptured; kernels are interpreted."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import pytest
import torch

from hetero_gpu.control import CopyEngine
from hetero_gpu.experts.decode import DecodeExperts
from hetero_gpu.experts.prefill import GroupedExperts
from hetero_gpu.experts.reference import expert_reference, experts_reference
from hetero_runtime import graph
from hetero_runtime.config import resolution
from hetero_runtime.hf import check_graphs, graph_sequences
from tests.gpu.control.fake_link import FakeLink

FEW_LOOKS = 20
"""After so many in vain a layer helps itself; the interpreter looks slowly."""


class _AsTheyAre:
    """In place of GraphCapture."""

    def __call__(self, work: Callable[[], object]) -> Callable[[], object]:
        return work


def _compute(
    self: DecodeExperts,
    hidden: torch.Tensor,
    slabs: torch.Tensor,
    *,
    slots: torch.Tensor,
    weights: torch.Tensor,
    out: torch.Tensor,
) -> None:
    out.copy_(experts_reference(hidden, slabs, slots=slots, weights=weights, form=self.form))


def _add(self: GroupedExperts, slabs: torch.Tensor, experts: torch.Tensor, slots: torch.Tensor) -> None:
    for expert, slot in zip(experts.tolist(), slots.tolist(), strict=True):
        places = slice(int(self._bounds[expert]), int(self._bounds[expert + 1]))
        pairs = self._order[places].long()
        y = expert_reference(self._hidden[pairs // self.top_k], slabs[slot], self.form)
        self._products[places] = y * self._weights.flatten()[pairs, None]


def _finish(self: GroupedExperts, out: torch.Tensor) -> None:
    out.copy_(self._products[self._places.long()].sum(dim=1))


def steps_on_cpu(monkeypatch: pytest.MonkeyPatch) -> FakeLink:
    """From now on `execution.mode: graph` goes with `device: cpu`. Prefetches travel over the link returned.

    Attention and small operations stay transformers', and experts are computed by the reference: their
    kernels have tests of their own, and are slow to interpret.
    """
    link = FakeLink()
    link.stop_poisoning()
    for where, name, stand_in in (
        (resolution, "_mode", lambda execution, _device: execution.mode),
        (graph, "_check_capturable", lambda *_, **__: None),
        (graph, "install_small_ops", lambda *_, **__: None),
        (graph, "small_choosers", lambda _model: None),
        (graph, "fuse_attention", lambda *_, **__: None),
        (graph_sequences, "GraphCapture", _AsTheyAre),
        (check_graphs, "GraphCapture", _AsTheyAre),
        (DecodeExperts, "__call__", _compute),
        (GroupedExperts, "add", _add),
        (GroupedExperts, "finish", _finish),
        (GroupedExperts, "warm_up", lambda *_, **__: None),
        (importlib.import_module("hetero_gpu.tables.gather"), "device_address", lambda address: address),
        (importlib.import_module("hetero_gpu.tables.state"), "MOST_LOOKS", FEW_LOOKS),
        (CopyEngine, "cuda", staticmethod(lambda _device: link.engine)),
    ):
        monkeypatch.setattr(where, name, stand_in)
    return link
