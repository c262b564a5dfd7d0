"""Replays of a recorded routing: many at once, as a table, as JSON and as a picture.

The replay itself is `hetero_scheduler.simulator`; importing this face loads neither numba nor matplotlib.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hetero_runtime.simulation.plots import draw_hit_rates
    from hetero_runtime.simulation.report import render_results, to_json
    from hetero_runtime.simulation.sweep import Sweep, run_sweep

__all__ = ["Sweep", "draw_hit_rates", "render_results", "run_sweep", "to_json"]

_MODULES = {
    "Sweep": "sweep",
    "run_sweep": "sweep",
    "draw_hit_rates": "plots",
    "render_results": "report",
    "to_json": "report",
}


def __getattr__(name: str) -> Any:
    """Load what is asked for."""
    from importlib import import_module

    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
