"""What the way into the slabs can do while layers run."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

import torch

from hetero_gpu import Copier
from hetero_scheduler import ExpertKey

_NUM_TIMED = 4


class Link(Protocol):
    """The way into the slabs, however many hops it has."""

    @property
    def overlaps(self) -> bool:
        """Whether copies run while layers compute."""

    @property
    def is_spare(self) -> bool:
        """Whether one copy may always be under way (SeqMoE Algorithm 1 budgets one at least). False where
        what a layer misses shares the time of copies ahead, so that these have to be worth it."""

    @property
    def keeps_order(self) -> bool:
        """Whether copies arrive in the order of their submission."""

    def copy_s(self, key: ExpertKey) -> float | None:
        """Seconds that the copy of `key` takes from where it lies now; None while that is not known."""


@dataclass(frozen=True)
class SteadyLink:
    """A link on which every copy takes `seconds`."""

    overlaps: bool
    seconds: float
    is_spare: bool = True
    keeps_order: bool = True

    def copy_s(self, key: ExpertKey) -> float | None:
        """See Link."""
        return self.seconds


def measure_link(copier: Copier[torch.Tensor], record: torch.Tensor, slab: torch.Tensor) -> SteadyLink:
    """Time copies of `record` into `slab`, whose bytes nobody needs yet.

    On device cpu a copy is done when it is submitted, by the thread that would compute meanwhile: it overlaps
    with nothing, whatever it takes.
    """
    copier.submit(record, slab, after=copier.fence())  # the first one pays for what is set up once
    copier.synchronize()
    began = time.monotonic()
    for _ in range(_NUM_TIMED):
        copier.submit(record, slab, after=None)
    copier.synchronize()
    return SteadyLink(overlaps=slab.device.type != "cpu", seconds=(time.monotonic() - began) / _NUM_TIMED)
