"""Routing policies: which experts a layer executes, and the logical cache that they look at.

    router scores, token ─► policy + logical cache ─► experts to execute; the router weighs them unchanged
                                 ▲
    the next layer's router, one layer early (pre-gate)

While a text is speculated, `block_selection` chooses one set of experts for all tokens of a draft; it has a
pool of its own (`BlockPool`).

A policy is a pure function of the tokens so far and its parameters. What really is on the device, and when a
copy arrives, is not among its inputs: the logical cache is a set of expert numbers, no memory (PSR §3).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hetero_scheduler.routing.base import Priority, RangeOf, RoutingPolicy, Rules, Shape
from hetero_scheduler.routing.calibration import Calibration, TokenPrior, uncalibrated

if TYPE_CHECKING:
    from hetero_scheduler.routing.block_selection import BlockDecisions, BlockPool, BlockSelection
    from hetero_scheduler.routing.logical_cache import Decisions, LogicalCache

_COMPILED = {
    "BlockDecisions": "block_selection",
    "BlockPool": "block_selection",
    "BlockSelection": "block_selection",
    "Decisions": "logical_cache",
    "LogicalCache": "logical_cache",
}
ROUTING_POLICIES = ("exact", "cache_prior", "psr", "speculative_experts")

__all__ = [
    "ROUTING_POLICIES",
    "BlockDecisions",
    "BlockPool",
    "BlockSelection",
    "Calibration",
    "Decisions",
    "LogicalCache",
    "Priority",
    "RangeOf",
    "RoutingPolicy",
    "Rules",
    "Shape",
    "TokenPrior",
    "make_routing_policy",
    "uncalibrated",
]


def make_routing_policy(name: str, **parameters: Any) -> RoutingPolicy:
    """The policy called `name`; `parameters` are the fields of its class.

    Raises ValueError for a name that is none and for a value that a policy does not take, TypeError for a
    parameter that it has not.
    """
    if name == "exact":
        from hetero_scheduler.routing.exact import Exact

        return Exact(**parameters)
    if name == "cache_prior":
        from hetero_scheduler.routing.cache_prior import CachePrior

        return CachePrior(**parameters)
    if name == "psr":
        from hetero_scheduler.routing.psr import Psr

        return Psr(**parameters)
    if name == "speculative_experts":
        from hetero_scheduler.routing.speculative_experts import SpeculativeExperts

        return SpeculativeExperts(**parameters)
    raise ValueError(f"unknown routing policy {name!r}; known: {', '.join(ROUTING_POLICIES)}")


def __getattr__(name: str) -> Any:
    """What is compiled is imported when it is asked for: a plan reads calibrations without a compiler."""
    module = _COMPILED.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{module}"), name)
