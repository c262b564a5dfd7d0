"""A trace as training sees it: documents split three ways, cut into windows of one group's layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hetero_scheduler.predict.activation import activation_state
from hetero_scheduler.trace import Trace

HELD_OUT = 0.1
"""Share of the documents that validate, and of those that test."""


@dataclass(frozen=True)
class DocumentSplit:
    """Documents by what they are for; no document serves twice. int64 arrays of document numbers."""

    train: npt.NDArray[np.int64]
    validation: npt.NDArray[np.int64]
    """Decide when to stop."""
    test: npt.NDArray[np.int64]
    """Seen by nothing but the recall that is reported."""


class Places(NamedTuple):
    """Where a batch's steps lie in the trace."""

    tokens: Tensor  # [windows, steps] int64
    is_real: Tensor  # [windows, steps] bool: False where a short document was padded


class Batch(NamedTuple):
    """Windows of one group: inputs are the steps before the last, targets the steps after the first."""

    states: Tensor  # [windows, steps, n, E] activation states
    chosen: Tensor  # [windows, steps, n, K] int64
    is_real: Tensor  # [windows, steps] bool: False where a short document was padded


def split_documents(num_documents: int, *, seed: int, held_out: float = HELD_OUT) -> DocumentSplit:
    """A share `held_out` of the documents, at least one, for validation and as many for the test.

    Raises ValueError when nothing would be left to train on.
    """
    held = max(1, round(num_documents * held_out))
    if num_documents - 2 * held < 1:
        raise ValueError(
            f"{num_documents} documents cannot be split with {held} for validation and {held} for the test; "
            "record more documents"
        )
    order = np.random.default_rng(seed).permutation(num_documents)
    return DocumentSplit(order[2 * held :], order[:held], order[held : 2 * held])


class GroupData:
    """The layers `layers` of a trace, on `device`, from which windows are cut."""

    def __init__(self, trace: Trace, layers: range, device: str = "cpu") -> None:
        span = slice(layers.start, layers.stop)
        self.logits = torch.from_numpy(np.ascontiguousarray(trace.logits[:, span])).to(device)
        self.chosen = torch.from_numpy(trace.topk[:, span].astype(np.int64)).to(device)
        self.bounds = trace.bounds

    def windows(self, documents: npt.NDArray[np.int64], length: int) -> npt.NDArray[np.int64]:
        """Windows of at most `length` steps that cover `documents`. `[windows, 2]`: first token, steps.

        Neighbours share one step, so that every step but a document's first is a target once. Documents of a
        single step have nothing to predict and are left out.
        """
        found = []
        for document in documents:
            first, last = int(self.bounds[document]), int(self.bounds[document + 1])
            starts = range(first, last - 1, length - 1)
            found += [(start, min(length, last - start)) for start in starts]
        return np.array(found, dtype=np.int64).reshape(-1, 2)

    def batch(self, windows: npt.NDArray[np.int64]) -> Batch:
        """The windows as one padded batch; padding repeats the last step and is marked."""
        return self.at(self.place(windows, len(windows), int(windows[:, 1].max())))

    def place(self, windows: npt.NDArray[np.int64], rows: int, steps: int) -> Places:
        """The windows padded to `rows` × `steps`, on the device; rows without a window repeat the first."""
        first, count = np.full((rows, 1), windows[0, 0]), np.zeros((rows, 1), dtype=np.int64)
        first[: len(windows)], count[: len(windows)] = windows[:, :1], windows[:, 1:]
        step = np.arange(steps)[None]
        tokens = torch.from_numpy(first + np.minimum(step, np.maximum(count - 1, 0)))
        device = self.logits.device
        return Places(tokens.to(device), torch.from_numpy(step < count).to(device))

    def at(self, places: Places) -> Batch:
        """What the trace has at `places`."""
        chosen = self.chosen[places.tokens]
        return Batch(activation_state(self.logits[places.tokens], chosen), chosen, places.is_real)
