"""Texts whose drafts are checked in captured steps: all tokens of a draft as the rows of one step.

    row of the cache     a b c |              3 tokens, as the device counts them
    step of 4 tokens     c' d e f             at positions 3 4 5 6, each blind for what comes after it
    keep 2               a b c c' d |         a number changes; what lies behind it is written over

The rows of such a step are views of one row of the KV cache, so every kernel of a decode step serves as it
is: all of them write their keys and values first, then each attends up to its own position.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hetero_runtime.hf.graph_sequences import Around, Capture, GraphCapture, Replay
from hetero_runtime.hf.sequences import StaticSequences


class CheckGraphs:
    """`rows` texts of up to `max_length` tokens each.

    `active`: bool `[most tokens of a check]` on the device, shared with whoever runs the experts: which rows
    of a step are tokens. Passes are for one thread at a time. `model` keeps no states of linear attention,
    which cannot forget a token. Raises what StaticSequences raises.
    """

    def __init__(
        self,
        model: Any,
        *,
        active: torch.Tensor,
        rows: int,
        max_length: int,
        capture: Capture | None = None,
    ) -> None:
        """`capture`: how work is captured; as a CUDA graph unless given."""
        self._sequences = StaticSequences(model, rows=rows, max_length=max_length)
        assert not self._sequences.has_states, "states of linear attention cannot forget a draft"
        self._active, self._capture = active, capture
        self._tokens = torch.zeros(len(active), dtype=torch.long, device=active.device)
        self._logits: dict[tuple[int, int], torch.Tensor] = {}
        self._graphs: dict[tuple[int, int], Replay] = {}
        self._free = list(range(rows))

    @property
    def token_counts(self) -> list[int]:
        """Numbers of tokens that a captured step may have."""
        most = len(self._active)
        powers = [1 << i for i in range(most.bit_length())]
        return sorted({min(power, most) for power in [*powers, most]})

    @torch.inference_mode()
    def capture(self, *, prefill: Around, decode: Around) -> None:
        """Capture the steps of every row; slots and slabs see a few steps of a text that nobody asked for.

        `prefill` and `decode` make what surrounds such a pass: the orchestrator's preparations.
        """
        self._graphs.clear()
        capture = self._capture or GraphCapture()
        with prefill():
            self._sequences.prefill(0, torch.zeros(1, dtype=torch.long, device=self._active.device))
        self._active.zero_()
        self._active[0] = True
        with decode():
            for row in range(self._sequences.rows):
                for count in self.token_counts:
                    self._graphs[row, count] = capture(
                        lambda row=row, count=count: self._step(row, count)  # type: ignore[misc]
                    )
        self._sequences.reset(0)

    @contextmanager
    def open(self) -> Iterator[CheckedRow]:
        """An empty row, until the context is left. There must be one."""
        row = heapq.heappop(self._free)
        try:
            yield CheckedRow(self, self._sequences, row)
        finally:
            self._sequences.reset(row)
            heapq.heappush(self._free, row)

    def close(self) -> None:
        """Wait for the device; free the graphs, their memory and the KV cache."""
        if self._active.is_cuda:
            torch.cuda.synchronize(self._active.device)
        self._graphs.clear()
        self._logits.clear()
        self._sequences.close()

    @torch.inference_mode()
    def read(self, row: int, ids: torch.Tensor) -> torch.Tensor:
        """Read `ids` `[n]` behind what `row` holds: logits of each, `[n, vocab]` float32, which the next read
        writes over. The row does not grow by it."""
        num_tokens = len(ids)
        count = next(count for count in self.token_counts if count >= num_tokens)
        self._tokens[:num_tokens].copy_(ids)
        self._active[:num_tokens] = True
        self._active[num_tokens:] = False
        self._graphs[row, count]()
        return self._logits[row, count][:num_tokens]

    def _step(self, row: int, count: int) -> None:
        self._logits[row, count] = self._sequences.check(row, self._tokens[:count])


class CheckedRow:
    """One text. As RewindableState, for the last check."""

    def __init__(self, graphs: CheckGraphs, sequences: StaticSequences, row: int) -> None:
        self._graphs, self._sequences, self._row = graphs, sequences, row

    def extend(self, ids: torch.Tensor, images: dict[str, torch.Tensor] | None = None) -> torch.Tensor:
        """Append `ids` `[n]`, a prompt, and return the logits of the last one, `[vocab]` float32."""
        return self._sequences.prefill(self._row, ids, images or None)

    def mark(self) -> None:
        """Nothing to remember: a check does not lengthen the row."""

    def extend_all(self, ids: torch.Tensor) -> torch.Tensor:
        """The logits of all of `ids` `[n]`, `[n, vocab]` float32; then `rewind`, before anything else."""
        return self._graphs.read(self._row, ids)

    def rewind(self, num_kept: int) -> None:
        """Of the tokens just read the first `num_kept` stay."""
        self._sequences.keep(self._row, num_kept)
