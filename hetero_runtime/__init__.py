"""hetero_runtime: Mixture-of-Experts models whose experts do not fit on the device.

from hetero_runtime import Engine

with Engine.load(memory={"residency": 0.25}) as engine:
    print(engine.generate("Once upon a time").text)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hetero_runtime.engine import Engine
    from hetero_runtime.generation import CancelToken, Completion, Delta, SamplingParams
    from hetero_runtime.stats import EngineStats

__version__ = "0.1.0"
__all__ = ["CancelToken", "Completion", "Delta", "Engine", "EngineStats", "SamplingParams"]

_HOME = {"Engine": "engine", "EngineStats": "stats"}


def __getattr__(name: str) -> Any:
    """Import on first use: torch and transformers take seconds that `--help` need not pay."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOME.get(name, 'generation')}"), name)
