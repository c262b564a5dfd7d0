"""One pass a draft: the model reads what was drafted at once, and keeps what it would have said itself.

history  a b c            the sequence has read a b; c is the last token and has not been read
draft    d e              by the drafter, from a b c
pass     c d e            logits of all three
kept     c d              where the model says d, then x: d and x are committed, e is forgotten
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from hetero_runtime.generation import Request
from hetero_runtime.hf.rewind import RewindableSequences, RewindableState
from hetero_runtime.orchestrator import Phase
from hetero_runtime.passes import Checkpoint, Passes
from hetero_runtime.speculation import DraftRow, Speculation
from hetero_runtime.speculation.acceptance import committed
from hetero_runtime.stepping.base import Stepper, Tokens
from hetero_runtime.stepping.eager import EagerTokens


class SpeculativeStepper(Stepper):
    """Requests take turns, a draft and its pass each."""

    def __init__(self, sequences: RewindableSequences, passes: Passes, speculation: Speculation) -> None:
        self._sequences, self._passes, self._speculation = sequences, passes, speculation

    @contextmanager
    def open(self, request: Request, checkpoint: Checkpoint) -> Iterator[Tokens]:
        drafter, k = self._speculation
        with self._sequences.open() as sequence, drafter.open(request.params, checkpoint) as drafts:
            yield SpeculativeTokens(DraftedText(sequence, drafts, k), self._passes, request, checkpoint)


class DraftedText(NamedTuple):
    """One text in the model, and who drafts at most `k` tokens of it at a time."""

    sequence: RewindableState
    drafts: DraftRow
    k: int


class SpeculativeTokens(EagerTokens):
    """Committed tokens wait here; a pass runs only when a token after them is asked for."""

    def __init__(self, text: DraftedText, passes: Passes, request: Request, checkpoint: Checkpoint) -> None:
        super().__init__(text.sequence, passes, request, checkpoint)
        self._text = text
        self._ready: deque[int] = deque()

    def next(self) -> int:
        if not self._ready:
            self._step()
        return self._ready.popleft()

    def _step(self) -> None:
        """Draft, check, commit. Drafting belongs to the time of the pass."""
        sequence, history = self._text.sequence, self._history
        num_generated = len(history) - len(self._request.prompt_ids)
        most = min(self._text.k, self._request.params.max_tokens - num_generated - 1)
        with self._passes.one(Phase.DECODE, num_tokens=1, checkpoint=self._checkpoint):
            began_s = time.perf_counter()
            draft = self._text.drafts.draft(history, most)
            draft_s = time.perf_counter() - began_s
            sequence.mark()
            ids = torch.tensor([history[-1], *draft.token_ids], device=self._passes.device)
            tokens = committed(sequence.extend_all(ids), draft, self._sampler, history=history)
            sequence.rewind(len(tokens))
            self._passes.stats.drafted(len(draft.token_ids), accepted=len(tokens) - 1, seconds=draft_s)
        history += tokens
        self._ready.extend(tokens)
