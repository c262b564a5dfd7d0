"""When a generation ends: end-of-sequence tokens, the token limit, stop strings.

A stop string may spread over several tokens. Text that could still grow into one is held back, so
that a stream never shows half of it:

    stop = "END"     text so far "The EN"   emitted "The "   held "EN"
                     next token  "D"        emitted ""       stopped
                     or          "T"        emitted "ENT"    held ""
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from hetero_runtime.generation.base import FinishReason
from hetero_runtime.generation.params import SamplingParams


class Emission(NamedTuple):
    """What one piece of text lets through."""

    text: str
    """Text that is certain to belong to the result."""
    is_stopped: bool
    """A stop string is complete: `text` ends before it, and nothing may follow."""


class StopChecker:
    """Decides the end of one request. Feed it each token, then the token's text.

    The result does not depend on how the text is cut into tokens: the stop string that is complete
    first wins, and of those that end together, the longest.
    """

    def __init__(
        self, params: SamplingParams, eos_token_ids: Collection[int], *, stop_token_ids: Collection[int] = ()
    ) -> None:
        """`stop_token_ids` end the generation even when `ignore_eos` is set."""
        eos = () if params.ignore_eos else eos_token_ids
        self._last_tokens = frozenset(eos) | frozenset(stop_token_ids)
        self._max_tokens = params.max_tokens
        self._stop = params.stop
        self._num_tokens = 0
        self._held = ""

    def is_last_token(self, token_id: int) -> bool:
        """Whether this token ends the text and has no text of its own."""
        return token_id in self._last_tokens

    def check_token(self, token_id: int) -> FinishReason | None:
        """Count one generated token; the reason to end with it, if any."""
        self._num_tokens += 1
        if self.is_last_token(token_id):
            return "stop"
        return "length" if self._num_tokens >= self._max_tokens else None

    def feed(self, text: str) -> Emission:
        """Take more text, give what is safe to show; the rest is held until it is decided."""
        text = self._held + text
        cut = _first_stop(text, self._stop)
        if cut is not None:
            self._held = ""
            return Emission(text[:cut], is_stopped=True)
        num_held = _num_undecided(text, self._stop)
        self._held = text[len(text) - num_held :]
        return Emission(text[: len(text) - num_held], is_stopped=False)

    def release(self) -> str:
        """Give the held text: the generation is over, so it can no longer become a stop string."""
        text, self._held = self._held, ""
        return text


def _first_stop(text: str, stop: tuple[str, ...]) -> int | None:
    """Where the stop string that is complete first begins, or None."""
    found = [(start + len(s), start) for s in stop if (start := text.find(s)) >= 0]
    return min(found)[1] if found else None


def _num_undecided(text: str, stop: tuple[str, ...]) -> int:
    """Length of the longest end of `text` with which some stop string begins."""
    longest = min(len(text), max((len(s) - 1 for s in stop), default=0))
    return next((n for n in range(longest, 0, -1) if any(s.startswith(text[-n:]) for s in stop)), 0)
