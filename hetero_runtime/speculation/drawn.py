"""A draft that is drawn token by token, as its request samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from hetero_runtime.generation import SamplingParams, make_sampler
from hetero_runtime.generation.sampling import Sampler
from hetero_runtime.speculation.base import Draft

_OTHER_SEED = 0x5DEECE66D
"""A seeded text draws drafts from a seed of their own: what the drafter drew must say nothing of what the
model draws."""


def sampler_of_drafts(params: SamplingParams, vocab_size: int, device: torch.device) -> Sampler:
    """For drafts of a text that is sampled by `params`."""
    own = params if params.seed is None else replace(params, seed=params.seed ^ _OTHER_SEED)
    return make_sampler(own, vocab_size, device)


class DrawnDraft:
    """Tokens to follow `history`, none so far."""

    def __init__(self, sampler: Sampler, history: Sequence[int]) -> None:
        self._sampler = sampler
        self._text, self._num_before = list(history), len(history)
        self._proposals: list[torch.Tensor] = []

    def __len__(self) -> int:
        return len(self._proposals)

    def add(self, logits: torch.Tensor) -> int:
        """Choose the next token by its `logits` `[vocab]`. Raises RequestError for unsound ones."""
        if self._sampler.is_greedy:
            token, probabilities = self._sampler.sample(logits, self._text), torch.softmax(logits, dim=-1)
        else:
            probabilities = self._sampler.probabilities(logits, self._text)
            token = self._sampler.draw(probabilities)
        self._text.append(token)
        self._proposals.append(probabilities)
        return token

    def draft(self) -> Draft:
        """All of them; there has to be one."""
        tokens, proposals = self._text[self._num_before :], torch.stack(self._proposals)
        chosen = torch.tensor(tokens, device=proposals.device)
        confidences = tuple(proposals.gather(1, chosen[:, None])[:, 0].tolist())
        return Draft(tuple(tokens), None if self._sampler.is_greedy else proposals, confidences)
