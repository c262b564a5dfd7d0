"""What the link to the slabs can do while layers run."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch

from hetero_gpu import Copier

_NUM_TIMED = 4


class Link(NamedTuple):
    """`overlaps`: whether copies run while layers compute. `copy_s`: seconds that one expert takes."""

    overlaps: bool
    copy_s: float


def measure_link(copier: Copier, record: torch.Tensor, slab: torch.Tensor) -> Link:
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
    return Link(overlaps=slab.device.type != "cpu", copy_s=(time.monotonic() - began) / _NUM_TIMED)
