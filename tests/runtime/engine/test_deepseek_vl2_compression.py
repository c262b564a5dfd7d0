"""DeepSeek-VL2 with fewer image tokens: what plain layers say with the same tokens dropped by hand."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from hetero_runtime.engine import Engine
from hetero_runtime.hf.conversion import expert_modules
from hetero_runtime.hf.forward import ForwardArguments
from hetero_runtime.prompt import ReadPrompt
from hetero_scheduler.compression import ImageTokens
from tests.deepseek_vl2_checkpoints import SIDE, VARIANTS, build_deepseek_vl2
from tests.runtime.engine.test_deepseek_vl2 import CHATS, read, resident
from tests.scheduler.compression.plain import compress

NUM_TOKENS = 16
PATCHES = 7
"""Patches of a tile's side; the last token of a row and of a column has fewer."""


class _Spy:
    """What the plain model routed, and what its encoder's last attention compared."""

    def __init__(self, model: Any) -> None:
        self.chosen: list[torch.Tensor] = []
        self.compared: dict[str, torch.Tensor] = {}
        for experts in expert_modules(model).values():
            experts.register_forward_pre_hook(lambda _m, args: self.chosen.append(args[1]))
        attention = [m for name, m in model.vision.named_modules() if name.endswith("self_attn")][-1]
        for name in ("q_proj", "k_proj"):
            getattr(attention, name).register_forward_hook(
                lambda _m, _a, output, name=name: self.compared.update({name: output})
            )
        self._attention = attention

    def received(self) -> np.ndarray:
        """`[tiles, PATCHES, PATCHES]`: attention by key, mean over heads and queries."""
        heads = self._attention.num_heads
        query, key = (
            self.compared[name].unflatten(-1, (heads, -1)).transpose(1, 2) for name in ("q_proj", "k_proj")
        )
        weights = ((query @ key.transpose(2, 3)) * self._attention.scale).softmax(-1)
        return weights.mean(dim=(1, 2)).view(-1, PATCHES, PATCHES).double().numpy()


def layout(columns: int, rows: int) -> list[tuple[int, int, int] | None]:
    """Of each token of an image its tile (0: the global view), row and column in it; None for marks."""
    tokens: list[tuple[int, int, int] | None] = []
    for row in range(SIDE):
        tokens += [(0, row, column) for column in range(SIDE)] + [None]
    tokens.append(None)
    for row in range(rows * SIDE):
        for column in range(columns * SIDE):
            tile = 1 + (row // SIDE) * columns + column // SIDE
            tokens.append((tile, row % SIDE, column % SIDE))
        tokens.append(None)
    return tokens


def kept_by_hand(prompt: ReadPrompt, spy: _Spy) -> torch.Tensor:
    """Places that go on behind the first MoE layer, half of what is no mark."""
    assert prompt.images is not None
    places = prompt.images["image_places"][0].nonzero()[:, 0].tolist()
    received, experts = spy.received(), spy.chosen[0].numpy()
    images, spots = [], []
    first_tile = 0
    for columns, rows in prompt.images["tile_grid"].tolist():
        own, saliency = [], []
        for token in layout(columns, rows):
            place = places.pop(0)
            if token is not None:
                tile, row, column = token
                patches = received[first_tile + tile, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2]
                own.append(place)
                saliency.append(patches.mean())
        first_tile += 1 + columns * rows
        images.append(ImageTokens(np.array(saliency), experts[None, own]))
        spots.append(own)
    chosen = compress(images, salient=Fraction(1, 4), keep=Fraction(1, 2), weight=2.0)
    dropped = {
        own[i] for own, kept in zip(spots, chosen, strict=True) for i in set(range(len(own))) - set(kept)
    }
    return torch.tensor([place for place in range(len(prompt.ids)) if place not in dropped])


@torch.inference_mode()
def answer_by_hand(model: Any, prompt: ReadPrompt, *, cut_at: int) -> tuple[torch.Tensor, int]:
    """Logits of NUM_TOKENS greedy tokens, and how many tokens of the prompt went on."""
    spy, text, ids = _Spy(model), model.language.model, torch.tensor([prompt.ids])
    images = prompt.images or {}
    model(input_ids=ids, **images)
    kept = kept_by_hand(prompt, spy)
    hidden = text.embed_tokens(ids)
    features = model.image_tokens(images["pixel_values"], images["tile_grid"])
    hidden = hidden.masked_scatter(images["image_places"][..., None], features)
    cache, positions, logits = DynamicCache(config=text.config), torch.arange(ids.shape[1])[None], []
    for step in range(NUM_TOKENS):
        for number, layer in enumerate(text.layers):
            if step == 0 and number == cut_at:
                hidden, positions = hidden[:, kept], positions[:, kept]
            hidden = layer(
                hidden,
                attention_mask=None,
                position_ids=positions,
                position_embeddings=text.rotary_emb(hidden, position_ids=positions),
                **{ForwardArguments.of(text).cache_name: cache},
            )
        logits.append(model.language.lm_head(text.norm(hidden)[:, -1]))
        hidden = text.embed_tokens(logits[-1].argmax(-1, keepdim=True))
        positions = torch.tensor([[ids.shape[1] + step]])
    return torch.cat(logits), len(kept)


@pytest.mark.parametrize("chat", ["one image", "two images between text"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_half_of_the_image_tokens_dropped(
    variant: str, chat: str, tmp_path: Path, logits: list[torch.Tensor]
) -> None:
    path = build_deepseek_vl2(variant, tmp_path)
    model = resident(path, "float32")
    prompt = read(path, model, CHATS[chat])
    expected, num_kept = answer_by_hand(model, prompt, cut_at=2)  # a dense layer, then the pinned MoE layer
    assert prompt.images is not None
    num_marks = sum(layout(*grid).count(None) for grid in prompt.images["tile_grid"].tolist())
    for slabs in ("all", 4):
        logits.clear()
        memory = {"slabs": slabs, "pinned_prefix": 1}
        settings = {"device": "cpu", "execution": {"max_length": 512}, "vision": {"keep_ratio": 0.5}}
        with Engine.load(path, memory=memory, **settings) as engine:
            engine.generate(CHATS[chat], max_tokens=NUM_TOKENS, ignore_eos=True)
            engine.check()
            stats = engine.stats().compression
        assert torch.equal(torch.stack(logits), expected)
        assert len(prompt.ids) - stats.visual_tokens + stats.kept_tokens == num_kept
        assert stats.visual_tokens == int(prompt.images["image_places"].sum()) - num_marks
