"""Orchestrators: who decides, for each layer, what is loaded, waited for and computed, and in which order."""

from __future__ import annotations

from hetero_runtime.orchestrator.base import Orchestrator, Phase

__all__ = ["Orchestrator", "Phase"]
