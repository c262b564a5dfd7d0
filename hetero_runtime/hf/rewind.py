"""Going back: texts inside a model that forget the tokens after a mark.

Attention keeps something of each token, which can be cut off again. A sliding window drops old tokens as
new ones come, so what was there at the mark is needed too. A recurrent state is of all tokens at once: what
was there at the mark is put back, and the tokens that stay run once more.

    mark        a b c |                     nothing is copied but recurrent states
    extend      a b c | d e f g
    rewind(2)   a b c d e                   cut where every layer allows it, else back to c, and d e again
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from transformers import DynamicCache
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

from hetero_runtime.errors import CheckpointError
from hetero_runtime.hf.forward import SequenceState

_KNOWN = (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
)
"""Kinds of layer whose way back is known; their subclasses keep more and are not among them."""


def check_rewindable(cache: Any, name: str) -> None:
    """Raise CheckpointError unless texts of the model called `name`, which keeps `cache`, can go back."""
    unknown = sorted({type(layer).__name__ for layer in getattr(cache, "layers", ()) if not _is_known(layer)})
    if type(cache) is not DynamicCache or unknown:
        kept = ", ".join(unknown) or type(cache).__name__
        raise CheckpointError(
            f"{name} cannot take part in speculation: what it keeps of a text ({kept}) cannot go back to an "
            "earlier token; write speculation.drafter: none, or take another drafter"
        )


class GoesBack(Protocol):
    """A text that can go back to its last mark, once; see RewindableState."""

    def extend(self, ids: torch.Tensor, images: dict[str, torch.Tensor] | None = None) -> torch.Tensor: ...

    def extend_all(self, ids: torch.Tensor) -> torch.Tensor: ...

    def mark(self) -> None: ...

    def rewind(self, num_kept: int) -> None: ...


class TextsGoingBack(Protocol):
    """Where such texts come from."""

    def open(self) -> AbstractContextManager[GoesBack]:
        """A new, empty text, until the context is left."""

    def close(self) -> None:
        """Free what all texts share."""


class RewindableSequences:
    """As EagerSequences, of sequences that can go back."""

    def __init__(self, model: Any) -> None:
        """Raises CheckpointError for a model whose texts cannot go back."""
        config = model.config.get_text_config(decoder=True)
        check_rewindable(DynamicCache(config=config), str(config.model_type))
        self._model = model

    @contextmanager
    def open(self) -> Iterator[RewindableState]:
        """A new, empty sequence, until the context is left."""
        yield RewindableState(self._model)

    def close(self) -> None:
        """Nothing is shared."""


class RewindableState(SequenceState):
    """A sequence that can go back to its last mark, once."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self._before: list[dict[str, Any]] = []
        self._since: list[torch.Tensor] | None = None
        """What came after the mark; None without one."""

    @property
    def cache(self) -> Any:
        """transformers' own, once there is a token."""
        return self._kv

    def extend_all(self, ids: torch.Tensor) -> torch.Tensor:
        """Append `ids` `[n]` and return the logits of all of them, `[n, vocab]` float32."""
        self._note(ids)
        return self._run(ids, None, num_logits=len(ids))

    def extend(self, ids: torch.Tensor, images: dict[str, torch.Tensor] | None = None) -> torch.Tensor:
        self._note(ids)
        return super().extend(ids, images)

    def mark(self) -> None:
        """Remember this point. The sequence must not be empty."""
        self._before = [_state_of(layer) for layer in self._kv.layers]
        self._since = []

    @torch.inference_mode()
    def rewind(self, num_kept: int) -> None:
        """Forget all tokens since the mark but the first `num_kept`. It may take a pass over those."""
        assert self._since is not None, "there is no mark to go back to"
        since, self._since = torch.cat(self._since), None
        num_dropped = len(since) - num_kept
        assert num_dropped >= 0, f"{num_kept} tokens to keep of {len(since)}"
        if num_dropped == 0:
            return
        pairs = list(zip(self._kv.layers, self._before, strict=True))
        if num_kept and all(_can_cut(layer, len(since)) for layer in self._kv.layers):
            for layer, before in pairs:
                _cut(layer, before, num_new=len(since), num_kept=num_kept)
            self.length -= num_dropped
            return
        for layer, before in pairs:
            layer.__dict__ = before
        self.length -= len(since)
        if num_kept:
            self._run(since[:num_kept], None, num_logits=1)

    def _note(self, ids: torch.Tensor) -> None:
        if self._since is not None:
            self._since.append(ids)


def _is_known(layer: Any) -> bool:
    return type(layer) in _KNOWN


def _state_of(layer: Any) -> dict[str, Any]:
    """What `layer` holds. Keys and values are replaced when they grow; recurrent states, kept in dicts by
    number, are written in place and have to be copied."""
    return {name: _copied(value) if isinstance(value, dict) else value for name, value in vars(layer).items()}


def _copied(states: dict[Any, Any]) -> dict[Any, Any]:
    return {key: state.clone() if isinstance(state, torch.Tensor) else state for key, state in states.items()}


def _can_cut(layer: Any, num_new: int) -> bool:
    """Whether the layer still holds all of the last `num_new` tokens, one by one."""
    if type(layer) is DynamicSlidingWindowLayer:
        return num_new < layer.sliding_window
    return type(layer) is DynamicLayer


def _cut(layer: Any, before: dict[str, Any], *, num_new: int, num_kept: int) -> None:
    """Leave the first `num_kept` of the last `num_new` tokens."""
    for name in ("keys", "values"):
        if not layer.is_sliding:
            setattr(layer, name, getattr(layer, name)[..., : num_kept - num_new, :])
            continue
        kept = getattr(layer, name)[..., -num_new:, :][..., :num_kept, :]
        seen = torch.cat([before[name], kept], dim=-2)
        setattr(layer, name, seen[..., 1 - layer.sliding_window :, :])
    if layer.is_sliding:
        layer.cumulative_length = before["cumulative_length"] + num_kept
