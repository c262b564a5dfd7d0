"""Torch's threads beside the workers': together no more than there are cores."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def beside_workers(num_workers: int) -> Iterator[None]:
    """Inside, the torch of this thread leaves their cores to so many workers; one it keeps in any case."""
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, before - num_workers))
    try:
        yield
    finally:
        torch.set_num_threads(before)
