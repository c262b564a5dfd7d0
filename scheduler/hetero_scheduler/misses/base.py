"""The contract of a policy for misses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class LayerDemand(NamedTuple):
    """What a layer asks of the policy: its experts by tokens, and how much a miss is worth a slot."""

    hit_tokens: Integers
    """`[hits]`: experts that are resident or on their way."""
    miss_tokens: Integers
    """`[misses]`"""
    worth: Floats
    """`[misses]`: the more, the rather it is loaded; no two alike."""
    num_empty: int
    """Slots that a load could take with nobody leaving: so many misses are loaded in any case, the worthiest.
    Memory that was planned for experts does not lie idle, however fast the CPU is."""


class MissPolicy(ABC):
    """Chooses what is computed in place, one layer after the other, and hears what it took."""

    @abstractmethod
    def choose(self, demand: LayerDemand) -> Integers:
        """Positions in the demand's misses, ascending, of those to be computed where they lie; at most all
        but `num_empty`."""

    def observe_in_place(self, tokens: Integers, seconds: float) -> None:  # noqa: B027 - most ask no clock
        """A layer's experts with so many `tokens` were computed in place in so many seconds."""

    def observe_device(self, hit_tokens: Integers, loaded_tokens: Integers, seconds: float) -> None:  # noqa: B027
        """The device computed these hits, and loaded and computed these misses of a layer. May come some
        layers late, and for some layers not at all."""
