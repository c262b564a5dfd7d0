"""What a predictor reads: the router's preference among the experts that it chose (SeqMoE §5.2)."""

from __future__ import annotations

import torch
from torch import Tensor


def activation_state(router_logits: Tensor, chosen: Tensor) -> Tensor:
    """Activation-masked normalisation: experts not chosen count as -inf, softmax over the rest.

    `router_logits` `[..., E]`, `chosen` int64 `[..., K]`: the experts that the router activated.
    Returns `[..., E]` in float32: K positive shares that sum to one, zeros elsewhere. The relative preference
    among activated experts stays, the noise of the others goes.
    """
    scores = router_logits.float()
    shares = torch.softmax(scores.gather(-1, chosen), dim=-1)
    return torch.zeros_like(scores).scatter(-1, chosen, shares)


def predicted_activation(logits: Tensor, top_k: int) -> Tensor:
    """The state that a prediction stands for when it is fed back as the next input (SeqMoE §5.3).

    `logits` `[..., E]` as the predictor gives them; its `top_k` highest count as activated.
    """
    return activation_state(logits, logits.topk(top_k, dim=-1).indices)
