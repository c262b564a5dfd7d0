"""How far a recording is, and who wants to know."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from hetero_runtime.generation import CancelToken

if TYPE_CHECKING:
    from hetero_runtime.experts.store import Progress


class TraceProgress(NamedTuple):
    """Documents of earlier runs count as done; tokens and speed are this run's alone."""

    documents: int
    num_documents: int
    tokens: int
    """Generated, or listened to when teacher-forced."""
    tok_s: float
    left_s: float | None
    """None before the first document is done."""


@dataclass(frozen=True)
class Watch:
    """Who looks on."""

    loading: Callable[[], AbstractContextManager[Progress | None]] = nullcontext
    """Entered while the model is loaded; gives what is told how many bytes of the experts are read."""
    recording: Callable[[TraceProgress], None] | None = None
    """Called after loading, then after every generated token and every document."""
    cancel: CancelToken = field(default_factory=CancelToken)
    """Ends the recording from any thread."""


class Meter:
    """Counts, and tells `recording`."""

    def __init__(
        self, recording: Callable[[TraceProgress], None] | None, *, num_documents: int, num_missing: int
    ) -> None:
        self._recording = recording
        self._num_documents, self._num_missing = num_documents, num_missing
        self._num_done, self._num_tokens = 0, 0
        self._started_s = time.monotonic()
        self._tell()

    @property
    def num_kept(self) -> int:
        """Documents that are done, by this run or an earlier one."""
        return self._num_documents - self._num_missing + self._num_done

    def add_tokens(self, count: int) -> None:
        """`count` more tokens went through the model."""
        self._num_tokens += count
        self._tell()

    def add_document(self) -> None:
        """One more document is done."""
        self._num_done += 1
        self._tell()

    def _tell(self) -> None:
        if self._recording is None:
            return
        seconds = time.monotonic() - self._started_s
        num_left = self._num_missing - self._num_done
        self._recording(
            TraceProgress(
                documents=self.num_kept,
                num_documents=self._num_documents,
                tokens=self._num_tokens,
                tok_s=self._num_tokens / seconds if seconds else 0.0,
                left_s=seconds / self._num_done * num_left if self._num_done else None,
            )
        )
