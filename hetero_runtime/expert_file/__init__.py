"""Expert files: every routed expert of a model in one file, each record readable with one direct read.

`ExpertFile` reads one; `pack` writes one. What lies where in it: `header`, which a memory plan reads without
torch. Import `pack` from its module: it needs transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hetero_runtime.expert_file.reader import ExpertFile

__all__ = ["ExpertFile"]


def __getattr__(name: str) -> Any:
    """Import on first use."""
    if name != "ExpertFile":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from hetero_runtime.expert_file.reader import ExpertFile

    return ExpertFile
