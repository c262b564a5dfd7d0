"""One request being served: its place, its tokens, its text.

place ─► first token ─► text ─► (delta out) ─► next token ─► text ─► ...
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
)
from hetero_runtime.stats import StatsRecorder
from hetero_runtime.stepping import Stepper

PLACE_POLL_S = 0.02
"""How often a request that waits for a place looks whether it is still wanted."""


class InterruptedPassError(Exception):
    """Inside a pass: the request is no longer wanted. Never leaves this module's generator."""

    def __init__(self, reason: FinishReason) -> None:
        self.reason: FinishReason = reason


class Shared(NamedTuple):
    """What all rows of an engine use."""

    stepper: Stepper
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
        with self._shared.stepper.open(self.request, self._go_on_or_raise) as tokens:
            token = tokens.first(self._images or {})
            while True:
                self._first_token_s = self._first_token_s or time.monotonic()
                self._finished_s = time.monotonic()
                delta = self._text.push(token)
                yield delta
                if delta.finish_reason is not None:
                    return
                token = tokens.next()

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
