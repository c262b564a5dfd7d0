"""One lesson of a block drafter: blocks at random places of greedy texts, and the loss over their tokens.

    text    t0 t1 t2 t3 t4 t5 t6 ...       features of t0 to t2 are context
    block            t3 ?  ?  ?            to be t4 t5 t6

A token counts less the deeper it lies: it is of use only where all before it are right (DFlash, Chen et al.,
2026, section 4).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from hetero_runtime.hf.hidden_states import HiddenStates
from hetero_runtime.speculation.block.network import BlockNetwork

_ROWS_AT_ONCE = 256
DECAY = 7.0
"""Tokens after which one counts 1/e of the first."""


class Target(NamedTuple):
    """The model that drafts are for, and the ear at its layers."""

    model: Any
    hidden_states: HiddenStates

    @torch.no_grad()
    def features(self, texts: Tensor) -> Tensor:
        """Of `texts` `[rows, n]`: `[rows, n, layers · hidden]`, in bfloat16: many of them are kept."""
        return torch.cat([self._features(part) for part in texts.split(_ROWS_AT_ONCE)])

    def _features(self, texts: Tensor) -> Tensor:
        with self.hidden_states.listening() as heard:
            self.model.model(input_ids=texts, use_cache=False)
        return heard.side_by_side().bfloat16()


class Blocks(NamedTuple):
    """`first` `[rows, blocks]`: positions of known tokens. `tokens` `[rows, blocks, n]`: what the text says
    from there on, -1 after its end."""

    first: Tensor
    tokens: Tensor


def cut_blocks(texts: Tensor, first: Tensor, size: int) -> Blocks:
    """Blocks of `size` tokens of `texts` `[rows, n]`, which begin at `first` `[rows, blocks]`."""
    positions = first[..., None] + torch.arange(size, device=texts.device)
    is_inside = positions < texts.shape[1]
    inside = positions.clamp_max(texts.shape[1] - 1)
    tokens = texts.gather(1, inside.flatten(1)).view_as(positions)
    return Blocks(first, tokens.where(is_inside, -1))


def draft(network: BlockNetwork, target: Target, features: Tensor, blocks: Blocks) -> Tensor:
    """What the network says of the blocks' tokens but the known one: logits `[rows, blocks, n - 1, vocab]`.

    `features` `[rows, text, layers · hidden]`: of the texts that the blocks are from.
    """
    ids = torch.full_like(blocks.tokens, network.shape.mask_token)
    ids[..., 0] = blocks.tokens[..., 0]
    dtype = network.norm.weight.dtype
    context = network.read(features.to(dtype))
    embedded = target.model.get_input_embeddings()(ids).to(dtype)
    hidden = network(embedded, blocks.first, context)[..., 1:, :]
    head = target.model.get_output_embeddings().weight
    return F.linear(hidden, head.to(hidden.dtype))


def block_loss(logits: Tensor, blocks: Blocks) -> Tensor:
    """Cross-entropy of the drafted tokens, the deeper the less."""
    labels = blocks.tokens[..., 1:]
    depth = torch.arange(labels.shape[-1], device=labels.device)
    weights = torch.exp(-depth / DECAY) * (labels >= 0)
    losses = F.cross_entropy(
        logits.float().flatten(0, -2), labels.flatten(), ignore_index=-1, reduction="none"
    )
    return (losses.view_as(labels) * weights).sum() / weights.sum()


def num_accepted(logits: Tensor, blocks: Blocks) -> Tensor:
    """Drafted tokens that are right, up to the first that is not, `[rows, blocks]`."""
    is_right = logits.argmax(-1) == blocks.tokens[..., 1:]
    return is_right.long().cumprod(-1).sum(-1)
