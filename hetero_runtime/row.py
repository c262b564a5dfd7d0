"""One request being served: its KV cache, its sampler, its text.

place ─► prefill ─► sample ─► text ─► (delta out) ─► extend ─► sample ─► ...
                      ▲                                │
                      └────────────────────────────────┘
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from threading import Semaphore
from typing import NamedTuple

import torch

from hetero_runtime.generation import (
    CancelToken,
    Completion,
    Delta,
    FinishReason,
    Request,
    TextStream,
    Timings,
    make_sampler,
)
from hetero_runtime.hf.forward import Sequence, Sequences
from hetero_runtime.no_room import no_room_for
from hetero_runtime.orchestrator import Orchestrator, Phase
from hetero_runtime.stats import StatsRecorder
from hetero_runtime.turns import Turns

PLACE_POLL_S = 0.02
"""How often a request that waits for a place looks whether it is still wanted."""


_NO_ROOM_FIX = "lower memory.slabs, execution.max_rows or execution.max_length, or shorten the prompt"


class InterruptedPassError(Exception):
    """Inside a pass: the request is no longer wanted. Never leaves this module's generator."""

    def __init__(self, reason: FinishReason) -> None:
        self.reason: FinishReason = reason


class Shared(NamedTuple):
    """What all rows of an engine use. Whoever runs a pass holds the turn."""

    sequences: Sequences
    device: torch.device
    orchestrator: Orchestrator
    turns: Turns
    places: Semaphore
    stats: StatsRecorder
    closing: CancelToken


class Row:
    """Serves `request`; `deltas` may be iterated once."""

    def __init__(
        self, shared: Shared, request: Request, *, text: TextStream, images: dict[str, torch.Tensor] | None
    ) -> None:
        self._shared, self._text, self._images = shared, text, images
        self.request = request
        self._started_s = time.monotonic()
        self._first_token_s: float | None = None
        self._finished_s: float | None = None

    def deltas(self) -> Generator[Delta, None, None]:
        """The answer, token by token; the last delta has a finish reason."""
        try:
            with self._place():
                yield from self._generate()
        except InterruptedPassError as interruption:
            self._finished_s = time.monotonic()
            yield self._text.finish(interruption.reason)

    def cancel(self) -> None:
        """Ask for the end, from any thread; `deltas` then ends with finish reason `cancelled`."""
        self.request.cancel.cancel()

    def completion(self) -> Completion:
        """The whole answer, once `deltas` has ended."""
        assert self._text.finish_reason is not None, "the answer is not finished"
        finished_s = self._finished_s or time.monotonic()
        return Completion(
            text=self._text.text,
            token_ids=tuple(self._text.token_ids),
            finish_reason=self._text.finish_reason,
            prompt_tokens=len(self.request.prompt_ids),
            timings=Timings.between(
                self._started_s,
                self._first_token_s or finished_s,
                finished_s,
                num_tokens=len(self._text.token_ids),
            ),
        )

    def _generate(self) -> Iterator[Delta]:
        with self._shared.sequences.open() as state:
            yield from self._generate_in(state)

    def _generate_in(self, state: Sequence) -> Iterator[Delta]:
        prompt = self.request.prompt_ids
        logits = self._extend(state, Phase.PREFILL, prompt, self._images)
        sampler = make_sampler(self.request.params, logits.shape[-1], self._shared.device)
        history = list(prompt)
        while True:
            token = sampler.sample(logits, history)
            self._first_token_s = self._first_token_s or time.monotonic()
            self._finished_s = time.monotonic()
            history.append(token)
            delta = self._text.push(token)
            yield delta
            if delta.finish_reason is not None:
                return
            logits = self._extend(state, Phase.DECODE, (token,))

    def _extend(
        self,
        state: Sequence,
        phase: Phase,
        ids: tuple[int, ...],
        images: dict[str, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """One pass of the model, in turn with the other rows. Returns logits `[vocab]`."""
        shared = self._shared
        inputs = {name: tensor.to(shared.device) for name, tensor in (images or {}).items()}
        with (
            shared.turns.take(),
            shared.stats.pass_(phase, num_tokens=len(ids)),
            shared.orchestrator.pass_(phase, checkpoint=self._go_on_or_raise),
            no_room_for(f"a pass over {len(ids)} tokens", shared.device, fix=_NO_ROOM_FIX),
        ):
            self._go_on_or_raise()
            return state.extend(torch.tensor(ids, device=shared.device), inputs)

    @contextmanager
    def _place(self) -> Iterator[None]:
        while not self._shared.places.acquire(timeout=PLACE_POLL_S):
            self._go_on_or_raise()
        try:
            with self._shared.stats.request():
                yield
        finally:
            self._shared.places.release()

    def _go_on_or_raise(self) -> None:
        if self._shared.closing.is_cancelled:
            raise InterruptedPassError("cancelled")
        reason = self.request.interruption()
        if reason is not None:
            raise InterruptedPassError(reason)
