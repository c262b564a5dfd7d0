"""The contract of a drafter."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

    from hetero_runtime.generation import SamplingParams


class Draft(NamedTuple):
    """Tokens that may come next, the nearest first; none where the drafter has no idea."""

    token_ids: tuple[int, ...]
    probabilities: torch.Tensor | None = None
    """`[tokens, vocab]` float32: what each token was drawn from, given those before it. None: each token was
    certain to be drawn."""
    confidences: tuple[float, ...] | None = None
    """How likely the drafter held each token to be, given those before it. None: it cannot say."""


class DraftRow(ABC):
    """Drafts for one text. One thread at a time."""

    @abstractmethod
    def draft(self, history: Sequence[int], count: int) -> Draft:
        """At most `count` tokens to follow `history`, which is all of the text so far and has only grown
        since the last call."""

    def listening(self) -> AbstractContextManager[None]:
        """Around each pass of the model over this text: its prompt, then every check. `keep` comes next."""
        return nullcontext()

    def keep(self, count: int) -> None:  # noqa: B027 (most drafters do not listen)
        """Of the tokens of the last pass only the first `count` belong to the text."""


class Drafter(ABC):
    """Serves any number of texts."""

    @abstractmethod
    def open(
        self, params: SamplingParams, checkpoint: Callable[[], None]
    ) -> AbstractContextManager[DraftRow]:
        """Drafts for a text that is sampled by `params`, until the context is left. `checkpoint` raises when
        the text is no longer wanted; long work calls it."""

    def close(self) -> None:  # noqa: B027 (most hold nothing)
        """Give memory back. No draft may follow."""
