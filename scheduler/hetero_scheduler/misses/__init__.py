"""What becomes of a layer's misses: loaded over the link, or computed where they lie.

While slots are empty a miss is loaded; of the others each policy computes in place:

    base        the contract, and what a layer asks
    in_place    all of them
    share       a fixed share: the same choice whatever the clock says
    by_cost     link and CPU finish together, by what both were measured to take
    split       the arithmetic under all three
    costs       seconds by tokens, corrected by what running shows
"""

from __future__ import annotations

from hetero_scheduler.misses.base import LayerDemand, MissPolicy
from hetero_scheduler.misses.by_cost import ByCost, Verdict
from hetero_scheduler.misses.costs import CostCurve, Costs, DeviceSide
from hetero_scheduler.misses.in_place import AllInPlace
from hetero_scheduler.misses.share import SHARES, FixedShare
from hetero_scheduler.misses.split import least_worth, split_by_cost

__all__ = [
    "SHARES",
    "AllInPlace",
    "ByCost",
    "CostCurve",
    "Costs",
    "DeviceSide",
    "FixedShare",
    "LayerDemand",
    "MissPolicy",
    "Verdict",
    "least_worth",
    "split_by_cost",
]
