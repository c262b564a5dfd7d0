"""`preset: auto`: short measured runs on this machine choose policy and knobs, under a KL budget.

candidates   configurations that leave alone what the user wrote
measure      one of them, loaded and run for a moment
choose       the fastest that the budget allows, and why

    file, --set ─► lru  lfru  cpu  hybrid  seqmoe  (psr) ─► ms a token, KL ─► the parts of the best

Experts are read once and handed from one run to the next. Nothing is written anywhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hetero_runtime.tuning.candidates import find_candidates
    from hetero_runtime.tuning.settled import settle

__all__ = ["find_candidates", "settle"]

_HOME = {"find_candidates": "candidates", "settle": "settled"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
