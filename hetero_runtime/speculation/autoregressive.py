"""Drafts from a small model with the same tokenizer, token by token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from hetero_runtime.generation import SamplingParams, make_sampler
from hetero_runtime.generation.sampling import Sampler
from hetero_runtime.hf.rewind import RewindableState
from hetero_runtime.speculation.base import Draft, Drafter, DraftRow

_OTHER_SEED = 0x5DEECE66D
"""A seeded text draws drafts from a seed of their own: what the drafter drew must say nothing of what the
model draws."""


class AutoregressiveDrafter(Drafter):
    """`model`: any causal model of transformers, on `device`. `vocab_size`: logits of the model it drafts
    for."""

    def __init__(self, model: Any, *, vocab_size: int, device: torch.device) -> None:
        self._model, self._vocab_size, self._device = model, vocab_size, device
        config = model.config.get_text_config(decoder=True)
        self._reads = _Reads(int(config.max_position_embeddings), int(config.vocab_size))

    @contextmanager
    def open(self, params: SamplingParams, checkpoint: Callable[[], None]) -> Iterator[DraftRow]:
        own = params if params.seed is None else replace(params, seed=params.seed ^ _OTHER_SEED)
        sampler = make_sampler(own, self._vocab_size, self._device)
        yield _Row(RewindableState(self._model), sampler, self._reads, checkpoint=checkpoint)

    def close(self) -> None:
        self._model.to("meta")


class _Reads(NamedTuple):
    """What a drafter can read: so many tokens, and ids below `vocab_size` (models may have ids that stand for
    no word). After anything else it drafts nothing."""

    context: int
    vocab_size: int


class _Row(DraftRow):
    """See AutoregressiveDrafter."""

    def __init__(
        self,
        state: RewindableState,
        sampler: Sampler,
        reads: _Reads,
        *,
        checkpoint: Callable[[], None],
    ) -> None:
        self._state, self._sampler = state, sampler
        self._reads, self._checkpoint = reads, checkpoint

    def draft(self, history: Sequence[int], count: int) -> Draft:
        count, new = min(count, self._reads.context - len(history)), history[self._state.length :]
        if count < 1 or max(new) >= self._reads.vocab_size:
            return Draft(())
        logits = self._read(new)
        self._state.mark()
        tokens: list[int] = []
        proposals: list[torch.Tensor] = []
        while True:
            self._checkpoint()
            token, probabilities = _choose(self._sampler, logits, [*history, *tokens])
            tokens.append(token)
            proposals.append(probabilities)
            if len(tokens) == count:
                break
            logits = self._read([token])
        if count > 1:
            self._state.rewind(0)
        return self._draft(tokens, torch.stack(proposals))

    def _draft(self, tokens: list[int], proposals: torch.Tensor) -> Draft:
        """`proposals` `[tokens, vocab]`: the probabilities of each token's words."""
        chosen = torch.tensor(tokens, device=proposals.device)
        confidences = tuple(proposals.gather(1, chosen[:, None])[:, 0].tolist())
        return Draft(tuple(tokens), None if self._sampler.is_greedy else proposals, confidences)

    def _read(self, ids: Sequence[int]) -> torch.Tensor:
        """Logits `[vocab]` after `ids`, for the words that both models have."""
        logits = self._state.extend(torch.tensor(list(ids), device=self._sampler.device))
        missing = self._sampler.vocab_size - len(logits)
        if missing > 0:
            return F.pad(logits, (0, missing), value=torch.finfo(logits.dtype).min)
        return logits[: self._sampler.vocab_size]


def _choose(sampler: Sampler, logits: torch.Tensor, history: Sequence[int]) -> tuple[int, torch.Tensor]:
    """The next token of a draft, and the probabilities `[vocab]` of what could have been."""
    if sampler.is_greedy:
        return sampler.sample(logits, history), torch.softmax(logits, dim=-1)
    probabilities = sampler.probabilities(logits, history)
    return sampler.draw(probabilities), probabilities
