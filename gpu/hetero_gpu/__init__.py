"""The device side: slabs, copies and the slab expert cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hetero_gpu.slab_cache import CacheStats, SlabCache
from hetero_gpu.slabs import SlabPool
from hetero_gpu.transfer import Copier, Fence, HostCopier, Transfer

if TYPE_CHECKING:
    import torch

    from hetero_gpu.cuda_transfer import CopyBytes

__all__ = [
    "CacheStats",
    "Copier",
    "Fence",
    "HostCopier",
    "SlabCache",
    "SlabPool",
    "Transfer",
    "make_copier",
]


def make_copier(device: torch.device, *, copy: CopyBytes | None = None) -> Copier:
    """The copier for `device`. `copy`: how bytes cross when the host bank is not registered with CUDA."""
    if device.type == "cpu":
        return HostCopier()
    from hetero_gpu.cuda_transfer import CudaCopier, copy_registered

    return CudaCopier(device, copy or copy_registered)
