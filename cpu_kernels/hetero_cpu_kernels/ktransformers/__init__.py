"""kt-kernel, the CPU kernels of KTransformers, where a user installed it by hand: by its raw-pointer API.

    load()                                       the extension, or why there is none
    KtPool(cpus)                                 its threads, kept apart from its own spinning queue
    KtLayer(pool, form, records, ...)            one layer's experts, repacked: a second copy

Tried with 0.7.2, which is for x86-64 alone, pins one release of torch and puts other projects' packages
beside its own: never a dependency, but `pip install --no-deps kt-kernel==0.7.2 gguf`. This face loads none of
it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hetero_cpu_kernels.ktransformers.library import is_installed, load

if TYPE_CHECKING:
    from hetero_cpu_kernels.ktransformers.layer import CallMemory, KtLayer, check_form
    from hetero_cpu_kernels.ktransformers.pool import KtPool, spare_cpus

__all__ = ["CallMemory", "KtLayer", "KtPool", "check_form", "is_installed", "load", "spare_cpus"]


def __getattr__(name: str) -> Any:
    if name in ("KtPool", "spare_cpus"):
        from hetero_cpu_kernels.ktransformers import pool

        return getattr(pool, name)
    if name in ("CallMemory", "KtLayer", "check_form"):
        from hetero_cpu_kernels.ktransformers import layer

        return getattr(layer, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
