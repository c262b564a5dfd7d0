"""A drafter that is asked only where the text does not already say what comes.

A network drafts where the text is new and is poor at copying; a text that goes on as it went before says for
nothing, and surely, what follows. So the text itself is asked first. Where the network does not earn what its
draft costs, it rests: one pass, then two, four, up to 32, until it earns it again, so that text which nobody
foresees costs little more than plain decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from hetero_runtime.generation import SamplingParams
from hetero_runtime.speculation.base import Draft, Drafter, DraftRow
from hetero_runtime.speculation.prompt_lookup import PromptLookup

SURE = 4
"""Tokens of a repetition that are believed: so many before it were alike."""
LONGEST_REST = 32
WORTH = 2
"""Tokens of a draft that must be kept: it takes half a decode step, and its pass reads more experts."""


class RepeatsFirst(Drafter):
    """`other`: who is asked where the text does not repeat itself."""

    def __init__(self, other: Drafter) -> None:
        self._repeats, self.other = PromptLookup(), other

    @contextmanager
    def open(self, params: SamplingParams, checkpoint: Callable[[], None]) -> Iterator[DraftRow]:
        with self._repeats.open(params, checkpoint) as repeats, self.other.open(params, checkpoint) as other:
            yield _Row(repeats, other)

    def close(self) -> None:
        self.other.close()


class _Row(DraftRow):
    """See the module docstring. `_rest`: passes for which `other` is not asked; `_was_asked`: in this one."""

    def __init__(self, repeats: DraftRow, other: DraftRow) -> None:
        self._repeats, self._other = repeats, other
        self._rest, self._next_rest = 0, 1
        self._was_asked = False

    def listening(self) -> AbstractContextManager[None]:
        return self._other.listening()

    def keep(self, count: int) -> None:
        self._other.keep(count)
        if not self._was_asked:
            return
        self._was_asked = False
        if count > WORTH:  # the first token of a pass is no draft's
            self._next_rest = 1
        else:
            self._rest, self._next_rest = self._next_rest, min(2 * self._next_rest, LONGEST_REST)

    def draft(self, history: Sequence[int], count: int) -> Draft:
        repeated = self._repeats.draft(history, count)
        if len(repeated.token_ids) >= min(SURE, count):
            return repeated
        if self._rest:
            self._rest -= 1
            return repeated
        drafted = self._other.draft(history, count)
        self._was_asked = True
        return drafted if len(drafted.token_ids) >= len(repeated.token_ids) else repeated
