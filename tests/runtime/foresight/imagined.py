"""Engines on an imagined link: copies overlap with layers although everything runs on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hetero_runtime.foresight import build
from hetero_runtime.foresight.link import SteadyLink
from hetero_runtime.foresight.pace import Pace
from hetero_runtime.orchestrator.eager import EagerOrchestrator
from hetero_runtime.tiers import supply
from tests.gpu.timed_copier import TimedCopier

LAYER_S = 2.0**-10


def imagine_link(monkeypatch: pytest.MonkeyPatch, layers_a_copy: float) -> TimedCopier:
    """Engines loaded from now on copy over a link of their own, whose clock they also live by: a copy takes
    `layers_a_copy` layers, and a layer LAYER_S besides its waits."""
    copier = TimedCopier(layers_a_copy * LAYER_S)
    link = SteadyLink(overlaps=True, seconds=copier.copy_s)
    monkeypatch.setattr(supply, "make_copier", lambda *_, **__: copier)
    monkeypatch.setattr(supply, "measure_link", lambda *_: link)
    monkeypatch.setattr(build, "Pace", lambda: Pace(lambda: copier.now_s))
    run_layer = EagerOrchestrator.run_layer

    def taking_time(self: EagerOrchestrator, *arguments: Any) -> torch.Tensor:
        output = run_layer(self, *arguments)
        copier.advance(LAYER_S)
        return output

    monkeypatch.setattr(EagerOrchestrator, "run_layer", taking_time)
    return copier
