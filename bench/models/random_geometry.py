"""Sizes of a large model, and with them the tensors and the config.json of a checkpoint of it.

The defaults of `RandomGeometry` are Qwen3-30B-A3B's; each subclass is another model, named and laid out as on
the Hub. What a checkpoint of random weights is good for is said in `random_checkpoint.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

GAIN = 0.7
"""Standard deviation of a weight times the square root of its fan-in: activations neither die nor explode."""

ITEMSIZE = 2
"""Bytes of a bf16 number."""


class Spec(NamedTuple):
    """One tensor to be written: all ones where `std` is None, all zeros where it is 0, else normal with that
    standard deviation."""

    name: str
    shape: tuple[int, ...]
    std: float | None

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEMSIZE

    @property
    def is_routed_expert(self) -> bool:
        """Whether it belongs to one of the experts that routers choose from."""
        return ".experts." in self.name


@dataclass(frozen=True)
class RandomGeometry:
    """Sizes of the checkpoint; the defaults are Qwen3-30B-A3B's, but for the depth and the vocabulary.

    `layers`: those with experts. `head_dim`: of the queries and keys, without what is rotated apart.
    """

    layers: int = 16
    hidden: int = 2048
    experts: int = 128
    top_k: int = 8
    intermediate: int = 768
    heads: int = 32
    kv_heads: int = 4
    head_dim: int = 128
    vocab_size: int = 32000

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert: gate, up and down."""
        return 3 * self.hidden * self.intermediate * ITEMSIZE

    def config(self) -> dict[str, Any]:
        """The content of config.json."""
        return {
            **_shared_config(self),
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "decoder_sparse_step": 1,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate * self.top_k,
            "max_position_embeddings": 40960,
            "mlp_only_layers": [],
            "moe_intermediate_size": self.intermediate,
            "norm_topk_prob": True,
            "num_experts": self.experts,
            "num_hidden_layers": self.layers,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
            "router_aux_loss_coef": 0.001,
            "sliding_window": None,
        }

    def tensors(self) -> list[list[Spec]]:
        """The tensors of each shard, in the order of the Hub's: embeddings, then one layer after another."""
        return [list(self._ends()), *(list(self._layer(layer)) for layer in range(self.layers))]

    def _ends(self) -> Iterator[Spec]:
        shape = (self.vocab_size, self.hidden)
        yield Spec("model.embed_tokens.weight", shape, 1.0)
        yield Spec("model.norm.weight", (self.hidden,), None)
        yield linear("lm_head.weight", *shape)

    def _layer(self, layer: int) -> Iterator[Spec]:
        prefix = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield Spec(f"{prefix}.{norm}.weight", (self.hidden,), None)
        yield from self._attention(f"{prefix}.self_attn")
        yield linear(f"{prefix}.mlp.gate.weight", self.experts, self.hidden)
        yield from self._experts(f"{prefix}.mlp.experts")

    def _attention(self, prefix: str) -> Iterator[Spec]:
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        for norm, size in zip(("q_norm", "k_norm"), self._norm_sizes(), strict=True):
            yield Spec(f"{prefix}.{norm}.weight", (size,), None)
        yield linear(f"{prefix}.q_proj.weight", queries, self.hidden)
        for projection in ("k_proj", "v_proj"):
            yield linear(f"{prefix}.{projection}.weight", keys, self.hidden)
        yield linear(f"{prefix}.o_proj.weight", self.hidden, queries)

    def _norm_sizes(self) -> tuple[int, int]:
        """Of what the norms of queries and keys take at a time."""
        return self.head_dim, self.head_dim

    def _experts(self, prefix: str) -> Iterator[Spec]:
        for expert in range(self.experts):
            yield from mlp(f"{prefix}.{expert}", self.hidden, self.intermediate)


@dataclass(frozen=True)
class OlmoeGeometry(RandomGeometry):
    """OLMoE-1B-7B: 12.9 GB of experts of 12.6 MB each, a softmax router."""

    experts: int = 64
    intermediate: int = 1024
    heads: int = 16
    kv_heads: int = 16
    vocab_size: int = 50304

    def config(self) -> dict[str, Any]:
        if self.head_dim * self.heads != self.hidden:
            raise ValueError(
                f"{self.heads} heads of {self.head_dim}: OLMoE's take the hidden size, {self.hidden}"
            )
        return {
            **_shared_config(self),
            "architectures": ["OlmoeForCausalLM"],
            "model_type": "olmoe",
            "clip_qkv": None,
            "intermediate_size": self.intermediate,
            "max_position_embeddings": 4096,
            "norm_topk_prob": False,
            "num_experts": self.experts,
            "num_hidden_layers": self.layers,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        }

    def _norm_sizes(self) -> tuple[int, int]:
        return self.heads * self.head_dim, self.kv_heads * self.head_dim


@dataclass(frozen=True)
class MoonlightGeometry(RandomGeometry):
    """Moonlight-16B-A3B, DeepSeek-V3's architecture: 28.8 GB of experts of 17.3 MB each, two shared ones, a
    first layer without any, latent attention, and a sigmoid router whose correction bias is all zeros."""

    layers: int = 26
    experts: int = 64
    top_k: int = 6
    intermediate: int = 1408
    heads: int = 16
    kv_heads: int = 16
    vocab_size: int = 163840
    shared: int = 2
    rotated: int = 64
    """Of each head, beside `head_dim`."""
    latent: int = 512
    dense: int = 11264
    """Intermediate size of the first layer."""

    def config(self) -> dict[str, Any]:
        return {
            **_shared_config(self),
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "first_k_dense_replace": 1,
            "intermediate_size": self.dense,
            "kv_lora_rank": self.latent,
            "max_position_embeddings": 8192,
            "moe_intermediate_size": self.intermediate,
            "n_group": 1,
            "n_routed_experts": self.experts,
            "n_shared_experts": self.shared,
            "norm_topk_prob": True,
            "num_hidden_layers": 1 + self.layers,
            "num_nextn_predict_layers": 0,
            "q_lora_rank": None,
            "qk_nope_head_dim": self.head_dim,
            "qk_rope_head_dim": self.rotated,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
            "routed_scaling_factor": 2.446,
            "topk_group": 1,
            "v_head_dim": self.head_dim,
        }

    def tensors(self) -> list[list[Spec]]:
        layers = [list(self._layer(layer)) for layer in range(1 + self.layers)]
        return [list(self._ends()), *layers]

    def _layer(self, layer: int) -> Iterator[Spec]:
        if layer:
            yield from super()._layer(layer)
            prefix = f"model.layers.{layer}.mlp"
            yield Spec(f"{prefix}.gate.e_score_correction_bias", (self.experts,), 0.0)
            yield from mlp(f"{prefix}.shared_experts", self.hidden, self.shared * self.intermediate)
            return
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield Spec(f"model.layers.0.{norm}.weight", (self.hidden,), None)
        yield from self._attention("model.layers.0.self_attn")
        yield from mlp("model.layers.0.mlp", self.hidden, self.dense)

    def _attention(self, prefix: str) -> Iterator[Spec]:
        values = self.heads * self.head_dim
        yield linear(f"{prefix}.q_proj.weight", self.heads * (self.head_dim + self.rotated), self.hidden)
        yield linear(f"{prefix}.kv_a_proj_with_mqa.weight", self.latent + self.rotated, self.hidden)
        yield Spec(f"{prefix}.kv_a_layernorm.weight", (self.latent,), None)
        yield linear(f"{prefix}.kv_b_proj.weight", 2 * values, self.latent)
        yield linear(f"{prefix}.o_proj.weight", self.hidden, values)


def linear(name: str, rows: int, columns: int) -> Spec:
    """A matrix that keeps the size of what it is given."""
    return Spec(name, (rows, columns), GAIN / math.sqrt(columns))


def mlp(prefix: str, hidden: int, intermediate: int) -> Iterator[Spec]:
    """A gated MLP, in the order of the Hub's shards."""
    yield linear(f"{prefix}.down_proj.weight", hidden, intermediate)
    yield linear(f"{prefix}.gate_proj.weight", intermediate, hidden)
    yield linear(f"{prefix}.up_proj.weight", intermediate, hidden)


def _shared_config(geometry: RandomGeometry) -> dict[str, Any]:
    """What all of them have, the special tokens of `random_checkpoint.SPECIAL_TOKENS` included."""
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "dtype": "bfloat16",
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": geometry.hidden,
        "initializer_range": 0.02,
        "num_attention_heads": geometry.heads,
        "num_experts_per_tok": geometry.top_k,
        "num_key_value_heads": geometry.kv_heads,
        "output_router_logits": False,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": geometry.vocab_size,
    }
