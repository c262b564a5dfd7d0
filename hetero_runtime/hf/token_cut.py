"""A prompt that goes on with fewer tokens from some decoder layer on.

    layer 0   a b c d e f       whole: the pinned prefix
    layer 1   a b c d e f
    ── cut ── a . c . . f       chosen when the first layer behind the cut is about to run
    layer 2   a c f             at the positions that they had, so rotary embeddings stay what they were
    layer 3   a c f

Each layer's KV cache holds what its layer saw. Tokens that come later see all of it: attention is causal by
shape, so it needs no mask, and the cache's own length says nothing about positions, which callers give.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hetero_runtime.hf.conversion import expert_modules

ChooseTokens = Callable[[], torch.Tensor | None]
"""Places of the tokens that go on, int64 ascending, on the model's device; None for all of them."""


class TokenCut:
    """One for a model. Passes that nobody cuts run as they would without it."""

    def __init__(self, model: Any, *, first: int) -> None:
        """The first decoder layer behind the cut is the one with MoE layer `first`, which there must be."""
        name = list(expert_modules(model))[first]  # such as model.layers.1.mlp.experts
        stack, number = name.rsplit(".", 3)[:2]
        self.first_layer = int(number)
        layers = list(model.get_submodule(stack))[self.first_layer :]
        for place, layer in enumerate(layers):
            layer.register_forward_pre_hook(self._chooses if place == 0 else self._follows, with_kwargs=True)
        self._choose: ChooseTokens | None = None
        self.kept: torch.Tensor | None = None
        """In a pass, once it is cut: places of the tokens that went on."""

    @contextmanager
    def during(self, choose: ChooseTokens) -> Iterator[None]:
        """Around the pass over one whole prompt, the only row. Its last token has to be kept: its logits are
        the pass's."""
        self._choose = choose
        try:
            yield
        finally:
            self._choose = self.kept = None

    def _chooses(self, _layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._choose is None:
            return None
        self.kept = self._choose()
        if self.kept is None:
            return None
        hidden, *rest = args  # [1, T, hidden_size]
        return (hidden[:, self.kept], *rest), self._cut(kwargs)

    def _follows(self, _layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return None if self.kept is None else (args, self._cut(kwargs))

    def _cut(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """What all layers are given of each token: `[1, T, ...]`, rotary embeddings in pairs or complex."""
        assert arguments["attention_mask"] is None, "a prompt that is cut has no mask: causal by shape"
        rotary, positions = arguments["position_embeddings"], arguments["position_ids"]
        if isinstance(rotary, tuple):
            rotary = tuple(part[:, self.kept] for part in rotary)
        else:
            rotary = rotary[:, self.kept]
        positions = None if positions is None else positions[:, self.kept]
        return {**arguments, "position_embeddings": rotary, "position_ids": positions}
