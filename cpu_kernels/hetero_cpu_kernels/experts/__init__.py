"""Expert MLPs on the CPU, computed where their records lie in the host bank.

    form         what the kernels know of a record
    targets      instruction sets; best_target() is the fastest that executes here
    CpuExperts   compiled for a form, computes a layer's experts on a `pool.WorkerPool`

Importing this face compiles nothing and does not load numba.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hetero_cpu_kernels.experts.form import Bias, ExpertForm, Gate, Matrix, Scales
from hetero_cpu_kernels.experts.targets import (
    TARGETS,
    Target,
    best_target,
    is_executable,
    target,
    targets_here,
)

if TYPE_CHECKING:
    from hetero_cpu_kernels.experts.call import Routing
    from hetero_cpu_kernels.experts.layer import CpuExperts

__all__ = [
    "TARGETS",
    "Bias",
    "CpuExperts",
    "ExpertForm",
    "Gate",
    "Matrix",
    "Routing",
    "Scales",
    "Target",
    "best_target",
    "is_executable",
    "target",
    "targets_here",
]


def __getattr__(name: str) -> Any:
    if name == "CpuExperts":
        from hetero_cpu_kernels.experts.layer import CpuExperts

        return CpuExperts
    if name == "Routing":
        from hetero_cpu_kernels.experts.call import Routing

        return Routing
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
