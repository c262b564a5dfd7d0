"""The same forward with fewer visual tokens behind a prefix: many prompts at once, each as in the engine.

Pictures have equally many tokens and lose equally many, so a batch stays a batch. What tokens of a picture
see, and what their routers choose, no question changes: one choice of tokens serves a row of questions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import Qwen3VLMoeForConditionalGeneration

from bench.vl.drawing import NUM_CELLS
from bench.vl.forward import IMAGE_START, BatchForward, Seen, Tokens
from bench.vl.geometry import MERGE
from bench.vl.text import NO_TARGET, ROW_LENGTH
from hetero_runtime.hf.visual import received_attention
from hetero_scheduler.compression import ImageTokens, TokenSelector


class Half(NamedTuple):
    """A batch behind the prefix, whole."""

    tokens: Tokens
    images: list[ImageTokens]
    """Of each picture."""


class Answered(NamedTuple):
    """A batch behind the last layer."""

    logits: Tensor  # [batch, ROW_LENGTH, vocabulary], of the questions
    chosen: Tensor
    """`[layers behind the prefix, batch, tokens that went on, k]`: experts."""


class CompressedForward:
    """Runs `model` on pictures and rows as `BatchForward` does, and cuts between two layers."""

    def __init__(
        self, model: Qwen3VLMoeForConditionalGeneration, prefix_ids: Sequence[int], *, pinned: int
    ) -> None:
        """`pinned`: language layers before the cut; all layers have experts."""
        self._forward, self._pinned = BatchForward(model, prefix_ids), pinned
        self._head, self._top_k = model.lm_head, model.config.text_config.num_experts_per_tok

    @torch.no_grad()
    def begin(self, pictures: Tensor, rows: Tensor) -> Half:
        """Everything before the cut: the same for all ways of choosing."""
        seen = self._forward.see(pictures)
        tokens = self._forward.read(self._forward.begin(seen, rows), range(self._pinned))
        experts = self._chosen(len(rows))[:, :, IMAGE_START : IMAGE_START + NUM_CELLS].cpu().numpy()
        saliency = _saliency(seen).double().cpu().numpy()
        images = [ImageTokens(saliency[place], experts[:, place]) for place in range(len(rows))]
        return Half(tokens, images)

    @torch.no_grad()
    def finish(self, half: Half, selector: TokenSelector | None) -> Answered:
        """Everything behind the cut, of the tokens that `selector` keeps of each picture; None keeps all."""
        tokens = half.tokens
        if selector is not None:
            kept = np.stack([selector.select([image])[0] for image in half.images])
            tokens = _cut(tokens, torch.from_numpy(kept).to(tokens.hidden.device))
        read = self._forward.read(tokens, range(self._pinned, self._forward.num_layers))
        chosen = self._chosen(len(half.images))
        return Answered(self._head(self._forward.finish(read)[:, -ROW_LENGTH:]), chosen)

    def close(self) -> None:
        """Stop listening to the routers."""
        self._forward.close()

    def _chosen(self, batch: int) -> Tensor:
        logits = self._forward.take_router_logits()
        return logits.topk(self._top_k, dim=-1).indices.unflatten(1, (batch, -1))


def count_experts(answered: Answered, rows: Tensor, num_experts: int) -> Tensor:
    """Distinct experts that a picture and the first question of its row activate, `[layers, batch]`."""
    segments, targets = rows[:, 1], rows[:, 3]
    is_asked = (segments == 1) & ((targets != NO_TARGET).cumsum(1) <= 1)  # what says the answer's first token
    others = answered.chosen.shape[2] - rows.shape[2]
    is_prompt = torch.cat([is_asked.new_ones(len(rows), others), is_asked], dim=1)[None, :, :, None]
    uses = answered.chosen.new_zeros(*answered.chosen.shape[:2], num_experts)
    uses.scatter_add_(2, answered.chosen.flatten(2), is_prompt.expand_as(answered.chosen).flatten(2).long())
    return (uses > 0).sum(2)


def _saliency(seen: Seen) -> Tensor:
    """As the engine's: the mean over a token's patches, `[batch, NUM_CELLS]`."""
    received = received_attention(seen.query, seen.key, scaling=seen.query.shape[-1] ** -0.5)
    return received.unflatten(1, (NUM_CELLS, MERGE**2)).mean(-1)


def _cut(tokens: Tokens, kept: Tensor) -> Tokens:
    """`kept` `[batch, some]`: visual tokens that go on, ascending; all others do."""
    every = torch.arange(len(kept), device=kept.device)[:, None]
    all_places = torch.arange(tokens.hidden.shape[1], device=kept.device).expand(len(kept), -1)
    before, behind = all_places[:, :IMAGE_START], all_places[:, IMAGE_START + NUM_CELLS :]
    places = torch.cat([before, kept + IMAGE_START, behind], dim=1)  # [batch, tokens that go on]
    cos, sin = (part.expand(len(kept), -1, -1)[every, places] for part in tokens.rotary)
    mask = tokens.mask[:, 0][every[:, None], places[:, :, None], places[:, None]]
    return Tokens(tokens.hidden[every, places], mask[:, None], (cos, sin), tokens.added[:, every, places])
