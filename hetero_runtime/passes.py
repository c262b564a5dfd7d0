"""What surrounds a pass of the model: a turn, statistics, the orchestrator, errors of memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from hetero_runtime.no_room import no_room_for
from hetero_runtime.orchestrator import Orchestrator, Phase
from hetero_runtime.stats import StatsRecorder
from hetero_runtime.turns import Turns

_NO_ROOM_FIX = "lower memory.slabs, execution.max_rows or execution.max_length, or shorten the prompt"

Checkpoint = Callable[[], None]
"""Called between layers and passes; raises to give the pass up."""


@dataclass(frozen=True)
class Passes:
    """The only way into the model: one pass at a time, whoever asks first goes first."""

    device: torch.device
    orchestrator: Orchestrator
    turns: Turns
    stats: StatsRecorder

    @contextmanager
    def one(self, phase: Phase, *, num_tokens: int, checkpoint: Checkpoint) -> Iterator[None]:
        """Around one pass, in turn with all others. `checkpoint` is asked when the turn has come."""
        with self.turns.take(), self.inside(phase, num_tokens=num_tokens, checkpoint=checkpoint):
            yield

    @contextmanager
    def inside(
        self, phase: Phase, *, num_tokens: int, checkpoint: Checkpoint, num_passes: int = 1
    ) -> Iterator[None]:
        """The same for a caller who holds the turn. `num_tokens`: of all `num_passes` together."""
        with (
            self.stats.pass_(phase, num_tokens=num_tokens, num_passes=num_passes),
            self.orchestrator.pass_(phase, checkpoint=checkpoint),
            no_room_for(f"a pass over {num_tokens} tokens", self.device, fix=_NO_ROOM_FIX),
        ):
            checkpoint()
            if phase is Phase.PREFILL:
                self.orchestrator.expect_prompt(num_tokens)
            yield
