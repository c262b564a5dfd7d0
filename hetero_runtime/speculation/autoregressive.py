"""Drafts from a small model with the same tokenizer, token by token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from hetero_runtime.generation import SamplingParams
from hetero_runtime.generation.sampling import Sampler
from hetero_runtime.hf.rewind import RewindableState
from hetero_runtime.speculation.base import Draft, Drafter, DraftRow
from hetero_runtime.speculation.drawn import DrawnDraft, sampler_of_drafts


class AutoregressiveDrafter(Drafter):
    """`model`: any causal model of transformers, on `device`. `vocab_size`: logits of the model it drafts
    for."""

    def __init__(self, model: Any, *, vocab_size: int, device: torch.device) -> None:
        self._model, self._vocab_size, self._device = model, vocab_size, device
        config = model.config.get_text_config(decoder=True)
        self._reads = _Reads(int(config.max_position_embeddings), int(config.vocab_size))

    @contextmanager
    def open(self, params: SamplingParams, checkpoint: Callable[[], None]) -> Iterator[DraftRow]:
        sampler = sampler_of_drafts(params, self._vocab_size, self._device)
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
        logits, drawn = self._read(new), DrawnDraft(self._sampler, history)
        self._state.mark()
        while True:
            self._checkpoint()
            token = drawn.add(logits)
            if len(drawn) == count:
                break
            logits = self._read([token])
        if count > 1:
            self._state.rewind(0)
        return drawn.draft()

    def _read(self, ids: Sequence[int]) -> torch.Tensor:
        """Logits `[vocab]` after `ids`, for the words that both models have."""
        logits = self._state.extend(torch.tensor(list(ids), device=self._sampler.device))
        missing = self._sampler.vocab_size - len(logits)
        if missing > 0:
            return F.pad(logits, (0, missing), value=torch.finfo(logits.dtype).min)
        return logits[: self._sampler.vocab_size]
