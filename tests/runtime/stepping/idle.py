"""An orchestrator for models whose experts all run in transformers' own blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from hetero_gpu import CacheStats
from hetero_runtime.orchestrator import Orchestrator, Phase


class IdleOrchestrator(Orchestrator):
    """Is told of passes and prompts; nothing is to be done in them."""

    @contextmanager
    def pass_(self, phase: Phase, *, checkpoint: Callable[[], None]) -> Iterator[None]:
        checkpoint()
        yield

    def expect_prompt(self, num_tokens: int) -> None:
        assert num_tokens > 0

    def run_layer(
        self, layer: int, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        raise AssertionError("transformers' own experts run")

    def device_stats(self) -> CacheStats:
        return CacheStats()

    def check(self) -> None:
        """Nothing is held between passes."""
