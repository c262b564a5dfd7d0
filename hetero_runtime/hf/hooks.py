"""Our experts function in transformers' experts registry.

transformers looks the function up by name at every call (`config._experts_implementation`) and hands it the
Experts module, so what belongs to one engine hangs on its own modules and two engines share nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.integrations.moe import ExpertsInterface

from hetero_runtime.experts.compute import ExpertMlp

IMPLEMENTATION = "hetero_runtime"
RunLayer = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""`run_layer(layer, hidden, top_k_index, top_k_weights) -> output`."""

_HOOK = "_hetero_hook"


def attach(experts: list[torch.nn.Module], run_layer: RunLayer) -> None:
    """Make the i-th Experts module compute by `run_layer(i, ...)`."""
    for layer, module in enumerate(experts):
        # past nn.Module.__setattr__, which would try to register what it is given
        object.__setattr__(module, _HOOK, (layer, run_layer))


def expert_mlp(module: torch.nn.Module) -> ExpertMlp:
    """The computation of one expert, from the flags on its Experts module."""
    flags: Any = module
    return ExpertMlp(
        activate=flags._apply_gate if flags.has_gate else flags.act_fn,
        up_name="gate_up_proj" if flags.has_gate else "up_proj",
        is_transposed=flags.is_transposed,
        post_norm=flags.post_expert_norm if getattr(flags, "has_post_expert_norm", False) else None,
    )


def _run_experts(
    module: torch.nn.Module, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    layer, run_layer = getattr(module, _HOOK)
    output: torch.Tensor = run_layer(layer, hidden, top_k_index, top_k_weights)
    return output


ExpertsInterface.register(IMPLEMENTATION, _run_experts)
