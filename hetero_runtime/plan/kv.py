"""What the KV cache of one row takes, by kind of attention layer.

full               key and value of every token: 2 · kv heads · head size
latent (MLA)       one compressed vector and the rotary part of a key a token
sliding            like full, for the last `window` tokens only
compressed (V4)    a sliding window, and one entry for every `rate` tokens
linear             a state of fixed size, whatever the length
"""

from __future__ import annotations

from dataclasses import dataclass

from hetero_runtime.plan.model_config import TextConfig

_STATE_ITEMSIZE = 4
"""Recurrent states are kept in float32."""
_COMPRESSION = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
"""DeepSeek-V4: tokens an entry, where config.json does not say."""


@dataclass(frozen=True)
class LayerKv:
    """The cache of one layer and one row."""

    elements: int = 0
    """Elements a token, for tokens inside `window`."""
    window: int | None = None
    """Tokens kept; None: all."""
    compressed_elements: float = 0.0
    """Further elements a token, for tokens of any age."""
    state_elements: int = 0
    """Elements that do not depend on the length (float32)."""

    def num_bytes(self, length: int, itemsize: int, *, is_fixed: bool = False) -> int:
        """Bytes at `length` tokens; `is_fixed`: our own cache, which has room for all of them everywhere."""
        kept = length if self.window is None or is_fixed else min(length, self.window)
        cached = kept * self.elements + int(length * self.compressed_elements)
        return cached * itemsize + self.state_elements * _STATE_ITEMSIZE


@dataclass(frozen=True)
class KvGeometry:
    """The cache of all layers."""

    layers: tuple[LayerKv, ...]

    def row_bytes(self, length: int, itemsize: int, *, is_fixed: bool = False) -> int:
        """Bytes of one row of `length` tokens; `itemsize` bytes an element, `is_fixed` as in LayerKv."""
        return sum(layer.num_bytes(length, itemsize, is_fixed=is_fixed) for layer in self.layers)

    def largest_layer_bytes(self, length: int, itemsize: int) -> int:
        """Bytes of the largest layer of one row."""
        return max((layer.num_bytes(length, itemsize) for layer in self.layers), default=0)

    def bytes_per_token(self, itemsize: int) -> int:
        """What one more token takes in a long row: sliding and linear layers take nothing."""
        full = sum(layer.elements for layer in self.layers if layer.window is None)
        return int((full + sum(layer.compressed_elements for layer in self.layers)) * itemsize)


def read_kv(config: TextConfig, num_layers: int) -> KvGeometry:
    """The cache of the model that `config` describes."""
    window = config.optional("sliding_window")
    return KvGeometry(tuple(_layer(config, kind, window) for kind in layer_kinds(config, num_layers, window)))


def layer_kinds(config: TextConfig, num_layers: int, window: int | None) -> list[str]:
    """Attention kind of each layer, in transformers' words, where config.json may leave it to defaults."""
    if kinds := config.strings("layer_types", num_layers):
        return kinds
    model_type = config.values.get("model_type")
    if ratios := config.values.get("compress_ratios"):
        by_ratio = {4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
        return [by_ratio.get(ratio, "sliding_attention") for ratio in ratios[:num_layers]]
    if model_type == "deepseek_v4":
        pair = ("heavily_compressed_attention", "compressed_sparse_attention")
        return [pair[0] if layer < 2 else pair[layer % 2] for layer in range(num_layers)]
    if config.values.get("linear_num_value_heads") is not None:
        interval = config.optional("full_attention_interval") or 4
        return [
            "full_attention" if (layer + 1) % interval == 0 else "linear_attention"
            for layer in range(num_layers)
        ]
    if window is None or config.values.get("use_sliding_window") is False:
        return ["full_attention"] * num_layers
    if model_type == "gpt_oss":
        pair = ("full_attention", "sliding_attention")
        return [pair[(layer + 1) % 2] for layer in range(num_layers)]
    first = config.optional("max_window_layers") or 0 if "use_sliding_window" in config.values else 0
    return ["full_attention" if layer < first else "sliding_attention" for layer in range(num_layers)]


def head_size(config: TextConfig) -> int:
    """Elements of one attention head."""
    return config.optional("head_dim") or config.integer("hidden_size") // config.integer(
        "num_attention_heads"
    )


def _layer(config: TextConfig, kind: str, window: int | None) -> LayerKv:
    if kind == "linear_attention":
        return LayerKv(state_elements=_linear_state(config))
    if (rank := config.optional("kv_lora_rank")) is not None:
        return LayerKv(elements=rank + config.integer("qk_rope_head_dim"))
    if kind in _COMPRESSION:
        return _compressed(config, kind, window)
    heads = config.optional("num_key_value_heads", "num_attention_heads") or 1
    shared = 1 if config.values.get("model_type") == "deepseek_v4" else 2
    is_sliding = kind in ("sliding_attention", "chunked_attention")
    return LayerKv(elements=shared * heads * head_size(config), window=window if is_sliding else None)


def _compressed(config: TextConfig, kind: str, window: int | None) -> LayerKv:
    """Keys and values are one tensor here; the sparse kind also keeps an index key an entry."""
    rates = config.values.get("compress_rates") or {}
    rate = int(rates.get(kind, _COMPRESSION[kind]))
    size = head_size(config)
    index = config.integer("index_head_dim") if kind == "compressed_sparse_attention" else 0
    # Keys and gates of an entry that is not full yet wait beside it. Entries of the sparse kind overlap:
    # they are twice as wide, and the one before is kept too.
    waiting = (6 if index else 2) * rate * (size + index)
    return LayerKv(size, window, compressed_elements=(size + index) / rate, state_elements=waiting)


def _linear_state(config: TextConfig) -> int:
    """Convolution and recurrent state of a gated delta net (Qwen3-Next, Qwen3.5)."""
    keys = config.integer("linear_num_key_heads") * config.integer("linear_key_head_dim")
    value_heads, value_size = (
        config.integer("linear_num_value_heads"),
        config.integer("linear_value_head_dim"),
    )
    convolution = (2 * keys + value_heads * value_size) * config.integer("linear_conv_kernel_dim")
    return convolution + value_heads * config.integer("linear_key_head_dim") * value_size
