"""The contract of an orchestrator."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum

import torch

from hetero_gpu import CacheStats
from hetero_runtime.config.tree import Mode
from hetero_runtime.in_place import InPlaceStats
from hetero_runtime.orchestrator.ahead import PredictionStats


class Phase(Enum):
    """Prefill is compute-bound and touches most experts; decode is bound by bytes and touches top-k."""

    PREFILL = "prefill"
    DECODE = "decode"


class Orchestrator(ABC):
    """Computes the routed experts of every MoE layer of a forward pass.

    One pass at a time: the caller holds the engine's step lock around `pass_`. Inside it, transformers'
    forward calls `run_layer` once for each MoE layer, in order.
    """

    mode: Mode = "eager"
    """How decode steps run, whatever was asked for."""

    @contextmanager
    @abstractmethod
    def pass_(self, phase: Phase, *, checkpoint: Callable[[], None]) -> Iterator[None]:
        """Around one forward pass.

        `checkpoint` is called before each layer and may raise to give the pass up. The cache is whole again
        when the context is left, however it is left.
        """

    def expect_prompt(self, num_tokens: int) -> None:  # noqa: B027 (most have nothing to fetch)
        """Inside a prefill pass, before its first layer, where the caller knows: the pass reads `num_tokens`.
        What they probably need may be fetched from now on."""

    @abstractmethod
    def run_layer(
        self, layer: int, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Sum over the selected experts of weight times expert output.

        `layer` counts MoE layers; `hidden`: `[T, H]`; `top_k_index`, `top_k_weights`: `[T, K]`. Returns
        `[T, H]`.
        """

    @abstractmethod
    def device_stats(self) -> CacheStats:
        """What decode passes counted where only the device counts; zeros if the host counts everything."""

    def in_place_stats(self) -> InPlaceStats:
        """Experts that the CPU computed where they lie, inside their pass; zeros where it never does."""
        return InPlaceStats()

    def device_in_place_stats(self) -> InPlaceStats:
        """Those that steps on the device asked for, which may still run when their pass has ended."""
        return InPlaceStats()

    def prediction_stats(self) -> PredictionStats:
        """What forecasts cost the host; zeros where it makes none."""
        return PredictionStats()

    def observe_steps(self, num_steps: int, seconds: float) -> None:  # noqa: B027 (most choose nothing by it)
        """So many captured steps took the device so long; in the order of the steps, between passes."""

    @property
    def is_settled(self) -> bool:
        """What is found by timing captured steps has been found."""
        return True

    @property
    def is_outdated(self) -> bool:
        """Captured anew, a step would be shorter."""
        return False

    @abstractmethod
    def check(self) -> None:
        """Assert the invariants that hold between passes."""

    def close(self) -> None:  # noqa: B027 (most have nothing beside them)
        """End what runs beside the passes. No pass may follow, and none is under way."""
