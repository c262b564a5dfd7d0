"""Cache-aware routing in the engine: decisions on a logical cache, copies that follow it.

    router l ─ scores ─► routing.py: policy on this text's logical cache ─ experts ─► router's own weights
        └─ next router, one layer early ─► insertions ─► copies.py: at most a few on the link ─► slab cache

Decisions never look at slabs or copies; slabs and copies never change a decision. What a layer needs and does
not find is loaded by the orchestrator as always, so timing changes how long a token takes, not what it is.
"""

from __future__ import annotations

from hetero_runtime.routing.copies import CopiesAhead
from hetero_runtime.routing.routing import CountsRouting, Routing, RoutingStats, TextPart
from hetero_runtime.routing.sequences import RoutedSequences

__all__ = ["CopiesAhead", "CountsRouting", "RoutedSequences", "Routing", "RoutingStats", "TextPart"]
