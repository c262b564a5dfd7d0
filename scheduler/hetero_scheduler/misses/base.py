"""The contract of a policy for misses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple


class LayerDemand(NamedTuple):
    """What a layer asks of the policy: its experts by tokens, and how much a miss is worth a slot.

    A layer of one token has some eight: plain numbers are decided upon faster than arrays.
    """

    hit_tokens: Sequence[int]
    """`[hits]`: experts that are resident or on their way."""
    miss_tokens: Sequence[int]
    """`[misses]`"""
    worth: Sequence[float]
    """`[misses]`: the more, the rather it is loaded; no two alike."""
    num_empty: int
    """Slots that a load could take with nobody leaving: so many misses are loaded in any case, the worthiest.
    Memory that was planned for experts does not lie idle, however fast the CPU is."""


class MissPolicy(ABC):
    """Chooses what is computed in place, one layer after the other, and hears what it took."""

    is_lost = False
    """Everything is loaded from now on: nobody has to ask any more."""
    is_tried = False
    """A captured step, which observes no layer, tries shares of the misses in place of asking."""

    @abstractmethod
    def choose(self, demand: LayerDemand) -> list[int]:
        """Positions in the demand's misses, ascending, of those to be computed where they lie; at most all
        but `num_empty`."""

    def observe_in_place(self, tokens: Sequence[int], seconds: float) -> None:  # noqa: B027 - most ask no clock
        """A layer's experts with so many `tokens` were computed in place in so many seconds."""

    def observe_call(self, seconds: float) -> None:  # noqa: B027
        """So long the thread that drives the device was kept by a layer's work in place: handing it over and
        adding up what came back."""

    def observe_device(self, hit_tokens: Sequence[int], loaded_tokens: Sequence[int], seconds: float) -> None:  # noqa: B027
        """The device computed these hits, and loaded and computed these misses of a layer. May come some
        layers late, and for some layers not at all."""
