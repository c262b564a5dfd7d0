"""Texts and their drafts by a block drafter.

    pass      model reads  a b c        heard: features of a b c
    keep 2    the text is  a b          theirs become keys and values with the next draft; those of c are gone
    draft     x ? ? ?                   x: the last token, which the model has not read
    check     model reads  x y z        heard, kept, and so on

A draft ends where it is more likely wrong than worth its pass. Where it ends is decided by how sure the
network is at each place, before a token is drawn there, so that sampled texts keep their distribution.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from hetero_runtime.generation import SamplingParams
from hetero_runtime.generation.sampling import Sampler
from hetero_runtime.hf.hidden_states import Heard, HiddenStates
from hetero_runtime.speculation.base import Draft, Drafter, DraftRow
from hetero_runtime.speculation.block.network import BlockNetwork, KeysValues
from hetero_runtime.speculation.drawn import DrawnDraft, sampler_of_drafts

LEAST_CHANCE = 0.3
"""Of a token to be reached and right, as the network sees it. A token less likely costs more copies and
computation in the check than it saves."""


class Target(NamedTuple):
    """The model that drafts are for: what its layers put out, and its words."""

    hidden_states: HiddenStates
    embedding: Any
    head: Any
    vocab_size: int


class BlockDrafter(Drafter):
    """`network` on `device`, made for `target`."""

    def __init__(self, network: BlockNetwork, target: Target, *, device: torch.device) -> None:
        self._network, self._target, self._device = network, target, device

    @contextmanager
    def open(self, params: SamplingParams, checkpoint: Callable[[], None]) -> Iterator[DraftRow]:
        sampler = sampler_of_drafts(params, self._target.vocab_size, self._device)
        yield _Row(self._network, self._target, sampler)

    def close(self) -> None:
        self._network.to("meta")


class _Row(DraftRow):
    """`_context`: of all tokens that the model has read but those whose features are in `_unread`."""

    def __init__(self, network: BlockNetwork, target: Target, sampler: Sampler) -> None:
        self._network, self._target, self._sampler = network, target, sampler
        self._context: list[KeysValues] = []
        self._unread: list[torch.Tensor] = []
        self._heard = Heard()

    @contextmanager
    def listening(self) -> Iterator[None]:
        with self._target.hidden_states.listening() as heard:
            yield
        self._heard = heard

    def keep(self, count: int) -> None:
        self._unread.append(self._heard.side_by_side()[0, :count])
        self._heard = Heard()

    @torch.inference_mode()
    def draft(self, history: Sequence[int], count: int) -> Draft:
        shape = self._network.shape
        count = min(count, shape.block - 1, shape.context - len(history))
        if count < 1:
            return Draft(())
        self._read()
        logits = self._say(history)[:count].float()
        chances = torch.softmax(logits, dim=-1).amax(dim=-1).cumprod(0)
        logits = logits[: int((chances >= LEAST_CHANCE).sum())]
        return self._choose(logits, history)

    def _read(self) -> None:
        """Make keys and values of what was kept since the last draft."""
        features = torch.cat(self._unread)[None].to(self._network.fc.weight.dtype)
        self._unread = []
        if not self._context:
            self._context = self._network.read(features)
            return
        known = self._context[0].keys.shape[2]
        self._context = [
            KeysValues(torch.cat([old.keys, new.keys], dim=2), torch.cat([old.values, new.values], dim=2))
            for old, new in zip(self._context, self._network.read(features, first=known), strict=True)
        ]

    def _say(self, history: Sequence[int]) -> torch.Tensor:
        """Logits `[block - 1, vocab]` of the tokens after `history`."""
        shape, known = self._network.shape, self._context[0].keys.shape[2]
        assert known == len(history) - 1, f"{known} tokens were heard of {len(history)}, the last one unread"
        device = self._sampler.device
        ids = torch.full((shape.block,), shape.mask_token, device=device)
        ids[0] = history[-1]
        embedded = self._target.embedding(ids)[None, None].to(self._network.fc.weight.dtype)
        hidden = self._network(embedded, torch.full((1, 1), known, device=device), self._context)
        logits: torch.Tensor = self._target.head(hidden[0, 0, 1:])
        return logits

    def _choose(self, logits: torch.Tensor, history: Sequence[int]) -> Draft:
        """A token for each row of `logits` `[n, vocab]`."""
        if not len(logits):
            return Draft(())
        if self._sampler.takes_likeliest:
            chances, tokens = torch.softmax(logits, dim=-1).max(dim=-1)
            return Draft(tuple(tokens.tolist()), None, tuple(chances.tolist()))
        drawn = DrawnDraft(self._sampler, history)
        for row in logits:
            drawn.add(row)
        return drawn.draft()
