"""The network of a block drafter: all tokens of a block at once, from what the target made of the text.

    target's layers 1 3 5 6 ─► concatenated ─► fc ─► norm ─┐  one vector a token of the text
                                                           ├─ keys and values of every layer
    block   last token, mask, mask, mask ─► embedded ──────┴─► queries, keys, values ─► layers ─► norm
                                                                        target's output head ─► tokens

The text enters as keys and values alone and passes through no layer, so a token of it costs two projections a
layer, once. Tokens of a block see each other both ways. Names of parameters are those of DFlash checkpoints
(Chen et al., 2026, section 3), so a checkpoint's tensors are a state dict.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hetero_runtime.speculation.block.shape import BlockShape


class KeysValues(NamedTuple):
    """What one layer knows of the text, both `[rows, kv_heads, n, head_dim]`; keys are rotated."""

    keys: Tensor
    values: Tensor


class BlockNetwork(nn.Module):
    """See the module docstring. `rows` are texts; each may have several blocks, blind to one another."""

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(len(shape.target_layers) * shape.hidden, shape.hidden, bias=False)
        self.hidden_norm = _Norm(shape.hidden, eps=shape.norm_eps)
        self.layers = nn.ModuleList(_Layer(shape, index) for index in range(shape.num_layers))
        self.norm = _Norm(shape.hidden, eps=shape.norm_eps)

    def read(self, features: Tensor, first: int = 0) -> list[KeysValues]:
        """Keys and values by layer of tokens at positions `first` and after.

        `features` `[rows, n, target layers · hidden]`: outputs of the target's layers, side by side.
        """
        context = self.hidden_norm(self.fc(features))
        positions = torch.arange(first, first + features.shape[1], device=features.device)
        rotary = _rotary(positions, self.shape)
        attentions = (layer.self_attn for layer in cast(Iterable[_Layer], self.layers))
        return [attention.read(context, rotary) for attention in attentions]

    def forward(self, embedded: Tensor, first: Tensor, context: list[KeysValues]) -> Tensor:
        """Hidden states for the target's output head, of the shape of `embedded`.

        `embedded` `[rows, blocks, n, hidden]`: a block's known token, then masks. `first` `[rows, blocks]`:
        the position of each known token; a block sees the `context`, of positions from 0 on, before it.
        """
        positions = first[..., None] + torch.arange(embedded.shape[2], device=embedded.device)
        rotary, hidden = _rotary(positions, self.shape), embedded
        for layer, known in zip(self.layers, context, strict=True):
            hidden = layer(hidden, positions, rotary, known)
        normed: Tensor = self.norm(hidden)
        return normed


class _Norm(nn.RMSNorm):
    """In the dtype of what it is given: weights in training are more precise than that."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class _Layer(nn.Module):
    def __init__(self, shape: BlockShape, index: int) -> None:
        super().__init__()
        self.input_layernorm = _Norm(shape.hidden, eps=shape.norm_eps)
        self.self_attn = _Attention(shape, shape.windows[index], is_causal=shape.is_causal[index])
        self.post_attention_layernorm = _Norm(shape.hidden, eps=shape.norm_eps)
        self.mlp = _Mlp(shape)

    def forward(
        self, hidden: Tensor, positions: Tensor, rotary: tuple[Tensor, Tensor], known: KeysValues
    ) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), positions, rotary, known)
        changed: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return changed


class _Mlp(nn.Module):
    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return out


class _Attention(nn.Module):
    """A block's queries over the text before it and the block itself."""

    def __init__(self, shape: BlockShape, window: int | None, *, is_causal: bool) -> None:
        super().__init__()
        self._shape, self._window, self._is_causal = shape, window, is_causal
        kv_size = shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden, kv_size, bias=False)
        self.v_proj = nn.Linear(shape.hidden, kv_size, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)
        self.q_norm = _Norm(shape.head_dim, eps=shape.norm_eps)
        self.k_norm = _Norm(shape.head_dim, eps=shape.norm_eps)

    def read(self, tokens: Tensor, rotary: tuple[Tensor, Tensor]) -> KeysValues:
        """Of `tokens` `[rows, ..., n, hidden]`, as `[rows, kv_heads, ..., n, head_dim]`."""
        heads = (self._shape.kv_heads, self._shape.head_dim)
        keys = _rotated(self.k_norm(self.k_proj(tokens).unflatten(-1, heads)), rotary)
        values = self.v_proj(tokens).unflatten(-1, heads)
        return KeysValues(keys.movedim(-2, 1), values.movedim(-2, 1))

    def forward(
        self, tokens: Tensor, positions: Tensor, rotary: tuple[Tensor, Tensor], known: KeysValues
    ) -> Tensor:
        shape = self._shape
        groups = (shape.kv_heads, shape.heads // shape.kv_heads, shape.head_dim)
        queries = self.q_norm(self.q_proj(tokens).unflatten(-1, groups)) * shape.head_dim**-0.5
        # [rows, blocks, n, kv_heads, group, head_dim] -> [rows, kv_heads, group, blocks, n, head_dim]
        queries = _rotated(queries.flatten(3, 4), rotary).unflatten(3, groups[:2]).permute(0, 3, 4, 1, 2, 5)
        own = self.read(tokens, rotary)
        flat = queries.flatten(2, 4)  # products with the text are the same for every block
        of_text = (flat @ known.keys.mT).unflatten(2, queries.shape[2:5])  # [..., blocks, n, text]
        of_block = queries @ own.keys[:, :, None].mT  # [..., blocks, n, n]
        sees_text, sees_block = self._visible(positions, of_text.shape[-1])
        scores = torch.cat([_hide(of_text, sees_text), _hide(of_block, sees_block)], dim=-1)
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(own.values.dtype)
        to_text, to_block = weights.split([of_text.shape[-1], of_block.shape[-1]], dim=-1)
        out = to_block @ own.values[:, :, None]
        out = out + (to_text.flatten(2, 4) @ known.values).unflatten(2, queries.shape[2:5])
        merged: Tensor = self.o_proj(out.permute(0, 3, 4, 1, 2, 5).flatten(3))
        return merged

    def _visible(self, positions: Tensor, num_known: int) -> tuple[Tensor, Tensor]:
        """What `positions` `[rows, blocks, n]` see: of the text `[rows, blocks, n, num_known]`, of their
        block `[rows, blocks, n, n]`."""
        text = torch.arange(num_known, device=positions.device)
        back_to_text = positions[..., None] - text
        back_to_block = positions[..., None] - positions[..., None, :]
        sees_text = (text < positions[..., :1, None]).expand_as(back_to_text)
        sees_block = (back_to_block >= 0) | (not self._is_causal)
        if self._window is None:
            return sees_text, sees_block
        return sees_text & (back_to_text < self._window), sees_block & (back_to_block.abs() < self._window)


def _hide(scores: Tensor, is_visible: Tensor) -> Tensor:
    """`scores` `[rows, kv_heads, group, ...]`, without what is not visible `[rows, ...]`."""
    return scores.masked_fill(~is_visible[:, None, None], float("-inf"))


def _rotary(positions: Tensor, shape: BlockShape) -> tuple[Tensor, Tensor]:
    """Cosines and sines by position, `[..., 1, head_dim / 2]`: alike for all heads."""
    exponents = torch.arange(0, shape.head_dim, 2, device=positions.device) / shape.head_dim
    angles = positions[..., None, None] * shape.rope_theta**-exponents
    return angles.cos(), angles.sin()


def _rotated(heads: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary position embedding of `heads` `[..., heads, head_dim]`, halves against each other (as Llama)."""
    cos, sin = (part.to(heads.dtype) for part in rotary)
    low, high = heads.chunk(2, dim=-1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)
