"""Orchestrators: who decides, for each layer, what is loaded, waited for and computed, and in which order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hetero_runtime.orchestrator.base import Orchestrator, Phase

if TYPE_CHECKING:
    from hetero_runtime.orchestrator.eager import EagerOrchestrator

__all__ = ["EagerOrchestrator", "Orchestrator", "Phase"]


def __getattr__(name: str) -> object:
    if name == "EagerOrchestrator":
        from hetero_runtime.orchestrator.eager import EagerOrchestrator

        return EagerOrchestrator
    raise AttributeError(name)
