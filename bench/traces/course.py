"""Where a matched model's routers shall go: a course that its own past nearly decides.

What a cache holds and what a predictor foresees are two things. Big models' routing turns over, a quarter of
a small LRU cache's lookups miss, and yet routing so far tells most of the next eight steps (SeqMoE §3, §9).
Routing that only lingers is foreseen but never misses; routing that follows the sampled token misses but is
never foreseen. What does both moves by itself:

    still     the text so far: the sum of its tokens' numbers, fixed and random, its length at most one
    turning   a clock: sines of the token's position, at frequencies of the model's own rotary embedding
    logits    √share × still · w  +  √(1 - share) × turning · v        w, v fixed, of each expert and layer

So which experts a text uses is the text's, and when is the clock's. `share` sets how many of them leave from
one token to the next, and so LRU hits. Windows begin with the token BEGIN, or no model could know positions.
The first layers of the model are left to the token at hand, as they come.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen3MoeForCausalLM

from bench.models.model import Geometry
from bench.traces.terms import Routing

BEGIN = 1
"""The token that windows begin with: the padding's id, which no text has."""
FREE = 2
"""Layers at the start of the model that have no course, half of the model at most."""
STILL = 8
"""Numbers of a token, and of the text so far."""
CALM = 8.0
"""Typical length of a text's sum, that of 64 unrelated tokens, up to which its tokens swing it less."""
HANDS = {1: 0.5, 2: 1.0, 3: 0.6}
"""Weights of the clock's frequencies, by their index in the rotary embedding's: 11, 20 and 35 tokens a turn
for heads of 32 features."""
LOUDNESS = 2.5
"""Standard deviation of the course's logits."""
ROTARY_BASE = 10000.0


class Course(nn.Module):
    """The course of a model's routers. Nothing in it is learned; the same `seed` gives the same course."""

    def __init__(
        self, geometry: Geometry, counts: npt.NDArray[np.int64], *, share: Tensor, seed: int = 0
    ) -> None:
        """`counts`: how often the text holds each token, `[vocab_size]`. `share`: a scalar from 0 to 1 on
        the device, read anew at each use."""
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        first = min(FREE, geometry.layers // 2)
        layers = geometry.layers - first
        table = torch.randn(geometry.vocab_size, STILL, generator=draw)
        # what all texts have in common would drown what sets one apart
        table -= torch.from_numpy(counts / counts.sum()).float() @ table
        table[BEGIN] = 0.0
        still = F.normalize(torch.randn(layers, geometry.experts, STILL, generator=draw), dim=-1)
        phases = 2 * math.pi * torch.rand(layers, geometry.experts, len(HANDS), generator=draw)
        hands, weights = (torch.tensor(part) for part in zip(*HANDS.items(), strict=True))
        amplitudes = weights * torch.rsqrt(weights.square().sum() / 2)
        turning = torch.cat([phases.cos() * amplitudes, phases.sin() * amplitudes], dim=-1)
        angles = ROTARY_BASE ** (-2 * hands / geometry.head_dim)
        self.first, self._share = first, share
        self.table, self.still, self.turning, self.angles = (
            nn.Buffer(value, persistent=False) for value in (table, still, turning, angles)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the layers from `first`, `[layers, batch, steps, experts]` float32, for windows `tokens`
        `[batch, steps]`, each begun with BEGIN."""
        with torch.autocast(tokens.device.type, enabled=False):
            steps = torch.arange(tokens.shape[1], device=tokens.device)
            text = self.table[tokens].cumsum(1)
            text = text * torch.rsqrt(text.square().mean(-1, keepdim=True) + CALM**2)
            turned = steps[:, None] * self.angles
            clock = torch.cat([turned.cos(), turned.sin()], dim=-1)  # [steps, 2 · hands]
            said = self._share.sqrt() * torch.einsum("bts,les->lbte", text, self.still)
            told = (1 - self._share).sqrt() * torch.einsum("tc,lec->lte", clock, self.turning)
            return LOUDNESS * (said + told[:, None])

    def strayed(self, tokens: Tensor, routing: Routing) -> Tensor:
        """KL(course ‖ routers), mean over tokens and layers, of what routers say of windows `tokens`."""
        course, said = self(tokens).log_softmax(-1), routing.logits[self.first :].log_softmax(-1)
        divergence: Tensor = F.kl_div(said, course, reduction="none", log_target=True)
        return divergence.sum(-1).mean()

    def followed(self, tokens: Tensor, routing: Routing) -> Tensor:
        """Share of the chosen experts among the k + 3 best of the course, a scalar."""
        best = self(tokens).topk(routing.chosen.shape[-1] + 3, dim=-1).indices
        truth = routing.chosen[self.first :]
        shares: Tensor = (truth[..., :, None] == best[..., None, :]).any(-1).float()
        return shares.mean()


@torch.no_grad()
def let_begin(model: Qwen3MoeForCausalLM) -> None:
    """Make BEGIN what texts of a new `model` begin with.

    As padding it is a vector of zeros that never learns, and norms of zeros multiply gradients by a thousand,
    layer by layer.
    """
    embedding = model.model.embed_tokens
    embedding.padding_idx = None
    embedding.weight[BEGIN].normal_(std=model.config.initializer_range)
    model.config.bos_token_id = BEGIN


def begun(windows: Tensor) -> Tensor:
    """`windows` `[batch, steps]` with BEGIN before each, `[batch, steps + 1]`."""
    return torch.cat([torch.full_like(windows[:, :1], BEGIN), windows], dim=1)
