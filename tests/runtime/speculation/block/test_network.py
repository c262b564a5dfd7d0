"""The network against the same layers written out for one block, with transformers' own parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding, apply_rotary_pos_emb

from hetero_runtime.speculation.block.network import BlockNetwork
from hetero_runtime.speculation.block.shape import BlockShape
from tests.runtime.speculation.block.shapes import tiny_shape

SHAPES = {
    "full": tiny_shape(),
    "sliding": tiny_shape(windows=(3, None), is_causal=(True, False)),
    "one-head-each": tiny_shape(heads=2),
}


def network_of(shape: BlockShape) -> BlockNetwork:
    """With random weights, norms included."""
    torch.manual_seed(0)
    network = BlockNetwork(shape).requires_grad_(False)
    for parameter in network.parameters():
        parameter.normal_(std=0.3)
    return network


def written_out(network: BlockNetwork, features: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
    """One block `[n, hidden]` after the text of `features` `[text, layers · hidden]`: keys and values of text
    and block side by side, heads repeated, nothing remembered."""
    shape, num_text = network.shape, len(features)
    config = Qwen3Config(head_dim=shape.head_dim, rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    positions = torch.arange(num_text + len(embedded))
    cos, sin = Qwen3RotaryEmbedding(config)(embedded, positions[None])
    text = _norm(network.hidden_norm, features @ network.fc.weight.T)
    hidden = embedded
    for index, layer in enumerate(network.layers):
        attention: Any = layer.self_attn
        normed = _norm(layer.input_layernorm, hidden)
        both = torch.cat([text, normed])
        keys = _norm(attention.k_norm, _heads(both @ attention.k_proj.weight.T, shape))
        queries = _norm(attention.q_norm, _heads(normed @ attention.q_proj.weight.T, shape))
        padded = torch.cat([torch.zeros(num_text, *queries.shape[1:]), queries])
        turned, keys = apply_rotary_pos_emb(
            padded.transpose(0, 1)[None], keys.transpose(0, 1)[None], cos, sin
        )
        values = _heads(both @ attention.v_proj.weight.T, shape).transpose(0, 1)[None]
        repeats = shape.heads // shape.kv_heads
        out = F.scaled_dot_product_attention(
            turned[:, :, num_text:],
            keys.repeat_interleave(repeats, 1),
            values.repeat_interleave(repeats, 1),
            attn_mask=_mask(positions, num_text, shape.windows[index], is_causal=shape.is_causal[index]),
        )
        hidden = hidden + out[0].transpose(0, 1).flatten(1) @ attention.o_proj.weight.T
        normed = _norm(layer.post_attention_layernorm, hidden)
        mlp: Any = layer.mlp
        gated = F.silu(normed @ mlp.gate_proj.weight.T) * (normed @ mlp.up_proj.weight.T)
        hidden = hidden + gated @ mlp.down_proj.weight.T
    return _norm(network.norm, hidden)


def _heads(flat: torch.Tensor, shape: BlockShape) -> torch.Tensor:
    return flat.unflatten(-1, (-1, shape.head_dim))


def _norm(module: Any, hidden: torch.Tensor) -> torch.Tensor:
    return hidden / (hidden.square().mean(-1, keepdim=True) + 1e-6).sqrt() * module.weight


def _mask(positions: torch.Tensor, num_text: int, window: int | None, *, is_causal: bool) -> torch.Tensor:
    back = positions[num_text:, None] - positions
    seen = (back >= 0) if is_causal else torch.ones_like(back, dtype=torch.bool)
    return seen if window is None else seen & (back.abs() < window)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_block_is_what_its_layers_say_written_out(shape: BlockShape) -> None:
    network = network_of(shape)
    features, embedded = torch.randn(7, 2 * shape.hidden), torch.randn(shape.block, shape.hidden)
    ours = network(embedded[None, None], torch.tensor([[7]]), network.read(features[None]))
    assert torch.allclose(ours[0, 0], written_out(network, features, embedded), atol=1e-4)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_blocks_side_by_side_see_their_own_past_alone(shape: BlockShape) -> None:
    network = network_of(shape)
    features, embedded = torch.randn(2, 9, 2 * shape.hidden), torch.randn(2, 3, shape.block, shape.hidden)
    first = torch.tensor([[1, 4, 9], [2, 6, 3]])
    together = network(embedded, first, network.read(features))
    for row in range(2):
        for block in range(3):
            past = features[row, : first[row, block]]
            alone = written_out(network, past, embedded[row, block])
            assert torch.allclose(together[row, block], alone, atol=1e-4)


def test_a_text_read_in_parts_is_the_text_read_at_once() -> None:
    network = network_of(SHAPES["full"])
    features = torch.randn(1, 9, 2 * network.shape.hidden)
    parts = zip(network.read(features[:, :4]), network.read(features[:, 4:], first=4), strict=True)
    for (before, after), whole in zip(parts, network.read(features), strict=True):
        assert torch.allclose(torch.cat([before.keys, after.keys], dim=2), whole.keys, atol=1e-6)
        assert torch.allclose(torch.cat([before.values, after.values], dim=2), whole.values, atol=1e-6)
