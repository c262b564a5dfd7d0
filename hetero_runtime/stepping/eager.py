"""One pass a token, driven by the host: runs everywhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hetero_runtime.generation import Request, make_sampler
from hetero_runtime.hf.forward import Sequence, Sequences
from hetero_runtime.hf.visual import images_on
from hetero_runtime.orchestrator import Phase
from hetero_runtime.passes import Checkpoint, Passes
from hetero_runtime.stepping.base import Stepper, Tokens


class EagerStepper(Stepper):
    """Requests take turns, a pass each."""

    def __init__(self, sequences: Sequences, passes: Passes) -> None:
        self._sequences, self._passes = sequences, passes

    @contextmanager
    def open(self, request: Request, checkpoint: Checkpoint) -> Iterator[Tokens]:
        with self._sequences.open() as sequence:
            yield EagerTokens(sequence, self._passes, request, checkpoint)


class EagerTokens(Tokens):
    """Samples from the logits of the last pass; a pass runs only when the token after it is asked for."""

    def __init__(self, sequence: Sequence, passes: Passes, request: Request, checkpoint: Checkpoint) -> None:
        self._sequence, self._passes = sequence, passes
        self._request, self._checkpoint = request, checkpoint
        self._history = list(request.prompt_ids)

    def first(self, images: dict[str, torch.Tensor]) -> int:
        logits = self._extend(Phase.PREFILL, self._request.prompt_ids, images)
        self._sampler = make_sampler(self._request.params, logits.shape[-1], self._passes.device)
        return self._sample(logits)

    def next(self) -> int:
        return self._sample(self._extend(Phase.DECODE, self._history[-1:], {}))

    def _sample(self, logits: torch.Tensor) -> int:
        token = self._sampler.sample(logits, self._history)
        self._history.append(token)
        return token

    def _extend(
        self, phase: Phase, ids: list[int] | tuple[int, ...], images: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        """Logits `[vocab]` of the last of `ids`."""
        device = self._passes.device
        inputs = images_on(device, images)
        with self._passes.one(phase, num_tokens=len(ids), checkpoint=self._checkpoint):
            return self._sequence.extend(torch.tensor(ids, device=device), inputs)
