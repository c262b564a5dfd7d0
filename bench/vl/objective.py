"""What training minimises: answers, what lies under each visual token, where to look, an even load.

answers   cross-entropy of the tokens of answers; questions are given, not learnt
cells     colour, form and middles by a linear look at each visual token. The layer that looks is not
          kept: it only spares the vision tower the detour of learning to see from words alone
salience  attention in the last vision layer goes to what lies on the picture, evenly. Encoders trained on
          photographs come to look at things by themselves; this one has two minutes
balance   as for the bundled model: load share × mean probability, layer by layer, and the z-term
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen3VLMoeForConditionalGeneration

from bench.models.model import ROUTER_Z, router_balance
from bench.vl.drawing import NUM_CENTRES, NUM_COLOURS, NUM_FORMS
from bench.vl.forward import BatchForward
from bench.vl.text import NO_TARGET

CELL_WEIGHT = 0.5
SALIENCE_WEIGHT = 0.1
_TINY = 1e-6


class Losses(NamedTuple):
    """Terms of one batch; `total` is minimised. Scalars, all but the first without gradient."""

    total: Tensor
    answers: Tensor
    cells: Tensor
    salience: Tensor


class Objective(nn.Module):
    """The loss of a batch, and the layer that looks at visual tokens. `balance`: weight of the load term."""

    def __init__(
        self, model: Qwen3VLMoeForConditionalGeneration, forward: BatchForward, *, balance: float
    ) -> None:
        super().__init__()
        config = model.config.text_config
        self.look = nn.Linear(config.hidden_size, NUM_COLOURS + NUM_FORMS + NUM_CENTRES, device=model.device)
        self._run, self._top_k, self._balance = forward, config.num_experts_per_tok, balance
        self._head = [model.lm_head]  # in a list: it belongs to the model, not to this module

    def forward(self, pictures: Tensor, cells: Tensor, rows: Tensor) -> Losses:
        """`pictures` uint8 `[batch, 192, 192, 3]`, `cells` int64 `[batch, 144, 3]`, `rows` int64."""
        outputs = self._run(pictures, rows)
        logits = self._head[0](outputs.hidden).float()
        answers = F.cross_entropy(logits.flatten(0, 1), rows[:, 3].flatten(), ignore_index=NO_TARGET)
        seen = self._cells(outputs.visual, cells)
        said = outputs.router_logits.float()
        load = (
            self._balance * router_balance(said, self._top_k) + ROUTER_Z * said.logsumexp(-1).square().mean()
        )
        salience = salience_loss(outputs.received, cells)
        total = answers + CELL_WEIGHT * seen + SALIENCE_WEIGHT * salience + load
        return Losses(total, answers.detach(), seen.detach(), salience.detach())

    def _cells(self, visual: Tensor, cells: Tensor) -> Tensor:
        parts = self.look(visual).float().flatten(0, 1).split((NUM_COLOURS, NUM_FORMS, NUM_CENTRES), dim=-1)
        wanted = cells.flatten(0, 1).unbind(-1)
        terms = [F.cross_entropy(part, want) for part, want in zip(parts, wanted, strict=True)]
        return torch.stack(terms).sum()


def salience_loss(received: Tensor, cells: Tensor) -> Tensor:
    """Cross-entropy of attention `[batch, 144]` from an even share for every cell that something lies on."""
    is_covered = (cells[..., :2] > 0).any(-1).float()
    share = is_covered / is_covered.sum(-1, keepdim=True).clamp_min(1)
    return -(share * (received + _TINY).log()).sum(-1).mean()
