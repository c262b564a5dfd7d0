"""Which tokens of a draft the model makes its own: speculative sampling (Leviathan et al., 2023).

With p the model's distribution and q the drafter's, a drafted x is taken with probability
min(1, p(x) / q(x)); where it is not, a token is drawn from max(p - q, 0), normalised. The token is then
distributed as p, whatever q is. A draft that was certain has q(x) = 1. A greedy request takes the most likely
token, drafted or not.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hetero_runtime.generation.sampling import Sampler
from hetero_runtime.speculation.base import Draft


def committed(
    logits: torch.Tensor, draft: Draft, sampler: Sampler, *, history: Sequence[int]
) -> tuple[int, ...]:
    """The tokens that follow `history`: the part of the draft that is accepted, and one more of the model's.

    `logits` `[len(draft) + 1, vocab]`: of the last token of `history`, then of each drafted one. Raises
    RequestError for unsound ones.
    """
    tokens: list[int] = []
    for i, drafted in enumerate(draft.token_ids):
        proposal = None if draft.probabilities is None else draft.probabilities[i]
        tokens.append(_next(logits[i], drafted, proposal, sampler=sampler, history=[*history, *tokens]))
        if tokens[-1] != drafted:
            return tuple(tokens)
    return (*tokens, sampler.sample(logits[-1], [*history, *tokens]))


def _next(
    logits: torch.Tensor,
    drafted: int,
    proposal: torch.Tensor | None,
    *,
    sampler: Sampler,
    history: Sequence[int],
) -> int:
    """The token at one position: `drafted` where that is accepted, another one where it is not."""
    if sampler.is_greedy:
        return sampler.sample(logits, history)
    target = sampler.probabilities(logits, history)
    share = target[drafted] if proposal is None else target[drafted] / proposal[drafted]
    if sampler.uniform() < float(share):
        return drafted
    if proposal is None:
        rest = target.index_fill(0, torch.tensor(drafted, device=target.device), 0.0)
    else:
        rest = (target - proposal).clamp_min(0.0)
    # rounding alone can reject a token where p and q are the same; then p itself is what is left
    return sampler.draw(rest if float(rest.sum()) > 0 else target)
