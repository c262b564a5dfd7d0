"""Which visual tokens of a prompt go on after the pinned prefix (VisMMOE §3.2).

    base        the contract: a salient core, then the best scores outside it
    affinity    the rest by what it adds to the experts of the core (Algorithm 1)
    saliency    the rest by saliency, as VisionZip's dominant tokens
    chance      the rest at random

What an encoder attends to and what routers chose comes in as arrays: every choice can be made again offline.
"""

from __future__ import annotations

from hetero_scheduler.compression.base import ImageTokens, TokenSelector

METHODS = ("affinity", "saliency", "random", "mix")
"""Values of `make_selector`'s name."""

__all__ = ["METHODS", "ImageTokens", "TokenSelector", "make_selector"]


def make_selector(
    name: str, *, keep_ratio: float, salient_ratio: float = 0.25, affinity: float = 2.0, seed: int = 0
) -> TokenSelector:
    """The method called `name`; arguments that it has no use for are not read.

    `keep_ratio`: β. `salient_ratio`: α, for `affinity` and `mix`. `affinity`: λ. `seed`: for `random` and
    `mix`. Raises ValueError for another name, or ratios outside 0 <= α <= β <= 1.
    """
    if name == "affinity":
        from hetero_scheduler.compression.affinity import ByAffinity

        return ByAffinity(keep_ratio, salient_ratio, weight=affinity)
    if name == "saliency":
        from hetero_scheduler.compression.saliency import BySaliency

        return BySaliency(keep_ratio, keep_ratio)
    if name in ("random", "mix"):
        from hetero_scheduler.compression.chance import ByChance

        return ByChance(keep_ratio, salient_ratio if name == "mix" else 0.0, seed=seed)
    raise ValueError(f"unknown method {name!r}; known: {', '.join(METHODS)}")
