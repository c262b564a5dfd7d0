"""A model that is a table, and drafters that know nothing or too much."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from hetero_runtime.generation import Request, SamplingParams
from hetero_runtime.orchestrator import Phase
from hetero_runtime.speculation import CheckedText, Draft, Drafter, DraftRow
from hetero_runtime.stats import DraftStats
from hetero_runtime.stepping.speculative import DraftedText, SpeculativeTokens
from hetero_runtime.stepping.usual import UsualSteps
from tests.runtime.stepping.idle import IdleOrchestrator


class TableSequence:
    """Its logits are those of the last token in `table` `[vocab, vocab]`; it holds `ids`."""

    def __init__(self, table: torch.Tensor) -> None:
        self._table = table
        self.ids: list[int] = []
        self._marked = 0

    def extend(self, ids: torch.Tensor, images: dict[str, torch.Tensor] | None = None) -> torch.Tensor:
        return self.extend_all(ids)[-1]

    def extend_all(self, ids: torch.Tensor) -> torch.Tensor:
        self.ids += ids.tolist()
        return self._table[ids]

    def mark(self) -> None:
        self._marked = len(self.ids)

    def rewind(self, num_kept: int) -> None:
        del self.ids[self._marked + num_kept :]


class GuessingRow(DraftRow):
    """Guesses tokens drawn from `weights` `[vocab]`, whatever the text says; where `is_certain`, always the
    likeliest one."""

    def __init__(self, weights: torch.Tensor, *, is_certain: bool, seed: int) -> None:
        self._weights, self._is_certain = weights / weights.sum(), is_certain
        self._generator = torch.Generator().manual_seed(seed)

    def draft(self, history: Sequence[int], count: int) -> Draft:
        if self._is_certain:
            return Draft((int(self._weights.argmax()),) * count)
        if count == 0:
            return Draft(())
        drawn = torch.multinomial(self._weights, count, replacement=True, generator=self._generator)
        return Draft(tuple(drawn.tolist()), self._weights.expand(count, -1))


class OracleRow(DraftRow):
    """Knows the answer, and errs at every `every`-th token of it."""

    def __init__(self, prompt_length: int, answer: Sequence[int], *, every: int) -> None:
        self._prompt_length, self._answer, self._every = prompt_length, answer, every

    def draft(self, history: Sequence[int], count: int) -> Draft:
        begin = len(history) - self._prompt_length
        ahead = list(enumerate(self._answer))[begin : begin + count]
        return Draft(tuple(token ^ 1 if i % self._every == 0 else token for i, token in ahead))


class OneRow(Drafter):
    """The same `row` for whoever asks."""

    def __init__(self, row: DraftRow) -> None:
        self._row = row

    @contextmanager
    def open(self, params: SamplingParams, checkpoint: Callable[[], None]) -> Iterator[DraftRow]:
        yield self._row


class ImaginedPasses:
    """Passes around nothing; `stats` adds up drafts."""

    def __init__(self) -> None:
        self.device, self.stats = torch.device("cpu"), SimpleNamespace(drafted=self._drafted)
        self.drafts = DraftStats()

    @contextmanager
    def one(self, phase: Phase, *, num_tokens: int, checkpoint: Callable[[], None]) -> Iterator[None]:
        checkpoint()
        yield

    def _drafted(self, num_tokens: int, *, accepted: int, seconds: float) -> None:
        old = self.drafts
        self.drafts = DraftStats(old.passes + 1, old.drafted + num_tokens, old.accepted + accepted)


def speculate(
    table: torch.Tensor, drafts: DraftRow, *, k: int, prompt: tuple[int, ...] = (0,), **params: Any
) -> tuple[list[int], TableSequence, DraftStats]:
    """All `max_tokens` of an answer to `prompt`, what the sequence then holds, and what drafts brought."""
    sequence: Any = TableSequence(table)
    passes: Any = ImaginedPasses()
    request = Request(prompt, SamplingParams(**params))
    text, clock = DraftedText(CheckedText(sequence), drafts, k), UsualSteps(IdleOrchestrator())
    tokens = SpeculativeTokens(text, passes, request, lambda: None, clock=clock)
    answer = [tokens.first({})]
    while len(answer) < request.params.max_tokens:
        answer.append(tokens.next())
    return answer, sequence, passes.drafts
