"""What the model sees, and how often: the weights of the kinds, and batches drawn on the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from bench.models.streams import Stream

KIND_WEIGHTS = {
    "story": 8,
    "dialog": 2,
    "chat": 18,
    "math": 12,
    "encyc": 12,
    "code": 22,
    "docs": 15,
    "prose": 11,
}
"""Share of windows a kind, in percent: kinds that become legible first weigh more than their bytes."""

SOURCE_FACTORS = {
    "prose.spurgeon-treasury": 0.2,
    "prose.matthew-henry-concise": 0.2,
    "prose.king-james-bible": 0.25,
    "prose.world-english-bible": 0.25,
    "chat.procedural-dialog": 2.5,
    "chat.chatterbot-english": 3.0,
    "chat.procedural-stories": 0.7,
}
"""Within its kind a source counts by its tokens times this factor (1 when absent)."""


def source_shares(streams: Sequence[Stream]) -> list[float]:
    """The probability of drawing a window from each stream; adds up to 1 over the kinds present."""
    sizes = [len(stream.tokens) * SOURCE_FACTORS.get(stream.label, 1.0) for stream in streams]
    totals: dict[str, float] = {}
    for stream, size in zip(streams, sizes, strict=True):
        totals[stream.kind] = totals.get(stream.kind, 0.0) + size
    present = sum(KIND_WEIGHTS[kind] for kind in totals)
    return [
        KIND_WEIGHTS[stream.kind] / present * size / totals[stream.kind]
        for stream, size in zip(streams, sizes, strict=True)
    ]


class Sampler:
    """Draws random windows on the device, with no word to the host.

    A window begins anywhere in its source; when the beginning of that document lies within a window's
    length, half of them begin there instead, as a prompt does. Long documents are so read evenly: to draw
    documents first would show their openings dozens of times, until the model recites them.
    """

    def __init__(self, streams: Sequence[Stream], *, length: int, device: torch.device, seed: int) -> None:
        streams = [stream for stream in streams if len(stream.tokens) > length + 1]
        if not streams:
            raise ValueError(f"no source has more than {length + 1} tokens: lower the window length")
        sizes = np.array([len(stream.tokens) for stream in streams])
        begins = np.concatenate([[0], np.cumsum(sizes)[:-1]])
        starts = [begin + stream.starts for begin, stream in zip(begins, streams, strict=True)]
        tokens = np.concatenate([stream.tokens for stream in streams]).astype(np.int16)
        self._length = length
        self._generator = torch.Generator(device).manual_seed(seed)
        self._shares = torch.tensor(source_shares(streams), device=device)
        self._tokens = torch.from_numpy(tokens).to(device)
        self._begins = torch.from_numpy(begins).to(device)
        self._room = torch.from_numpy(sizes - length).to(device)
        self._starts = torch.from_numpy(np.concatenate(starts)).to(device)
        self._steps = torch.arange(length + 1, device=device)

    def draw(self, batch: int) -> Tensor:
        """Token windows, int64 `[batch, length + 1]`."""
        source = torch.multinomial(self._shares, batch, replacement=True, generator=self._generator)
        anywhere = self._begins[source] + (self._uniform(batch) * self._room[source]).long()
        document = torch.searchsorted(self._starts, anywhere, right=True) - 1
        start = self._starts[document]
        snaps = (anywhere - start < self._length) & (self._uniform(batch) < 0.5)
        offsets = torch.where(snaps, start, anywhere)
        return self._tokens[offsets[:, None] + self._steps].long()

    def _uniform(self, count: int) -> Tensor:
        return torch.rand(count, generator=self._generator, device=self._tokens.device, dtype=torch.float64)
