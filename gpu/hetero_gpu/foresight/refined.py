"""Forecasts of the step that runs, made anew on the device whenever more is known of it.

    token sampled             ─► with_tokens        every layer    p' ∝ p^scale · exp(head · u(token) + bias)
    next router, asked early  ─► with_next_router   one layer      p'' ∝ p'^a · q^b

What `hetero_scheduler.predict.Refinement` does, in place: entry 0 of the windows' probabilities stands for
the run at hand. A row whose layer has no forecast of that run has nothing to refine, and rows that do not
step keep what they have. One program a layer and row. Device work alone.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from hetero_gpu.tables import Windows
from hetero_scheduler.predict.refinement import SMALLEST, Refinement

_SMALLEST = tl.constexpr(float(SMALLEST))


class RefinedForecasts:
    """See the module docstring. `refinement`: of the model that `windows` are of."""

    def __init__(self, windows: Windows, refinement: Refinement) -> None:
        """Copy the weights to the device. Raises ValueError for a refinement of another model."""
        if refinement.bias.shape != windows.probabilities.shape[2:]:
            raise ValueError(
                f"a refinement of {refinement.bias.shape} layers and experts for forecasts of "
                f"{tuple(windows.probabilities.shape[2:])}"
            )
        self._windows = windows
        self._scale, self._bias = self._put(refinement.scale), self._put(refinement.bias)
        self._embedding, self._head = self._put(refinement.embedding), self._put(refinement.head)
        self._pool = None if refinement.pool is None else self._put(refinement.pool)

    def with_tokens(self, tokens: torch.Tensor, active: torch.Tensor) -> None:
        """The rows in `active` (bool `[stepping rows]`) begin a step with `tokens` (int64, as many): all
        layers are foreseen anew, and scored."""
        windows = self._windows
        rows, horizon, num_layers, num_experts = windows.probabilities.shape
        num_tokens, rank = self._embedding.shape
        assert len(active) <= min(rows, len(tokens)), "a token for each row that steps"
        _token_kernel[(num_layers, len(active))](
            windows.probabilities,
            windows.window,
            active,
            tokens,
            self._scale,
            self._embedding,
            self._head,
            self._bias,
            NUM_TOKENS=num_tokens,
            RANK=rank,
            HORIZON=horizon,
            NUM_EXPERTS=num_experts,
            RANK_BLOCK=triton.next_power_of_2(rank),
            EXPERT_BLOCK=triton.next_power_of_2(num_experts),
            num_warps=4,
        )
        windows.rescore(range(num_layers), active)

    def with_next_router(self, layer: int, logits: torch.Tensor, active: torch.Tensor) -> None:
        """The router of `layer`, which runs next, says `logits` `[stepping rows, experts]` to the input of
        the layer before it: `layer` is foreseen anew, and scored. Raises ValueError for a refinement without
        `pool`."""
        if self._pool is None:
            raise ValueError("this refinement has learned nothing of routers that are asked early")
        windows = self._windows
        _, horizon, num_layers, num_experts = windows.probabilities.shape
        assert logits.shape == (len(active), num_experts), f"logits {tuple(logits.shape)}"
        _router_kernel[(len(active),)](
            windows.probabilities,
            windows.window,
            active,
            logits,
            self._pool,
            layer,
            logits.stride(0),
            HORIZON=horizon,
            NUM_LAYERS=num_layers,
            NUM_EXPERTS=num_experts,
            EXPERT_BLOCK=triton.next_power_of_2(num_experts),
            num_warps=1,
        )
        windows.rescore(range(layer, layer + 1), active)

    def _put(self, weights: npt.NDArray[np.float32]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(weights)).to(self._windows.probabilities.device)


@triton.jit  # type: ignore[untyped-decorator]
def _token_kernel(  # type: ignore[no-untyped-def]
    probabilities,
    window,
    active,
    tokens,
    scale,
    embedding,
    head,
    bias,
    NUM_TOKENS: tl.constexpr,  # noqa: N803
    RANK: tl.constexpr,  # noqa: N803
    HORIZON: tl.constexpr,  # noqa: N803
    NUM_EXPERTS: tl.constexpr,  # noqa: N803
    RANK_BLOCK: tl.constexpr,  # noqa: N803
    EXPERT_BLOCK: tl.constexpr,  # noqa: N803
):
    layer, row, num_layers = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    if (tl.load(active + row) != 0) & (tl.load(window + row * num_layers + layer) == 0):
        experts, ranks = tl.arange(0, EXPERT_BLOCK), tl.arange(0, RANK_BLOCK)
        is_expert, is_rank = experts < NUM_EXPERTS, ranks < RANK
        own = layer * NUM_EXPERTS + experts
        shares = probabilities + row * (HORIZON * num_layers * NUM_EXPERTS) + own
        token = tl.load(tokens + row)
        is_known = (token >= 0) & (token < NUM_TOKENS)
        embedded = tl.load(embedding + token * RANK + ranks, mask=is_rank & is_known, other=0.0)
        matrix = tl.load(
            head + own[:, None] * RANK + ranks[None, :],
            mask=is_expert[:, None] & is_rank[None, :],
            other=0.0,
        )
        logits = tl.load(scale + layer) * _logs(tl.load(shares, mask=is_expert, other=1.0))
        logits += tl.sum(matrix * embedded[None, :], axis=1)
        logits += tl.load(bias + own, mask=is_expert, other=0.0)
        tl.store(shares, _normalised(logits, is_expert), mask=is_expert)


@triton.jit(do_not_specialize=["layer"])  # type: ignore[untyped-decorator]
def _router_kernel(  # type: ignore[no-untyped-def]
    probabilities,
    window,
    active,
    router_logits,
    pool,
    layer,
    row_stride,
    HORIZON: tl.constexpr,  # noqa: N803
    NUM_LAYERS: tl.constexpr,  # noqa: N803
    NUM_EXPERTS: tl.constexpr,  # noqa: N803
    EXPERT_BLOCK: tl.constexpr,  # noqa: N803
):
    row = tl.program_id(0)
    if (tl.load(active + row) != 0) & (tl.load(window + row * NUM_LAYERS + layer) == 0):
        experts = tl.arange(0, EXPERT_BLOCK)
        is_expert = experts < NUM_EXPERTS
        shares = probabilities + (row * (HORIZON * NUM_LAYERS) + layer) * NUM_EXPERTS + experts
        said = tl.load(router_logits + row * row_stride + experts, mask=is_expert, other=0.0)
        early = _logs(_normalised(said.to(tl.float32), is_expert))
        logits = tl.load(pool + 2 * layer) * _logs(tl.load(shares, mask=is_expert, other=1.0))
        logits += tl.load(pool + 2 * layer + 1) * early
        tl.store(shares, _normalised(logits, is_expert), mask=is_expert)


@triton.jit
def _logs(shares):  # type: ignore[no-untyped-def]
    return tl.log(tl.maximum(shares, _SMALLEST))


@triton.jit
def _normalised(logits, is_expert):  # type: ignore[no-untyped-def]
    """Softmax over experts; 0 where there is none."""
    logits = tl.where(is_expert, logits, float("-inf"))
    weights = tl.exp(logits - tl.max(logits, axis=0))
    return weights / tl.sum(weights, axis=0)
