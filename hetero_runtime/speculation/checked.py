"""A text of the model, as far as drafts are checked in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hetero_runtime.hf.rewind import GoesBack, TextsGoingBack
from hetero_runtime.speculation.base import Draft


class CheckedText:
    """`state` holds all of the text but its last token. `extend` of a prompt, then `check` and `keep` by
    turns."""

    def __init__(self, state: GoesBack) -> None:
        self._state = state

    def extend(self, ids: torch.Tensor, images: dict[str, torch.Tensor] | None = None) -> torch.Tensor:
        """As for `hf.forward.Sequence`."""
        return self._state.extend(ids, images)

    def check(self, last: int, draft: Draft, device: torch.device) -> torch.Tensor:
        """Read the `last` token and all drafted ones. Logits of each, `[len(draft) + 1, vocab]` float32."""
        self._state.mark()
        return self._state.extend_all(torch.tensor([last, *draft.token_ids], device=device))

    def keep(self, count: int) -> None:
        """Of the tokens just read only the first `count` belong to the text. It may take a pass over them."""
        self._state.rewind(count)


class CheckedSequences:
    """Where such texts come from."""

    def __init__(self, sequences: TextsGoingBack) -> None:
        self._sequences = sequences

    @contextmanager
    def open(self) -> Iterator[CheckedText]:
        """A new, empty text, until the context is left."""
        with self._sequences.open() as state:
            yield CheckedText(state)

    def close(self) -> None:
        """Free what all texts share."""
        self._sequences.close()
