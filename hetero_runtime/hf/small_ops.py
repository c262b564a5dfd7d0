"""One launch where transformers' modules take many: RMS norms, residual sums before them, softmax routers.

A module is replaced only after it and the kernel gave the same on random input, on the spot, with the
module's own weights; whatever fails is left as it is. Which variant a module is comes out of that comparison,
not out of its name. For models on a GPU. A router that a policy steers must not be replaced here: the kernel
chooses the best, nothing else (`small_choice` is for those).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from hetero_gpu.norms import NormForm, rms_norm, rms_norm_reference
from hetero_gpu.router import MOST_TOKENS, Router, route
from hetero_runtime.hf.residuals import FusedNorm, fuse_residuals

_NORM_FORMS = tuple(
    NormForm(adds_one, rounds_first) for adds_one in (False, True) for rounds_first in (True, False)
)
_CHECKED_TOKENS = 8
_CHECKED_CHOICES = 32  # more, because two rules may choose alike for some
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}
"""Relative. Half types: two units in the last place. float32: sums are made in another order."""

Forward = Callable[..., Any]


class SmallOps(NamedTuple):
    """What was replaced. `num_layers`: decoder layers whose residual sums are taken together with norms.
    `left`: modules of a kind that can be replaced, but that compute something else."""

    num_norms: int
    num_routers: int
    num_layers: int
    left: tuple[str, ...]


@torch.inference_mode()
def install_small_ops(model: Any, *, routers: bool = True) -> SmallOps:
    """Replace what can be in `model`; `routers=False` leaves routers alone."""
    num_norms, num_routers, left = 0, 0, []
    forward: Forward | None
    for name, module in model.named_modules():
        kind = type(module).__name__
        if kind.endswith("RMSNorm") and hasattr(module, "weight"):
            forward = _norm_forward(module, model.dtype)
            num_norms += forward is not None
        elif routers and is_top_k_router(module):
            forward = _router_forward(module, model.dtype)
            num_routers += forward is not None
        else:
            continue
        if forward is None:
            left.append(name)
        else:
            module.forward = forward
    return SmallOps(num_norms, num_routers, fuse_residuals(model), tuple(left))


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


def is_top_k_router(module: Any) -> bool:
    """Whether `module` may be one, by its name in transformers."""
    return type(module).__name__.lower().endswith("topkrouter")


def small_router(module: Any, dtype: torch.dtype) -> Router | None:
    """The router that `module` is on vectors of type `dtype`: product, softmax and top-k, in either order of
    these two, with or without a bias; None: another thing."""
    weight, bias = module.weight, getattr(module, "bias", None)
    hidden = torch.randn(_CHECKED_CHOICES, weight.shape[1], device=weight.device, dtype=dtype)
    try:
        stock = module(hidden)
        logits = functional.linear(hidden, weight, bias)
    except (TypeError, RuntimeError):  # takes more than hidden states, or computes in a type of its own
        return None
    if logits.dtype != stock[0].dtype or not torch.equal(logits, stock[0]):
        return None
    for is_renormalised in (False, True):
        rule = {"top_k": stock[2].shape[-1], "is_renormalised": is_renormalised, "dtype": stock[1].dtype}
        if _agree(logits, route(logits, **rule), stock[1:], TOLERANCE[dtype]):
            router = Router(weight, bias, **rule)
            return router if _is_exact(router, hidden, logits, rule) else None
    return None


def _router_forward(module: Any, dtype: torch.dtype) -> Forward | None:
    router = small_router(module, dtype)
    return None if router is None else _make_router(router)


def _is_exact(router: Router, hidden: torch.Tensor, expected: torch.Tensor, rule: dict[str, Any]) -> bool:
    """Whether the single launch gives the same logits but for rounding, and chooses from them by the rule."""
    tolerance = TOLERANCE[hidden.dtype]
    for tokens, theirs in zip(hidden.split(MOST_TOKENS), expected.split(MOST_TOKENS), strict=True):
        logits, *choice = router(tokens)
        if relative_error(logits, theirs) > tolerance:
            return False
        if not _agree(logits, choice, route(logits, **rule), tolerance):
            return False
    return True


def _agree(logits: torch.Tensor, ours: Any, theirs: Any, tolerance: float) -> bool:
    """Whether two choices (weights, indices) take experts of the same logits, and weigh them alike."""
    is_same_choice = torch.equal(logits.gather(1, ours[1]), logits.gather(1, theirs[1]))
    return is_same_choice and relative_error(ours[0], theirs[0]) <= tolerance


def _make_router(router: Router) -> Forward:
    def forward(hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return router(hidden_states.reshape(-1, hidden_states.shape[-1]))

    forward.is_small_op = True  # type: ignore[attr-defined]
    return forward


def relative_error(output: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest error relative to the largest value of the vector; infinite for another type or shape."""
    if output.dtype != expected.dtype or output.shape != expected.shape:
        return float("inf")
    scale = expected.float().abs().amax(-1, keepdim=True).clamp_min(1e-30)
    return float(((output.float() - expected.float()).abs() / scale).max())
