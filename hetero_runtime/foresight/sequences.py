"""Sequences whose passes are told to a foresight: whose text, when."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hetero_runtime.foresight.foresight import Foresight
from hetero_runtime.hf.forward import Sequence, Sequences


class ForeseenSequences:
    """`sequences`, each with a place in `foresight`."""

    def __init__(self, sequences: Sequences, foresight: Foresight) -> None:
        self._sequences, self._foresight = sequences, foresight

    @contextmanager
    def open(self) -> Iterator[Sequence]:
        with self._sequences.open() as sequence, self._foresight.text() as place:
            yield _Foreseen(sequence, self._foresight, place)

    def close(self) -> None:
        """Free what all sequences share."""
        self._sequences.close()


class _Foreseen:
    def __init__(self, sequence: Sequence, foresight: Foresight, place: int) -> None:
        self._sequence, self._foresight, self._place = sequence, foresight, place

    def extend(self, ids: torch.Tensor, images: dict[str, torch.Tensor] | None = None) -> torch.Tensor:
        """As for Sequence."""
        token = int(ids) if ids.numel() == 1 else None
        with self._foresight.looking(ids, images), self._foresight.pass_of(self._place, token):
            return self._sequence.extend(ids, images)
