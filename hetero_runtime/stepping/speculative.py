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
from hetero_runtime.orchestrator import Phase
from hetero_runtime.passes import Checkpoint, Passes
from hetero_runtime.profiling import span
from hetero_runtime.speculation import CheckedSequences, CheckedText, Draft, DraftRow, Speculation
from hetero_runtime.speculation.acceptance import committed
from hetero_runtime.stepping.base import Stepper, Tokens
from hetero_runtime.stepping.eager import EagerTokens
from hetero_runtime.stepping.usual import UsualSteps


class SpeculativeStepper(Stepper):
    """Requests take turns, a draft and its pass each."""

    def __init__(self, sequences: CheckedSequences, passes: Passes, speculation: Speculation) -> None:
        self._sequences, self._passes = sequences, passes
        self._drafter, self._k = speculation.drafter, speculation.k
        self._clock = UsualSteps(passes.orchestrator)

    @contextmanager
    def open(self, request: Request, checkpoint: Checkpoint) -> Iterator[Tokens]:
        with (
            self._sequences.open() as sequence,
            self._drafter.open(request.params, checkpoint) as drafts,
        ):
            text = DraftedText(sequence, drafts, self._k)
            yield SpeculativeTokens(text, self._passes, request, checkpoint, clock=self._clock)


class DraftedText(NamedTuple):
    """One text in the model, and who drafts at most `k` tokens of it at a time and hears how it is read."""

    sequence: CheckedText
    drafts: DraftRow
    k: int

    def extend(self, ids: torch.Tensor, images: dict[str, torch.Tensor] | None = None) -> torch.Tensor:
        """As for `hf.forward.Sequence`."""
        with self.drafts.listening():
            logits = self.sequence.extend(ids, images)
        self.drafts.keep(len(ids))
        return logits

    def check(self, last: int, draft: Draft, device: torch.device) -> torch.Tensor:
        """As for CheckedText."""
        with self.drafts.listening():
            return self.sequence.check(last, draft, device)

    def keep(self, count: int) -> None:
        """As for CheckedText."""
        self.sequence.keep(count)
        self.drafts.keep(count)


class SpeculativeTokens(EagerTokens):
    """Committed tokens wait here; a pass runs only when a token after them is asked for."""

    def __init__(
        self,
        text: DraftedText,
        passes: Passes,
        request: Request,
        checkpoint: Checkpoint,
        *,
        clock: UsualSteps,
    ) -> None:
        super().__init__(text, passes, request, checkpoint)
        self._text, self._clock = text, clock
        self._ready: deque[int] = deque()

    def next(self) -> int:
        if not self._ready:
            self._step()
        return self._ready.popleft()

    def _step(self) -> None:
        """Draft, check, commit. Drafting belongs to the time of the pass."""
        text, history = self._text, self._history
        num_generated = len(history) - len(self._request.prompt_ids)
        most = min(text.k, self._request.params.max_tokens - num_generated - 1)
        with self._passes.one(Phase.DECODE, num_tokens=1, checkpoint=self._checkpoint):
            began_s = time.perf_counter()
            with span("draft"):
                draft = text.drafts.draft(history, most)
            drafted_s = time.perf_counter()
            draft_s = drafted_s - began_s
            logits = text.check(history[-1], draft, self._passes.device)
            tokens = committed(logits, draft, self._sampler, history=history)  # waits for the device
            num_read = len(draft.token_ids) + 1
            self._clock.observe(1, time.perf_counter() - drafted_s, tokens_a_step=num_read)
            text.keep(len(tokens))
            self._passes.stats.drafted(len(draft.token_ids), accepted=len(tokens) - 1, seconds=draft_s)
        history += tokens
        self._ready.extend(tokens)
