"""Which router of one launch a module of transformers is.

    softmax                          product, softmax, top-k: `hetero_gpu.router`
    sigmoid, correction, groups      product, scores, groups, top-k: `hetero_gpu.score_router`

What a module is comes out of comparing it with the kernels on random input, with its own weights, not out of
its name; numbers that a comparison could not tell exactly (groups, the factor of weights) are read from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional

from hetero_gpu.router import MOST_TOKENS, Router, route
from hetero_gpu.score_router import ScoreForm, ScoreRouter
from hetero_gpu.weigh import WeightRule
from hetero_runtime.hf.router_choice import router_arguments
from hetero_runtime.hf.sameness import TOLERANCE, relative_error

_CHECKED = 32
"""Tokens; more than a few, because two rules may choose alike for some."""
_LAUNCHED = 8
"""Of them, tokens that the single launch, whose product this tells of, is asked about."""
_CORRECTION = "e_score_correction_bias"


def is_top_k_router(module: Any) -> bool:
    """Whether `module` may be one, by its name in transformers."""
    return type(module).__name__.lower().endswith("topkrouter")


def small_router(block: Any, module: Any, dtype: torch.dtype) -> Router | ScoreRouter | None:
    """The router that `module` of the MoE `block` is on vectors of type `dtype`; None: another thing."""
    hidden = torch.randn(_CHECKED, module.weight.shape[1], device=module.weight.device, dtype=dtype)
    try:
        stock = module(hidden, *router_arguments(block, module.forward))
    except (AttributeError, TypeError, RuntimeError):  # takes what its block does not have
        return None
    return _softmax_router(module, hidden, stock) or _score_router(block, module, hidden, stock)


# ---- softmax


def _softmax_router(module: Any, hidden: torch.Tensor, stock: Any) -> Router | None:
    """Product, softmax and top-k, in either order of these two, with or without a bias."""
    weight, bias = module.weight, getattr(module, "bias", None)
    if weight.dtype != hidden.dtype:
        return None
    logits, tolerance = functional.linear(hidden, weight, bias), TOLERANCE[hidden.dtype]
    if logits.dtype != stock[0].dtype or not torch.equal(logits, stock[0]):
        return None
    for is_renormalised in (False, True):
        rule = {"top_k": stock[2].shape[-1], "is_renormalised": is_renormalised, "dtype": stock[1].dtype}
        if _agree(logits, route(logits, **rule), stock[1:], tolerance):
            router = Router(weight, bias, **rule)
            return router if _is_exact(router, hidden, logits, rule) else None
    return None


def _is_exact(router: Router, hidden: torch.Tensor, expected: torch.Tensor, rule: dict[str, Any]) -> bool:
    """Whether the single launch gives the same logits but for rounding, and chooses from them by the rule."""
    tolerance = TOLERANCE[hidden.dtype]
    of_launches = zip(hidden[:_LAUNCHED].split(MOST_TOKENS), expected.split(MOST_TOKENS), strict=False)
    for tokens, theirs in of_launches:
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


# ---- scores


def _score_router(block: Any, module: Any, hidden: torch.Tensor, stock: Any) -> ScoreRouter | None:
    logits, _, own = stock
    correction = getattr(module, _CORRECTION, getattr(block, _CORRECTION, None))
    for form in _forms(module, own.shape[-1], is_sigmoid=correction is not None):
        router = ScoreRouter(module.weight, correction, form=form, dtype=logits.dtype)
        if _says_the_same(router, stock) and _is_one_launch_exact(router, hidden, logits):
            return router
    return None


def _forms(module: Any, top_k: int, *, is_sigmoid: bool) -> Iterator[ScoreForm]:
    """What `module` may be, by its own numbers."""
    num_groups, kept = getattr(module, "num_group", None) or 1, getattr(module, "topk_group", None) or 1
    scale = float(getattr(module, "routed_scaling_factor", 1.0))
    for groups in dict.fromkeys(((num_groups, kept), (1, 1))):
        for is_renormalised in (False, True):
            weighing = WeightRule(is_renormalised, is_sigmoid, scale)
            yield ScoreForm(module.weight.shape[0], top_k, weighing, *groups)


def _says_the_same(router: ScoreRouter, stock: Any) -> bool:
    """Whether `router` scores, chooses and weighs by the same logits as `stock` did (logits, weights,
    experts, whose order is no matter)."""
    logits, weights, own = stock
    scored, tolerance = router.choose(logits), TOLERANCE[torch.float32]
    ours, theirs = (scored.scores.gather(1, chosen).sort().values for chosen in (scored.experts, own))
    if not torch.allclose(ours, theirs, atol=tolerance):
        return False
    errors = (
        relative_error(router.weigh(logits, own), weights),
        relative_error(scored.weights, router.weigh(logits, scored.experts)),
    )
    return max(errors) <= tolerance


def _is_one_launch_exact(router: ScoreRouter, hidden: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether it gives the `expected` logits but for rounding, and goes on from them as from any others."""
    of_launches = zip(hidden[:_LAUNCHED].split(MOST_TOKENS), expected.split(MOST_TOKENS), strict=False)
    for tokens, theirs in of_launches:
        scored = router(tokens)
        if relative_error(scored.logits, theirs) > TOLERANCE[expected.dtype]:
            return False
        if not all(map(torch.equal, scored, router.choose(scored.logits))):
            return False
    return True
