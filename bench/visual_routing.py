"""What routers say of the text and of the images of a prompt, while an engine reads it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from hetero_runtime import Engine
from hetero_runtime.hf.early_routers import EarlyRouters
from hetero_runtime.hf.router_hooks import listen_to_routers, router_top_k
from hetero_runtime.hf.visual import visual_part

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class LayerRouting(NamedTuple):
    """One MoE layer and the T tokens of a prompt that it sees."""

    chosen: Integers
    """`[T, k]`: experts."""
    is_visual: npt.NDArray[np.bool_]
    """`[T]`"""
    foretold: Floats
    """`[T]`: share of a token's experts that this layer's router chooses already on the input of the layer
    before; empty for the first layer. VisMMOE's Fig. 4 has an inter-layer similarity without a definition:
    this is ours, and what a prefetch one layer ahead can use."""


class RoutingListener:
    """Hears one engine, whose prompts come one at a time."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._parts = engine, engine._parts
        self._visual, self._early = visual_part(self._parts.model), EarlyRouters(self._parts.model)
        self._top_k = router_top_k(self._parts.model)
        self.num_experts = self._early.num_experts
        self._chosen: list[torch.Tensor] = []
        self._foretold: list[Floats] = []
        self._kept: torch.Tensor | None = None
        self._expected: torch.Tensor | None = None
        listen_to_routers(self._parts.model, self._hear)

    def read(self, image: Image.Image, question: str) -> list[LayerRouting]:
        """The prompt of `question` about `image`, layer by layer."""
        self._chosen, self._foretold, self._kept, self._expected = [], [], None, None
        parts: list[dict[str, Any]] = [{"type": "image", "image": image}, {"type": "text", "text": question}]
        row = self._engine.open([{"role": "user", "content": parts}], max_tokens=1)
        for _ in row.deltas():
            pass
        is_visual = self._is_visual(torch.tensor(row.request.prompt_ids), row._images or {})
        return [
            LayerRouting(chosen.cpu().numpy(), self._as_seen(is_visual, len(chosen)), foretold)
            for chosen, foretold in zip(self._chosen, self._foretold, strict=True)
        ]

    def _hear(self, layer: int, logits: torch.Tensor, hidden: torch.Tensor) -> None:
        compressor = self._parts.compressor
        kept = None if compressor is None else compressor.kept
        chosen = logits.topk(self._top_k).indices  # [T, k]
        if self._kept is None and kept is not None and self._expected is not None:
            self._expected, self._kept = self._expected[kept], kept
        foretold = torch.zeros(0)
        if self._expected is not None:
            is_expected = (chosen[:, :, None] == self._expected[:, None]).any(dim=2)
            foretold = is_expected.float().mean(dim=1).cpu()
        self._chosen.append(chosen)
        self._foretold.append(foretold.double().numpy())
        early = self._early(layer, hidden)
        self._expected = None if early is None else early.topk(self._top_k).indices

    def _is_visual(self, ids: torch.Tensor, images: dict[str, torch.Tensor]) -> npt.NDArray[np.bool_]:
        assert self._visual is not None, "this bench is for models that see"
        is_visual = np.zeros(len(ids), dtype=np.bool_)
        for positions in self._visual.positions(ids, images):
            is_visual[positions.numpy()] = True
        return is_visual

    def _as_seen(self, is_visual: npt.NDArray[np.bool_], num_tokens: int) -> npt.NDArray[np.bool_]:
        """Of the tokens of the prompt, those that a layer with `num_tokens` sees."""
        if num_tokens == len(is_visual):
            return is_visual
        assert self._kept is not None, "a layer saw fewer tokens, and none were dropped"
        return is_visual[self._kept.cpu().numpy()]
