"""What the predictor is trained for (SeqMoE §5.4): the order at the top-K boundary, and the distribution."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

MARGIN = 1.0
"""How far above the hard negatives an activated expert should score, in logits."""


def ranking_loss(logits: Tensor, chosen: Tensor, margin: float = MARGIN) -> Tensor:
    """Hinge over pairs of an activated expert and a hard negative.

    `logits` `[..., E]`, `chosen` int64 `[..., K]`. The hard negatives are the K best-scored experts among
    those not chosen: the ones that would take an activated expert's place. Returns `[...]`.
    """
    num_negatives = min(chosen.shape[-1], logits.shape[-1] - chosen.shape[-1])
    positives = logits.gather(-1, chosen)
    negatives = logits.scatter(-1, chosen, -torch.inf).topk(num_negatives, dim=-1).values
    return F.relu(margin - positives[..., :, None] + negatives[..., None, :]).mean((-2, -1))


def divergence_loss(logits: Tensor, target: Tensor) -> Tensor:
    """KL(target ‖ softmax(logits)). `target` `[..., E]`: the true activation state. Returns `[...]`.

    The truth lies in the space of the inputs, so this pulls outputs into it and helps recursive prediction.
    """
    return F.kl_div(torch.log_softmax(logits, dim=-1), target, reduction="none").sum(-1)


def prediction_loss(logits: Tensor, target: Tensor, chosen: Tensor) -> Tensor:
    """Both losses, added. Returns `[...]`."""
    return ranking_loss(logits, chosen) + divergence_loss(logits, target)
