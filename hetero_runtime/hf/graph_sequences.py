"""Sequences whose decode step is one CUDA graph.

    capture, once   a token of no meaning in row 0 ─► warm up ─► capture step() ─► forget it
    prefill         eager: transformers' model on our KV cache
    decode          write the token and the active row, replay, read the logits of that row

A step advances one row; the others take part in it without a trace: their experts are not loaded, their KV
cache and their length stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from hetero_runtime.hf.forward import Sequence
from hetero_runtime.hf.sequences import StaticSequences

Around = Callable[[], AbstractContextManager[None]]

NUM_WARM_UPS = 3
"""Steps before the capture: kernels compile and libraries allocate what they never allocate again."""


class GraphSequences:
    """`rows` places of up to `max_length` tokens, one captured step for all of them.

    `active`: bool `[rows]` on the device, shared with whoever runs the experts. Passes are for one thread at
    a time; a sequence may be opened and left from any.
    """

    def __init__(self, model: Any, *, active: torch.Tensor, max_length: int) -> None:
        self._sequences = StaticSequences(model, rows=len(active), max_length=max_length, active=active)
        self._active = active
        self._tokens = torch.zeros(len(active), dtype=torch.long, device=active.device)
        self._one_hot = torch.eye(len(active), dtype=torch.bool, device=active.device)
        self._free = list(range(len(active)))
        self._graph: torch.cuda.CUDAGraph | None = None
        self._logits = torch.empty(0)

    @torch.inference_mode()
    def capture(self, *, prefill: Around, decode: Around) -> None:
        """Capture the step; slots and slabs see a few steps of a text that nobody asked for.

        `prefill` and `decode` make what surrounds such a pass: the orchestrator's preparations.
        """
        device = self._active.device
        with prefill():
            self._sequences.prefill(0, torch.zeros(1, dtype=torch.long, device=device))
        self._active.copy_(self._one_hot[0])
        with decode():
            side = torch.cuda.Stream(device)
            side.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(side):
                for _ in range(NUM_WARM_UPS):
                    self._sequences.step(self._tokens)
            torch.cuda.current_stream(device).wait_stream(side)
            torch.cuda.synchronize(device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._logits = self._sequences.step(self._tokens)
        self._graph = graph
        self._sequences.reset(0)

    @contextmanager
    def open(self) -> Iterator[Sequence]:
        """A place for one sequence, until the context is left. There must be one (callers hold a permit)."""
        row = self._free.pop()
        try:
            yield GraphSequence(self, row)
        finally:
            self._sequences.reset(row)
            self._free.append(row)

    def close(self) -> None:
        """Free the graph, its memory and the KV cache."""
        self._graph = None
        self._sequences.close()
        self._logits = torch.empty(0)

    def prefill(self, row: int, ids: torch.Tensor, images: dict[str, torch.Tensor] | None) -> torch.Tensor:
        """Logits of the last of `ids` `[n]`: `[vocab]` float32."""
        return self._sequences.prefill(row, ids, images or None)

    def decode(self, row: int, token: torch.Tensor) -> torch.Tensor:
        """Append `token` `[1]` to `row`: logits `[vocab]` float32, valid until the next step of any row."""
        assert self._graph is not None, "there is no step to replay: capture comes first"
        self._sequences.advance(row)
        self._tokens[row] = token[0]
        self._active.copy_(self._one_hot[row])
        self._graph.replay()
        return self._logits[row]


class GraphSequence:
    """One row as a sequence."""

    def __init__(self, owner: GraphSequences, row: int) -> None:
        self._owner, self._row = owner, row
        self._is_filled = False

    @torch.inference_mode()
    def extend(self, ids: torch.Tensor, images: dict[str, torch.Tensor] | None = None) -> torch.Tensor:
        if self._is_filled and len(ids) == 1:
            return self._owner.decode(self._row, ids)
        self._is_filled = True
        return self._owner.prefill(self._row, ids, images)
