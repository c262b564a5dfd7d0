"""The device side: slabs, copies and the slab expert cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from hetero_gpu.cache_stats import CacheStats
    from hetero_gpu.host_memory import Registration
    from hetero_gpu.packed import PackedLayout
    from hetero_gpu.slab_cache import SlabCache
    from hetero_gpu.slabs import MappedSlabs, SlabPool
    from hetero_gpu.transfer import (
        Arrived,
        Copier,
        Fence,
        HostCopier,
        LinkCopier,
        Point,
        Record,
        Transfer,
    )

__all__ = [
    "Arrived",
    "CacheStats",
    "Copier",
    "Fence",
    "HostCopier",
    "LinkCopier",
    "MappedSlabs",
    "Point",
    "Record",
    "SlabCache",
    "SlabPool",
    "Transfer",
    "make_copier",
]

_HOME = {
    "CacheStats": "cache_stats",
    "MappedSlabs": "slabs",
    "SlabCache": "slab_cache",
    "SlabPool": "slabs",
}


def __getattr__(name: str) -> Any:
    """Import on first use: a memory plan asks for the size of a packed record and needs no torch for it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOME.get(name, 'transfer')}"), name)


def make_copier(
    device: torch.device,
    *,
    registration: Registration,
    record_bytes: int,
    packing: PackedLayout | None = None,
) -> LinkCopier:
    """The copier for `device`. `registration`: how CUDA may read the host bank, whose records it copies.

    `record_bytes`: of a record as the bank has it. `packing`: the layout of packed records; None: plain ones.
    """
    if device.type == "cpu":
        from hetero_gpu.transfer import HostCopier

        assert packing is None, "records are packed for a link; device cpu has none"
        return HostCopier()
    from hetero_gpu.cuda_transfer import CopyBytes, CudaCopier, copy_directly

    copy: CopyBytes = copy_directly
    if registration.kind == "staging":
        from hetero_gpu.staging import StagingRing

        copy = StagingRing(buffer_bytes=record_bytes).copy
    if packing is None:
        return CudaCopier(device, copy=copy)
    from hetero_gpu.packed.copier import PackedCopier

    return PackedCopier(device, packing, copy=copy)
