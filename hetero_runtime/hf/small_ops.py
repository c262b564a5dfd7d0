"""One launch where transformers' modules take many: RMS norms, residual sums before them, routers; two for
gated MLPs.

A module is replaced only after it and the kernel gave the same on random input, on the spot, with the
module's own weights; whatever fails is left as it is. Which variant a module is comes out of that comparison,
not out of its name. For models on a GPU. A router that a policy steers must not be replaced here: the kernel
chooses the best, nothing else (`small_choice` is for those).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from hetero_gpu.norms import NormForm, rms_norm, rms_norm_reference
from hetero_gpu.router import Router
from hetero_gpu.score_router import ScoreRouter
from hetero_runtime.hf.residuals import FusedNorm, fuse_residuals
from hetero_runtime.hf.sameness import TOLERANCE, relative_error
from hetero_runtime.hf.small_mlps import gated_mlp, may_be_gated_mlp
from hetero_runtime.hf.small_routers import is_top_k_router, small_router

_NORM_FORMS = tuple(
    NormForm(adds_one, rounds_first) for adds_one in (False, True) for rounds_first in (True, False)
)
_CHECKED_TOKENS = 8

Forward = Callable[..., Any]


class SmallOps(NamedTuple):
    """What was replaced. `num_layers`: decoder layers whose residual sums are taken together with norms.
    `left`: modules of a kind that can be replaced, but that compute something else."""

    num_norms: int
    num_routers: int
    num_mlps: int
    num_layers: int
    left: tuple[str, ...]


@torch.inference_mode()
def install_small_ops(model: Any, *, routers: bool = True) -> SmallOps:
    """Replace what can be in `model`; `routers=False` leaves routers alone."""
    num_norms, num_routers, num_mlps, left = 0, 0, 0, []
    forward: Forward | None
    for name, module in model.named_modules():
        kind = type(module).__name__
        if kind.endswith("RMSNorm") and hasattr(module, "weight"):
            forward = _norm_forward(module, model.dtype)
            num_norms += forward is not None
        elif routers and is_top_k_router(module):
            block = model.get_submodule(name.rpartition(".")[0])
            forward = _router_forward(block, module, model.dtype)
            num_routers += forward is not None
        elif may_be_gated_mlp(module):
            forward = gated_mlp(module)
            num_mlps += forward is not None
        else:
            continue
        if forward is None:
            left.append(name)
        else:
            module.forward = forward
    return SmallOps(num_norms, num_routers, num_mlps, fuse_residuals(model), tuple(left))


def remove_small_ops(model: Any) -> None:
    """Give every module its own forward back."""
    for module in model.modules():
        if getattr(module.__dict__.get("forward"), "is_small_op", False):
            del module.forward


def norm_form(module: Any, dtype: torch.dtype) -> NormForm | None:
    """Which RMS norm `module` computes on vectors of type `dtype`; None: another thing."""
    weight, eps = module.weight, norm_eps(module)
    if eps is None or weight.dim() != 1:
        return None
    hidden = torch.randn(_CHECKED_TOKENS, weight.shape[0], device=weight.device, dtype=dtype)
    stock = module(hidden)
    errors = {
        form: relative_error(rms_norm_reference(hidden, weight, eps=eps, form=form), stock)
        for form in _NORM_FORMS
    }
    form = min(errors, key=errors.__getitem__)
    if errors[form] > TOLERANCE[dtype]:
        return None
    is_same = relative_error(rms_norm(hidden, weight, eps=eps, form=form), stock) <= TOLERANCE[dtype]
    return form if is_same else None


def norm_eps(module: Any) -> float | None:
    """Under either name that transformers has for it."""
    return getattr(module, "variance_epsilon", getattr(module, "eps", None))


def _norm_forward(module: Any, dtype: torch.dtype) -> FusedNorm | None:
    eps, form = norm_eps(module), norm_form(module, dtype)
    return None if eps is None or form is None else FusedNorm(module, eps, form)


def _router_forward(block: Any, module: Any, dtype: torch.dtype) -> RouterForward | None:
    router = small_router(block, module, dtype)
    return None if router is None else RouterForward(router)


class RouterForward:
    """The forward of a router of one launch. Gives logits, weights and experts, as transformers' do."""

    is_small_op = True

    def __init__(self, router: Router | ScoreRouter) -> None:
        self._router = router

    def __call__(
        self, hidden_states: torch.Tensor, *_: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        hidden = hidden_states.reshape(-1, hidden_states.shape[-1])
        if isinstance(self._router, Router):
            return self._router(hidden)
        scored = self._router(hidden)
        return scored.logits, scored.weights, scored.experts

    def choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The same, of tokens whose `logits` `[tokens, experts]` are known."""
        if isinstance(self._router, Router):
            return logits, *self._router.choose(logits)
        scored = self._router.choose(logits)
        return logits, scored.weights, scored.experts
