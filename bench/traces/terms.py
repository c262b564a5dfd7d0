"""What routers are trained for besides the text: an even load, and, in matched models, order in time.

    balance      load share × mean probability, layer by layer: 1 when every expert is used alike
    z            squared log-sum-exp: keeps router logits small
    consistency  -log of the probability left on the experts of the last four tokens: with 128 experts, top-8,
                 what a cache of a quarter would hold
    departure    probability left on those same experts: the other way, where they are used too often
    novelty      probability left on the experts of the 28 tokens before those, and of none since: what only
                 a larger cache would hold
    foresight    KL from what a Mamba2 companion expected of this token, some steps ahead, of past routing

The last four are what a big model's routing has by itself and a small one's has less of. Consistency makes
routing repeat at once, departure keeps it from that, novelty from coming back later, so they set LRU hits of
small and of large caches. Foresight makes routing follow from its own history, repeated or not, so it sets
what a predictor can know, and how far ahead. It leaves the first layers of each group alone: by them the
companion knows which token it is that the others are to follow. The companion learns along with the model, as
the other half of the term; it has a model a group of layers, as the predictor does, and sees no more than
that one would.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from bench.models.model import Geometry
from hetero_scheduler.predict.activation import activation_state
from hetero_scheduler.predict.mamba2_block import Mamba2Sizes
from hetero_scheduler.predict.mamba2_model import GroupModel, GroupShape
from hetero_scheduler.predict.routing import layer_groups

RECENT = 4
"""Tokens whose experts count as recently used."""
EARLIER = 32
"""Tokens whose experts count as used at all. Both are powers of two."""
SENSES = 2
"""Layers at the start of a group whose routing no companion draws, half of the group at most."""


class Routing(NamedTuple):
    """What all routers said in one forward of `batch` windows."""

    logits: Tensor  # [layers, batch, steps, experts] float32
    chosen: Tensor  # [layers, batch, steps, top_k] int64


class RouterTap:
    """Listens to every router of a model; nothing is copied to the host."""

    def __init__(self, model: Qwen3MoeForCausalLM) -> None:
        routers = [module for module in model.modules() if isinstance(module, Qwen3MoeTopKRouter)]
        self._heard: list[tuple[Tensor, Tensor] | None] = [None] * len(routers)
        for layer, router in enumerate(routers):
            router.register_forward_hook(partial(self._listen, layer))

    def take(self, batch: int) -> Routing:
        """What the last forward, of `batch` rows, said; forgets it. There must have been one."""
        heard = [pair for pair in self._heard if pair is not None]
        assert len(heard) == len(self._heard), "no forward since the last take"
        logits = torch.stack([said for said, _ in heard]).float()
        chosen = torch.stack([taken for _, taken in heard])
        self._heard = [None] * len(heard)
        return Routing(logits.unflatten(1, (batch, -1)), chosen.unflatten(1, (batch, -1)))

    def _listen(
        self, layer: int, router: nn.Module, inputs: Any, outputs: tuple[Tensor, Tensor, Tensor]
    ) -> None:
        self._heard[layer] = outputs[0], outputs[2]


def balance_loss(probabilities: Tensor, chosen: Tensor) -> Tensor:
    """`experts × sum(load share × mean probability)`, mean over layers; gradients through probabilities only.

    `probabilities` `[layers, batch, steps, experts]`, `chosen` `[layers, batch, steps, top_k]`.
    """
    layers, experts = probabilities.shape[0], probabilities.shape[-1]
    uses = chosen.flatten(1)
    load = probabilities.new_zeros(layers, experts)
    load.scatter_add_(1, uses, probabilities.new_ones(()).expand_as(uses))
    share = load / uses.shape[1]
    return experts * (share * probabilities.mean((1, 2))).sum(-1).mean()


class KeptShares(NamedTuple):
    """Probability that tokens leave on experts used before; gradients through probabilities only."""

    recent: Tensor  # on those of the last RECENT tokens, [layers, batch, steps - 1]
    earlier: Tensor  # on those of the last EARLIER tokens that are not recent ones


def kept_shares(probabilities: Tensor, chosen: Tensor) -> KeptShares:
    """Of each token but the first, `probabilities` `[layers, batch, steps, experts]`."""
    used = torch.zeros_like(probabilities, dtype=torch.bool).scatter_(-1, chosen, True)[:, :, :-1]
    recent = _used_within(used, RECENT)
    earlier = _used_within(recent, EARLIER, already=RECENT) & ~recent
    following = probabilities[:, :, 1:]
    return KeptShares(*(following.masked_fill(~kept, 0.0).sum(-1) for kept in (recent, earlier)))


def _used_within(used: Tensor, tokens: int, *, already: int = 1) -> Tensor:
    """`used` within `already` tokens, along its third axis; so within `tokens`, by doubling."""
    while already < tokens:
        wider = used.clone()
        wider[:, :, already:] |= used[:, :, :-already]
        used, already = wider, 2 * already
    return used


class Companion(nn.Module):
    """Foresees a model's routing `ahead` steps from what it was so far, each group of layers by its own."""

    def __init__(self, geometry: Geometry, *, ahead: int = 1, width: int = 128) -> None:
        """`width`: hidden features of a group's model, a multiple of 32."""
        super().__init__()
        sizes = Mamba2Sizes(d_model=width, state_size=32, head_dim=32)
        self.groups = layer_groups(geometry.layers)
        shapes = [
            GroupShape(len(group), geometry.experts, geometry.top_k, sizes=sizes) for group in self.groups
        ]
        self.models = nn.ModuleList(GroupModel(shape) for shape in shapes)
        self.ahead = ahead
        drawn = [layer for group in self.groups for layer in group[min(SENSES, len(group) // 2) :]]
        self.drawn: Tensor
        """Layers that foresight draws: all but the senses of each group."""
        self.register_buffer("drawn", torch.tensor(drawn), persistent=False)

    def expect(self, routing: Routing) -> Tensor:
        """Logits for every step but the first `ahead`, `[batch, steps - ahead, layers, experts]`, float32."""
        logits, chosen = (part.detach().permute(1, 2, 0, 3) for part in routing)
        with torch.autocast(logits.device.type, enabled=False):
            states = activation_state(logits, chosen)[:, : -self.ahead]
            return torch.cat([self._expect(group, states) for group in range(len(self.groups))], dim=2)

    def recall(self, routing: Routing, is_real: Tensor) -> Tensor:
        """Share of the chosen experts among the k + 3 that were expected most, a scalar.

        `is_real` `[batch, steps]`: of these steps alone.
        """
        best = self.expect(routing).topk(routing.chosen.shape[-1] + 3, dim=-1).indices
        truth = routing.chosen[:, :, self.ahead :].permute(1, 2, 0, 3)
        is_found = (truth[..., :, None] == best[..., None, :]).any(-1)
        return is_found[is_real[:, self.ahead :]].float().mean()

    def _expect(self, group: int, states: Tensor) -> Tensor:
        model = cast(GroupModel, self.models[group])
        layers = self.groups[group]
        expected: Tensor = model(states[:, :, layers.start : layers.stop], model.initial_state(len(states)))[
            0
        ]
        return expected


def foresight_loss(expected: Tensor, logits: Tensor) -> Tensor:
    """KL(what routers say ‖ what was expected), mean over tokens and layers; draws both to each other.

    `expected` as a companion gives it, of the last steps of `logits` `[layers, batch, steps, experts]`.
    """
    said = logits[:, :, -expected.shape[1] :].permute(1, 2, 0, 3).log_softmax(-1)
    divergence: Tensor = F.kl_div(expected.float().log_softmax(-1), said, reduction="none", log_target=True)
    return divergence.sum(-1).mean()
