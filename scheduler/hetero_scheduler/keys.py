"""The name of one routed expert."""

from __future__ import annotations

from typing import NamedTuple


class ExpertKey(NamedTuple):
    """One routed expert: `layer` counts the MoE layers from 0, `expert` the experts of that layer."""

    layer: int
    expert: int
