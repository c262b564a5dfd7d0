"""Whether a fused step says what a layer's own forward says."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
from transformers.cache_utils import Cache

from hetero_gpu.attention import AttentionForm
from hetero_runtime.hf.attention import AttentionPass
from hetero_runtime.hf.fused_attention.base import Step, Tables
from hetero_runtime.hf.kv_cache import LayerBuffers, StepLayer
from hetero_runtime.hf.sameness import TOLERANCE, relative_error

NUM_ROWS = 2
_LENGTH = 4


class Token(NamedTuple):
    """What a layer's cache keeps of a token: heads of keys and values and their sizes, or, of latent layers,
    one head with the sizes of the latent and of what is rotated."""

    heads: int
    key_size: int
    value_size: int
    is_latent: bool = False


class Check:
    """A step of two rows at two positions on random input, by the module's own forward.

    `projection`: one that takes the hidden states. `tables`: of as many rows. `attends`: the form and the
    sinks with which the layer itself attended.
    """

    def __init__(
        self,
        module: Any,
        current: AttentionPass,
        tables: Tables,
        *,
        projection: torch.nn.Linear,
        token: Token,
    ) -> None:
        weight = projection.weight
        self.dtype = weight.dtype
        options: dict[str, Any] = {"device": weight.device, "dtype": weight.dtype}
        self._tables, self._token = tables, token
        self._positions = torch.tensor([2, 0], device=weight.device)
        self._hidden = torch.randn(NUM_ROWS, 1, weight.shape[1], **options)
        self._before = [
            torch.randn(NUM_ROWS, token.heads, _LENGTH, size, **options)
            for size in (token.key_size, token.value_size)
        ]
        layer = self._layer()
        current.positions = self._positions
        try:
            self._output = self._run_stock(module, layer)
        finally:
            current.positions = None
        assert current.last is not None, f"{type(module).__name__} did not attend through our function"
        self.attends: tuple[AttentionForm, torch.Tensor | None] = current.last
        self._after = layer.buffers

    def is_passed_by(self, step: Step) -> bool:
        """Whether `step` gives the same output and leaves the same cache."""
        layer = self._layer()
        output = step(self._hidden, self._tables, layer, self._positions)
        errors = [relative_error(output, self._output), *map(relative_error, layer.buffers, self._after)]
        return max(errors) <= 2 * TOLERANCE[self.dtype]

    def _run_stock(self, module: Any, layer: StepLayer) -> torch.Tensor:
        accepted = inspect.signature(type(module).forward).parameters
        cache_name = "cache" if "cache" in accepted else "past_key_values"
        cache = Cache(layers=[layer] * (module.layer_idx + 1))
        named = {"position_embeddings": self._tables, "attention_mask": None, cache_name: cache}
        output: torch.Tensor = type(module).forward(module, self._hidden, **named)[0]
        return output

    def _layer(self) -> StepLayer:
        buffers = LayerBuffers(NUM_ROWS, _LENGTH, is_latent=self._token.is_latent)
        keys, values = self._before
        for buffer, before in zip(buffers.ensure(keys, values), self._before, strict=True):
            buffer.copy_(before)
        return StepLayer(buffers, self._positions)
