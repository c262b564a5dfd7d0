"""Frontiers: what a routing policy saves in copies, and what that costs in divergence (PSR, Fig. 1 and 5).

    contenders × residencies ─► one loaded model, a policy at a time ─► points ─► table, JSON, picture

Divergence and copies both come from the policy code that serves: routing sees its logical cache, so what is
loaded where on this machine changes no number here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hetero_runtime.evaluation.frontier.plot import draw_frontier
    from hetero_runtime.evaluation.frontier.report import render_points, to_json
    from hetero_runtime.evaluation.frontier.sweep import Texts, run_frontier

__all__ = ["Texts", "draw_frontier", "render_points", "run_frontier", "to_json"]

_MODULES = {
    "Texts": "sweep",
    "draw_frontier": "plot",
    "render_points": "report",
    "run_frontier": "sweep",
    "to_json": "report",
}


def __getattr__(name: str) -> Any:
    """Load what is asked for."""
    from importlib import import_module

    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
