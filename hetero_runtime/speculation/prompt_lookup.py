"""Drafts from the text itself: what followed its last few tokens when they came before.

    ... the old red barn by the sea ... the old red  ->  barn by the

Good where a text repeats itself or its prompt: code under edit, quotes, tables, summaries. It costs nothing
but the experts of tokens that turn out wrong, so a draft is no longer than what was alike before it: two
tokens are little to go by, and while a text goes on repeating, drafts double.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from hetero_runtime.generation import SamplingParams
from hetero_runtime.speculation.base import Draft, Drafter, DraftRow

LONGEST, SHORTEST = 4, 2
"""Tokens by which a place is found, the longest run first. One alone says too little."""


class PromptLookup(Drafter):
    """See the module docstring."""

    @contextmanager
    def open(self, params: SamplingParams, checkpoint: Callable[[], None]) -> Iterator[DraftRow]:
        yield _Row()


class _Row(DraftRow):
    """`_ends`: where each run of tokens ended when it was last seen, as the position after it."""

    def __init__(self) -> None:
        self._ends: dict[tuple[int, ...], int] = {}
        self._num_indexed = 0

    def draft(self, history: Sequence[int], count: int) -> Draft:
        self._index(history)
        for size in range(min(LONGEST, len(history)), SHORTEST - 1, -1):
            end = self._ends.get(tuple(history[len(history) - size :]))
            if end is not None:
                return Draft(_continuation(history, end, min(count, _num_alike(history, end, count))))
        return Draft(())

    def _index(self, history: Sequence[int]) -> None:
        """Know all runs that end before the last token; what is latest wins."""
        for end in range(self._num_indexed + 1, len(history)):
            for size in range(SHORTEST, min(LONGEST, end) + 1):
                self._ends[tuple(history[end - size : end])] = end
        self._num_indexed = max(self._num_indexed, len(history) - 1)


def _num_alike(history: Sequence[int], end: int, most: int) -> int:
    """How many tokens before `end` are the last ones of the text, in order; no more than `most`."""
    for count in range(min(most, end)):
        if history[end - 1 - count] != history[-1 - count]:
            return count
    return min(most, end)


def _continuation(history: Sequence[int], start: int, count: int) -> tuple[int, ...]:
    """`count` tokens from `start` on; past the end of the text it goes on with what it has just said."""
    period = len(history) - start
    return tuple(history[start + i % period] for i in range(count))
