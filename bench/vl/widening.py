"""The small vision-language model at the sizes of Qwen3-VL-30B-A3B: its trained routing over large experts.

    vector   every number r times           norms see the same; a matrix has each column r times, over r
    head     its dimensions among others    at the same rotary frequencies, zeros between; scores scaled back
    expert   number e as e and as e + E     both are chosen, each for half; wider by rows of noise, and what
                                            these add is lost in rounding
    pixel    as many times as wide          a patch shows the same

So routers, image tokens, what is salient and what is answered are the trained model's, up to rounding, while
a record, a layer's weights, a token's keys and values have the large model's bytes. What is cut is the depth,
10 of 48 decoder layers and 6 of 27 encoder layers, the same share of both, and the vocabulary.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor

from bench.vl.held_out import MODEL
from bench.vl.wide_geometry import WideGeometry
from bench.widened import TINY

_POOL_ELEMENTS = 1 << 23
_NOISE = 0.015
"""Standard deviation of rows that add nothing: about 0.7 over the root of 2048, as trained ones."""


class _Heads(NamedTuple):
    """How heads are laid among more and larger ones."""

    rows: Tensor
    """`[heads x head_dim]`: where each dimension goes."""
    in_head: list[int]
    """`[head_dim]`: the same, inside a head."""
    width: int
    """Of all large heads."""
    theta: float
    """Base of the large model's frequencies, with which these are the small one's."""
    scale: float
    """By which scores come out too small."""


class Widening:
    """The small model's tensors, made large."""

    def __init__(self, geometry: WideGeometry) -> None:
        self.geometry = geometry
        self.config: dict[str, Any] = json.loads((MODEL / "config.json").read_text(encoding="utf-8"))
        self._small: dict[str, Tensor] = {}
        for shard in sorted(MODEL.glob("*.safetensors")):
            self._small |= load_file(shard)
        text, vision = self.config["text_config"], self.config["vision_config"]
        self._text, self._vision = text, vision
        self._times = geometry.hidden // text["hidden_size"]
        self._sees = geometry.vision_hidden // vision["hidden_size"]
        kv_heads = text["num_key_value_heads"]
        groups = text["num_attention_heads"] // kv_heads, geometry.heads // kv_heads
        self.queries = _heads(
            [head // groups[0] * groups[1] + head % groups[0] for head in range(text["num_attention_heads"])],
            geometry.heads,
            (text["head_dim"], geometry.head_dim),
            axes=1,
            theta=text["rope_parameters"]["rope_theta"],
        )
        self._keys = _heads(
            range(kv_heads), kv_heads, (text["head_dim"], geometry.head_dim), axes=1, theta=self.queries.theta
        )
        num_heads = vision["num_heads"]
        self.patches = _heads(
            range(num_heads),
            geometry.vision_heads,
            (vision["hidden_size"] // num_heads, geometry.vision_hidden // geometry.vision_heads),
            axes=2,
            theta=vision["rope_parameters"]["rope_theta"],
        )

    @cached_property
    def _pool(self) -> Tensor:
        draw = torch.Generator().manual_seed(0)
        size = max(_POOL_ELEMENTS, 4 * self.geometry.hidden * self.geometry.intermediate)
        return (torch.randn(size, generator=draw) * _NOISE).to(torch.bfloat16)

    @cached_property
    def _tiny_pool(self) -> Tensor:
        return self._pool * (TINY / _NOISE)

    def ends(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors but those of decoder layers."""
        name = "model.language_model.embed_tokens.weight"
        words = self._small[name]
        yield name, _kept(words.repeat_interleave(self._times, 1))
        yield "lm_head.weight", _columns(words, self._times)
        yield self._repeated("model.language_model.norm.weight", self._times)
        for name in self._small:
            if name.startswith("model.visual."):
                yield name, _kept(self._visual(name, self._small[name].float()))

    def layer(self, number: int) -> Iterator[tuple[str, Tensor]]:
        """The tensors of a decoder layer."""
        prefix = f"model.language_model.layers.{number}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield self._repeated(f"{prefix}.{norm}.weight", self._times)
        yield from self._attention(f"{prefix}.self_attn")
        name = f"{prefix}.mlp.gate.weight"
        splits = self.geometry.experts // self._text["num_local_experts"]
        yield name, _columns(self._small[name], self._times).repeat(splits, 1)
        yield from self._experts(f"{prefix}.mlp.experts", splits)

    def _attention(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        queries, keys = self.queries, self._keys
        for part, heads in (("q", queries), ("k", keys), ("v", keys)):
            name = f"{prefix}.{part}_proj.weight"
            yield name, _placed(_columns(self._small[name], self._times), heads)
        for part, scale in (("q", 1.0), ("k", 1 / queries.scale)):
            name = f"{prefix}.{part}_norm.weight"
            weight = torch.ones(self.geometry.head_dim)
            weight[queries.in_head] = self._small[name].float() * scale
            yield name, _kept(weight)
        name = f"{prefix}.o_proj.weight"
        output = self._small[name].repeat_interleave(self._times, 0)
        yield name, _placed(output.T, queries).T.contiguous()

    def _experts(self, prefix: str, splits: int) -> Iterator[tuple[str, Tensor]]:
        """transformers' own layout: gate above up `[E, 2I, H]`, down `[E, H, I]`."""
        inner, small = self.geometry.intermediate, self._text["moe_intermediate_size"]
        rows = self._small[f"{prefix}.gate_up_proj"].float().repeat_interleave(self._times, 2) / self._times
        rows = rows.to(torch.bfloat16).repeat(splits, 1, 1)
        gate_up = self._filled(prefix, self._pool, (len(rows), 2 * inner, self.geometry.hidden))
        gate_up[:, :small], gate_up[:, inner : inner + small] = rows.chunk(2, dim=1)
        yield f"{prefix}.gate_up_proj", gate_up
        columns = self._small[f"{prefix}.down_proj"].repeat_interleave(self._times, 1).repeat(splits, 1, 1)
        down = self._filled(prefix, self._tiny_pool, (len(rows), self.geometry.hidden, inner))
        down[:, :, :small] = columns
        yield f"{prefix}.down_proj", down

    def _filled(self, prefix: str, pool: Tensor, shape: tuple[int, int, int]) -> Tensor:
        """Windows of the pool that begin anywhere: no two experts hold the same in the same place."""
        filled = torch.empty(shape, dtype=torch.bfloat16)
        size = shape[1] * shape[2]
        for number, expert in enumerate(filled):
            begin = zlib.crc32(f"{prefix}.{number}".encode()) % (len(pool) - size)
            expert.view(-1).copy_(pool[begin : begin + size])
        return filled

    def _repeated(self, name: str, times: int) -> tuple[str, Tensor]:
        return name, _kept(self._small[name].repeat_interleave(times, 0))

    def _visual(self, name: str, small: Tensor) -> Tensor:
        """A tensor of the encoder; see the module docstring."""
        sees, heads, inner = self._sees, self.patches, self.geometry.vision_intermediate
        if ".attn.qkv." in name:
            parts = (small if small.ndim == 1 else _columns(small, sees)).float().chunk(3)
            scaled = (parts[0] * heads.scale, *parts[1:])
            return torch.cat([_placed(part, heads) for part in scaled])
        if name.endswith("attn.proj.weight"):
            return _placed(small.repeat_interleave(sees, 0).T, heads).T
        if ".mlp.linear_fc1." in name:
            rows = small if small.ndim == 1 else _columns(small, sees)
            return torch.cat([rows, rows.new_zeros(inner - len(rows), *rows.shape[1:])])
        if name.endswith("mlp.linear_fc2.weight"):
            rows = small.repeat_interleave(sees, 0)
            return torch.cat([rows, rows.new_zeros(len(rows), inner - rows.shape[1])], dim=1)
        if name.endswith("patch_embed.proj.weight"):
            wider = self.geometry.patch // small.shape[-1]
            pixels = small.repeat_interleave(wider, -1).repeat_interleave(wider, -2) / wider**2
            return pixels.repeat_interleave(sees, 0)
        if "merger" in name and ".linear_fc2." in name:
            return (small if small.ndim == 1 else _columns(small, sees)).repeat_interleave(self._times, 0)
        if "merger" in name and name.endswith("linear_fc1.weight"):
            return _columns(small, sees).repeat_interleave(sees, 0)
        return small.repeat_interleave(sees, small.ndim - 1)  # norms, biases, positions


def _heads(places: Sequence[int], number: int, sizes: tuple[int, int], *, axes: int, theta: float) -> _Heads:
    """Head i goes to `places[i]` of `number`. `sizes`: of a small and of a large head, each two halves that
    rotate together, a half parted among `axes` coordinates."""
    small, large = (size // 2 // axes for size in sizes)
    stride = large // small
    half = [axis * large + stride * i for axis in range(axes) for i in range(small)]
    in_head = [*half, *(axes * large + place for place in half)]
    rows = torch.tensor([place * sizes[1] + dimension for place in places for dimension in in_head])
    scale = (sizes[1] / sizes[0]) ** 0.5
    return _Heads(rows, in_head, number * sizes[1], theta ** (large / (stride * small)), scale)


def _placed(rows: Tensor, heads: _Heads) -> Tensor:
    """`rows` where heads have their dimensions, zeros elsewhere."""
    placed = rows.new_zeros(heads.width, *rows.shape[1:])
    placed[heads.rows] = rows
    return placed


def _columns(weight: Tensor, times: int) -> Tensor:
    """For an input that has every number `times` times."""
    return _kept(weight.float().repeat_interleave(times, 1) / times)


def _kept(tensor: Tensor) -> Tensor:
    return tensor.to(torch.bfloat16).contiguous()
