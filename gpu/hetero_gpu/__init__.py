"""The device side: slabs, copies and the slab expert cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hetero_gpu.slab_cache import CacheStats, SlabCache
from hetero_gpu.slabs import SlabPool
from hetero_gpu.transfer import Copier, Fence, HostCopier, Transfer

if TYPE_CHECKING:
    import torch

    from hetero_gpu.host_memory import Registration

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


def make_copier(device: torch.device, *, registration: Registration, record_bytes: int) -> Copier:
    """The copier for `device`. `registration`: how CUDA may read the host bank, whose records it copies."""
    if device.type == "cpu":
        return HostCopier()
    from hetero_gpu.cuda_transfer import CudaCopier

    if registration.kind != "staging":
        return CudaCopier(device)
    from hetero_gpu.staging import StagingRing

    return CudaCopier(device, copy=StagingRing(buffer_bytes=record_bytes).copy)
