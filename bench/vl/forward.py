"""The model's forward for a batch of equal pictures, each with its row of questions.

transformers' own runs the vision tower one picture at a time and asks for pixels in patches. All pictures
here have one size, so the tower runs them as one batch, and masks and positions are known beforehand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen3VLMoeForConditionalGeneration
from transformers.vision_utils import get_vision_position_ids

from bench.vl.drawing import GRID, NUM_CELLS
from bench.vl.geometry import MERGE, PATCH, PATCH_GRID
from bench.vl.text import PREFIX_LENGTH

IMAGE_START = 2
"""Tokens before the first visual one."""


class Outputs(NamedTuple):
    """What a forward gives."""

    hidden: Tensor  # [batch, ROW_LENGTH, hidden], of the questions, before the output head
    visual: Tensor  # [batch, NUM_CELLS, hidden], as they enter the language model
    received: Tensor
    """`[batch, NUM_CELLS]`: share of the last vision layer's attention that each visual token gets."""
    router_logits: Tensor  # [layers, batch * (PREFIX_LENGTH + ROW_LENGTH), experts]


class Seen(NamedTuple):
    """What the vision tower gives."""

    visual: Tensor  # [batch, NUM_CELLS, hidden]
    deepstack: list[Tensor]
    """What the first language layers get in addition, in order; each as `visual`."""
    query: Tensor  # [batch, heads, patches, head_dim], of the last layer's attention
    key: Tensor  # the same


class Tokens(NamedTuple):
    """Tokens on their way through the language model: the prefix, then a row of questions."""

    hidden: Tensor  # [batch, tokens, hidden]
    mask: Tensor
    """`[batch, 1, tokens, tokens]`: whether a token sees another."""
    rotary: tuple[Tensor, Tensor]  # [batch, tokens, head_dim] each
    added: Tensor
    """`[deepstack, batch, tokens, hidden]`: what comes to them behind the first layers."""


class BatchForward:
    """Runs `model` on uint8 pictures `[batch, 192, 192, 3]` and rows `[batch, 4, ROW_LENGTH]`."""

    def __init__(self, model: Qwen3VLMoeForConditionalGeneration, prefix: Sequence[int]) -> None:
        """`prefix`: the tokens before every question, `text.prefix_ids`."""
        self._model, device = model.model, model.device
        self._prefix = torch.tensor(prefix, device=device)
        grid = torch.tensor([[1, PATCH_GRID, PATCH_GRID]], device=device)
        self._places = get_vision_position_ids(grid, MERGE)  # [patches, 2]: row, column
        self._prefix_positions = _prefix_positions(device)
        self._router_logits: list[Tensor] = []
        routers = [layer.mlp.gate for layer in self._model.language_model.layers]
        self._hooks = [router.register_forward_hook(self._listen) for router in routers]

    def __call__(self, pictures: Tensor, rows: Tensor) -> Outputs:
        """`rows` in int64."""
        seen = self.see(pictures)
        tokens = self.begin(seen, rows)
        hidden = self.finish(self.read(tokens, range(self.num_layers)))
        received = _received(seen.query, seen.key)
        return Outputs(hidden[:, PREFIX_LENGTH:], seen.visual, received, self.take_router_logits())

    @property
    def num_layers(self) -> int:
        """Of the language model."""
        return len(self._model.language_model.layers)

    def take_router_logits(self) -> Tensor:
        """Of the layers that were read since the last call, in order, `[layers, batch * tokens, experts]`."""
        said = torch.stack(self._router_logits)
        self._router_logits.clear()
        return said

    def close(self) -> None:
        """Stop listening to the routers."""
        for hook in self._hooks:
            hook.remove()

    def _listen(self, _: nn.Module, __: Any, outputs: tuple[Tensor, ...]) -> None:
        self._router_logits.append(outputs[0])

    def see(self, pictures: Tensor) -> Seen:
        """The vision tower."""
        tower = self._model.visual
        projection = tower.patch_embed.proj
        weight = projection.weight.sum(2).flatten(1)  # both frames of a still picture are the same
        hidden = F.linear(_patches(pictures).to(weight.dtype), weight, projection.bias)
        hidden = hidden + tower.pos_embed.weight[self._places[:, 0] * PATCH_GRID + self._places[:, 1]]
        cos, sin = (part[:, None] for part in tower.rotary_pos_emb(hidden, self._places))
        deepstack = []
        for index, block in enumerate(tower.blocks):
            query, key, value = _project(block.attn, block.norm1(hidden), cos, sin)
            mixed = F.scaled_dot_product_attention(query, key, value)
            hidden = hidden + block.attn.proj(mixed.transpose(1, 2).flatten(2))
            hidden = hidden + block.mlp(block.norm2(hidden))
            if index in tower.deepstack_visual_indexes:
                merger = tower.deepstack_merger_list[len(deepstack)]
                deepstack.append(merger(hidden).unflatten(0, (len(pictures), NUM_CELLS)))
        visual = tower.merger(hidden).unflatten(0, (len(pictures), NUM_CELLS))
        return Seen(visual, deepstack, query, key)

    def begin(self, seen: Seen, rows: Tensor) -> Tokens:
        """Prefix and questions before the first layer."""
        text = self._model.language_model
        tokens, segments, places = rows[:, 0], rows[:, 1], rows[:, 2]
        prefix = text.embed_tokens(self._prefix).expand(len(rows), -1, -1)
        before, after = prefix[:, :IMAGE_START], prefix[:, IMAGE_START + NUM_CELLS :]
        hidden = torch.cat([before, seen.visual.to(prefix.dtype), after, text.embed_tokens(tokens)], dim=1)
        room = (0, 0, IMAGE_START, hidden.shape[1] - IMAGE_START - NUM_CELLS)
        rotary = text.rotary_emb(hidden, self._positions(places))
        return Tokens(hidden, _mask(segments), rotary, F.pad(torch.stack(seen.deepstack), room))

    def read(self, tokens: Tokens, layers: range) -> Tokens:
        """The same tokens behind `layers`."""
        hidden = tokens.hidden
        for index in layers:
            layer = self._model.language_model.layers[index]
            hidden = layer(hidden, attention_mask=tokens.mask, position_embeddings=tokens.rotary)
            if index < len(tokens.added):
                hidden = hidden + tokens.added[index]
        return tokens._replace(hidden=hidden)

    def finish(self, tokens: Tokens) -> Tensor:
        """Hidden states `[batch, tokens, hidden]` after the last norm."""
        normed: Tensor = self._model.language_model.norm(tokens.hidden)
        return normed

    def _positions(self, places: Tensor) -> Tensor:
        """Three-dimensional positions `[3, batch, tokens]`: every question goes on where the picture ends."""
        prefix = self._prefix_positions[:, None].expand(-1, len(places), -1)
        following = places + self._prefix_positions.max() + 1
        return torch.cat([prefix, following.expand(3, -1, -1)], dim=-1)


def _patches(pictures: Tensor) -> Tensor:
    """`[batch, patches, 3 * PATCH * PATCH]` in [-1, 1], patches of one visual token side by side."""
    cut = pictures.unflatten(1, (GRID, MERGE, PATCH)).unflatten(4, (GRID, MERGE, PATCH))
    ordered = cut.permute(0, 1, 4, 2, 5, 7, 3, 6)  # [batch, row, column, merge, merge, channel, PATCH, PATCH]
    return ordered.flatten(5).flatten(1, 4).float() / 127.5 - 1


def _project(attention: nn.Module, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rotated queries and keys, and values, `[batch, heads, patches, head_dim]` each."""
    query, key, value = attention.qkv(hidden).unflatten(-1, (3, attention.num_heads, -1)).unbind(2)
    query, key = (_rotate(part, cos, sin).to(value.dtype) for part in (query, key))
    return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)


def _received(query: Tensor, key: Tensor) -> Tensor:
    """Mean attention that the patches of each visual token get, from the first patch of each."""
    scores = query[:, :, :: MERGE**2] @ key.transpose(-2, -1) * query.shape[-1] ** -0.5
    return scores.float().softmax(-1).mean((1, 2)).unflatten(-1, (NUM_CELLS, -1)).sum(-1)


def _rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of `[batch, patches, heads, head_dim]`."""
    first, second = states.chunk(2, dim=-1)
    return states * cos + torch.cat([-second, first], dim=-1) * sin


def _mask(segments: Tensor) -> Tensor:
    """Whether a token sees another, `[batch, 1, tokens, tokens]`: questions the prefix and themselves."""
    segments = F.pad(segments, (PREFIX_LENGTH, 0))
    length = segments.shape[1]
    is_past = torch.ones(length, length, dtype=torch.bool, device=segments.device).tril()
    is_own = (segments[:, None, :] == 0) | (segments[:, None, :] == segments[:, :, None])
    return (is_own & is_past)[:, None]


def _prefix_positions(device: torch.device) -> Tensor:
    """`[3, PREFIX_LENGTH]`: time, row and column, as transformers counts them."""
    cells = torch.arange(NUM_CELLS, device=device)
    image = torch.stack([torch.zeros_like(cells), cells // GRID, cells % GRID]) + IMAGE_START
    before = torch.arange(IMAGE_START, device=device).expand(3, -1)
    after = torch.full((3, 1), IMAGE_START + GRID, device=device)
    return torch.cat([before, image, after], dim=1)
