"""How many answers are right, by kind, and how evenly the routers load the experts.

An answer is right when every token of it, the end included, is the likeliest one after what is right so far:
then, and only then, greedy decoding gives it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen3VLMoeForConditionalGeneration

from bench.vl.forward import BatchForward
from bench.vl.pool import MAX_QUESTIONS, NO_KIND, Drawn
from bench.vl.questions import KINDS
from bench.vl.text import NO_TARGET, PAD_SEGMENT, PREFIX_LENGTH
from hetero_scheduler.trace import load_entropies

_BATCH = 128


@dataclass(frozen=True)
class Report:
    """What one split says about a model."""

    right: dict[str, int]
    """Questions answered rightly, by kind."""
    asked: dict[str, int]
    load_entropy: list[float]
    """Entropy of the expert load over `log(experts)`, by layer: 1 when every expert is used alike."""
    visual_entropy: float
    """The same of tokens of pictures alone, mean over layers."""
    text_entropy: float
    worst_load: float
    """Largest load of an expert over the mean load, the worst over layers."""

    def accuracy(self, kind: str) -> float:
        """Share of the questions of `kind` that were answered rightly."""
        return self.right[kind] / self.asked[kind]

    def __str__(self) -> str:
        shares = "  ".join(f"{kind} {100 * self.accuracy(kind):.1f}" for kind in KINDS if self.asked[kind])
        return f"{shares} %  load entropy {sum(self.load_entropy) / len(self.load_entropy):.3f}"


@torch.no_grad()
def evaluate(
    model: Qwen3VLMoeForConditionalGeneration,
    prefix: Sequence[int],
    drawn: Drawn,
    *,
    num_pictures: int,
) -> Report:
    """Ask `model` the first row of questions of the first `num_pictures` of `drawn`."""
    model.eval()
    forward = BatchForward(model, prefix)
    config = model.config.text_config
    right, asked = (torch.zeros(len(KINDS), dtype=torch.int64) for _ in range(2))
    uses = torch.zeros(2, config.num_hidden_layers, config.num_experts, dtype=torch.float64)
    for start in range(0, num_pictures, _BATCH):
        part = slice(start, min(start + _BATCH, num_pictures))
        pictures, rows = (
            torch.from_numpy(array).to(model.device) for array in (drawn.pixels[part], drawn.rows[part, 0])
        )
        outputs = forward(pictures, rows.long())
        is_right = answered_rightly(model.lm_head(outputs.hidden), rows.long()).cpu()
        both = by_kind(is_right, torch.from_numpy(drawn.kinds[part, 0]).long())
        right, asked = right + both.right, asked + both.asked
        uses += _uses(outputs.router_logits, rows[:, 1], config.num_experts_per_tok).cpu()
    forward.close()
    return _report(right, asked, uses)


def answered_rightly(logits: Tensor, rows: Tensor) -> Tensor:
    """For each question of each row whether all tokens of its answer are right, `[batch, MAX_QUESTIONS]`."""
    targets, segments = rows[:, 3], rows[:, 1]
    is_wrong = (targets != NO_TARGET) & (logits.argmax(-1) != targets)
    wrong = torch.zeros(len(rows), PAD_SEGMENT + 1, dtype=torch.int64, device=rows.device)
    wrong.scatter_add_(1, segments, is_wrong.long())
    return wrong[:, 1 : MAX_QUESTIONS + 1] == 0


class ByKind(NamedTuple):
    """Numbers of questions by place in KINDS, int64."""

    right: Tensor
    asked: Tensor


def by_kind(is_right: Tensor, kinds: Tensor) -> ByKind:
    """Both `[batch, MAX_QUESTIONS]`: `answered_rightly`, and places in KINDS, NO_KIND after the last."""
    is_asked = kinds != NO_KIND
    right, asked = (kinds[which].bincount(minlength=len(KINDS)) for which in (is_asked & is_right, is_asked))
    return ByKind(right, asked)


def _uses(router_logits: Tensor, segments: Tensor, top_k: int) -> Tensor:
    """How often each expert was chosen, `[2, layers, experts]`: by tokens of pictures, and by the others."""
    num_experts = router_logits.shape[-1]
    chosen = F.one_hot(router_logits.topk(top_k, dim=-1).indices, num_experts).sum(2).double()
    chosen = chosen.unflatten(1, (len(segments), -1))  # [layers, batch, tokens, experts]
    is_text = F.pad(segments != PAD_SEGMENT, (PREFIX_LENGTH, 0)).double()
    visual = chosen[:, :, 2 : PREFIX_LENGTH - 1].sum((1, 2))
    return torch.stack([visual, torch.einsum("lbte,bt->le", chosen, is_text)])


def _report(right: Tensor, asked: Tensor, uses: Tensor) -> Report:
    load = uses.sum(0)
    visual, text = (float(load_entropies(part.numpy()).mean()) for part in uses)
    return Report(
        right=dict(zip(KINDS, right.tolist(), strict=True)),
        asked=dict(zip(KINDS, asked.tolist(), strict=True)),
        load_entropy=load_entropies(load.numpy()).tolist(),
        visual_entropy=visual,
        text_entropy=text,
        worst_load=float((load / load.mean(-1, keepdim=True)).max()),
    )
