"""The memory plan: what goes where, and whether it fits, before a weight is read.

    read_geometry(model folder)  config.json and safetensors headers -> Geometry
    detect(device)               this machine, cgroup limits included -> Hardware
    make_plan(geometry, resolved config, hardware) -> MemoryPlan, or BudgetError with what would fit

Nothing here imports torch: a checkpoint of 60 GB is planned in well under a second.
"""

from hetero_runtime.plan.cuda_driver import Gpu
from hetero_runtime.plan.geometry import Geometry, read_geometry
from hetero_runtime.plan.hardware import Hardware, detect
from hetero_runtime.plan.planner import MemoryPlan, make_plan
from hetero_runtime.plan.report import render_plan, to_json

__all__ = [
    "Geometry",
    "Gpu",
    "Hardware",
    "MemoryPlan",
    "detect",
    "make_plan",
    "read_geometry",
    "render_plan",
    "to_json",
]
