"""The geometry of the bundled model and the loss it is trained with."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

ROUTER_BALANCE = 0.02
ROUTER_Z = 1e-3


@dataclass(frozen=True)
class Geometry:
    """Sizes of the model. The default is the bundled one: 19.0 M parameters, 4.3 M of them active."""

    vocab_size: int = 6144
    hidden: int = 256
    layers: int = 8
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 32
    experts: int = 64
    top_k: int = 4
    intermediate: int = 40
    """Inner width of one expert; a multiple of 8, as grouped matrix products need 16-byte rows."""
    max_length: int = 2048


def build_model(geometry: Geometry, device: torch.device) -> Qwen3MoeForCausalLM:
    """A freshly initialised model in float32 on `device`. Ids 0 and 1 are `<|endoftext|>` and `<|pad|>`."""
    config = Qwen3MoeConfig(  # type: ignore[call-arg]  # head_dim is read, though not declared
        vocab_size=geometry.vocab_size,
        hidden_size=geometry.hidden,
        num_hidden_layers=geometry.layers,
        num_attention_heads=geometry.heads,
        num_key_value_heads=geometry.kv_heads,
        head_dim=geometry.head_dim,
        num_experts=geometry.experts,
        num_experts_per_tok=geometry.top_k,
        moe_intermediate_size=geometry.intermediate,
        intermediate_size=geometry.intermediate * geometry.top_k,
        norm_topk_prob=True,
        tie_word_embeddings=True,
        max_position_embeddings=geometry.max_length,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        router_aux_loss_coef=ROUTER_BALANCE,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=1,
    )
    with device:
        return Qwen3MoeForCausalLM(config)


def training_loss(model: Qwen3MoeForCausalLM, windows: Tensor) -> tuple[Tensor, Tensor]:
    """What is minimised, and the cross-entropy in it, for token windows `[batch, length + 1]`.

    The balance term is taken layer by layer (Switch Transformer, section 2.2, with the mean over k):
    transformers' own helper sums the layers first, which balances only their average.
    The z-term (ST-MoE, section 2) keeps router logits small.
    """
    inputs, targets = windows[:, :-1], windows[:, 1:]
    outputs = model.model(input_ids=inputs, use_cache=False, output_router_logits=True)
    logits = model.lm_head(outputs.last_hidden_state)
    cross_entropy = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
    router = torch.stack(outputs.router_logits).float()  # [layers, tokens, experts]
    balance = router_balance(router, model.config.num_experts_per_tok)
    z = router.logsumexp(-1).square().mean()
    return cross_entropy + ROUTER_BALANCE * balance + ROUTER_Z * z, cross_entropy.detach()


def router_balance(logits: Tensor, top_k: int) -> Tensor:
    """`experts * sum(load share * mean probability)`, averaged over layers; 1 when perfectly balanced.

    `logits`: `[layers, tokens, experts]`, float32.
    """
    probabilities = logits.softmax(-1)
    with torch.no_grad():
        weakest_chosen = probabilities.topk(top_k, dim=-1).values[..., -1:]
        load = (probabilities >= weakest_chosen).float().mean(1)  # [layers, experts]
        load /= load.sum(-1, keepdim=True)
    return logits.shape[-1] * (load * probabilities.mean(1)).sum(-1).mean()
