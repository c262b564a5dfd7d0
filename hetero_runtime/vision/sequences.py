"""Sequences whose prompts with images are told to a compressor."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hetero_runtime.hf.forward import Sequence, Sequences
from hetero_runtime.vision.compressor import Compressor


class CompressedSequences:
    """`sequences`, with fewer visual tokens behind the pinned prefix."""

    def __init__(self, sequences: Sequences, compressor: Compressor) -> None:
        self._sequences, self._compressor = sequences, compressor

    @contextmanager
    def open(self) -> Iterator[Sequence]:
        with self._sequences.open() as sequence:
            yield _Compressed(sequence, self._compressor)

    def close(self) -> None:
        """Free what all sequences share."""
        self._sequences.close()


class _Compressed:
    def __init__(self, sequence: Sequence, compressor: Compressor) -> None:
        self._sequence, self._compressor = sequence, compressor

    def extend(self, ids: torch.Tensor, images: dict[str, torch.Tensor] | None = None) -> torch.Tensor:
        """As for Sequence."""
        if not images:
            return self._sequence.extend(ids, images)
        with self._compressor.pass_of(ids, images):
            return self._sequence.extend(ids, images)
