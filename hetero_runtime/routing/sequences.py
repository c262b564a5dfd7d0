"""Sequences whose passes are told to a routing: whose tokens, which."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hetero_runtime.hf.forward import Sequence, Sequences
from hetero_runtime.routing.routing import Routing, TextPart
from hetero_scheduler.routing import LogicalCache


class RoutedSequences:
    """`sequences`, each with a logical cache of its own, which begins with the warm set."""

    def __init__(self, sequences: Sequences, routing: Routing) -> None:
        self._sequences, self._routing = sequences, routing

    @contextmanager
    def open(self) -> Iterator[Sequence]:
        with self._sequences.open() as sequence:
            yield _Routed(sequence, self._routing, self._routing.new_cache())

    def close(self) -> None:
        """Free what all sequences share."""
        self._sequences.close()


class _Routed:
    def __init__(self, sequence: Sequence, routing: Routing, cache: LogicalCache) -> None:
        self._sequence, self._routing, self._cache = sequence, routing, cache

    def extend(self, ids: torch.Tensor, images: dict[str, torch.Tensor] | None = None) -> torch.Tensor:
        """As for Sequence."""
        with self._routing.pass_of([TextPart(self._cache, ids.cpu().numpy())]):
            return self._sequence.extend(ids, images)
