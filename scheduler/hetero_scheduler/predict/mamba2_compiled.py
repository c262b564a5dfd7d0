"""One group's model, compiled for one text: a step and its recursive ones in one call, without torch.

torch launches some hundred operations for each step of a forecast, each of them longer to
launch than to compute. Here the same arithmetic is one loop, some ten times as fast; sums have another
order, so results equal torch's up to rounding. Shapes: F = n · E features, D the model's width, B blocks, P
rows of the input projection, C channels of the convolution, H heads.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Self, cast

import numpy as np
import numpy.typing as npt
import torch

from hetero_scheduler.compiled import compiled
from hetero_scheduler.predict.mamba2_block import NORM_EPS, BlockState
from hetero_scheduler.predict.mamba2_model import GroupModel, ResidualMixer

Floats = npt.NDArray[np.float32]
_LINEAR_FROM = 20.0
"""Where softplus is its argument, in torch's words its threshold."""
_compiled = compiled(nogil=True, fastmath={"reassoc", "contract", "nsz"})


class Weights(NamedTuple):
    """Parameters as the loops read them, float32, rows together."""

    project: Floats
    """`[F, D]`: transposed, since only the activated features are read."""
    project_bias: Floats
    norm: Floats
    """`[B, D]`"""
    in_proj: Floats
    """`[B, P, D]`"""
    conv: Floats
    """`[B, C, kernel]`"""
    conv_bias: Floats
    dt_bias: Floats
    """`[B, H]`"""
    decay: Floats
    """`[B, H]`: the exponential of A_log."""
    skip: Floats
    """`[B, H]`: D of the recurrence."""
    gated_norm: Floats
    """`[B, inner]`"""
    out_proj: Floats
    """`[B, D, inner]`"""
    final_norm: Floats
    head: Floats
    """`[F, D]`"""
    head_bias: Floats

    @classmethod
    def of(cls, model: GroupModel) -> Self:
        """Copies of the parameters of `model`."""
        blocks = cast("list[ResidualMixer]", list(model.layers))
        mixers = [block.mixer for block in blocks]
        return cls(
            project=_array(model.project.weight.T),
            project_bias=_array(model.project.bias),
            norm=_stack(block.norm.weight for block in blocks),
            in_proj=_stack(mixer.in_proj.weight for mixer in mixers),
            conv=_stack(mixer.conv1d.weight[:, 0] for mixer in mixers),
            conv_bias=_stack(cast("torch.Tensor", mixer.conv1d.bias) for mixer in mixers),
            dt_bias=_stack(mixer.dt_bias for mixer in mixers),
            decay=_stack(mixer.A_log.exp() for mixer in mixers),
            skip=_stack(mixer.D for mixer in mixers),
            gated_norm=_stack(mixer.norm.weight for mixer in mixers),
            out_proj=_stack(mixer.out_proj.weight for mixer in mixers),
            final_norm=_array(model.norm_f.weight),
            head=_array(model.head.weight),
            head_bias=_array(model.head.bias),
        )


class CompiledState(NamedTuple):
    """What the blocks of one text remember, written in place."""

    conv: Floats
    """`[B, C, kernel - 1]`"""
    ssm: Floats
    """`[B, H, head_dim, N]`"""

    @classmethod
    def of(cls, state: tuple[BlockState, ...]) -> Self:
        """A copy of torch's state of one sequence."""
        return cls(_stack(block.conv[0] for block in state), _stack(block.ssm[0] for block in state))


def advance(
    weights: Weights, state: CompiledState, router_logits: Floats, *, top_k: int, horizon: int
) -> Floats:
    """`router_logits` `[n, E]`: what the group's routers said now. Moves `state` on by this step.

    Returns the shares expected in the next `horizon` steps, `[horizon, n, E]`.
    """
    shares = np.empty((horizon, *router_logits.shape), np.float32)
    logits = np.empty_like(router_logits)
    _advance(weights, state, router_logits, top_k, logits)
    _roll_out(weights, CompiledState(state.conv.copy(), state.ssm.copy()), logits, top_k, shares)
    return shares


def roll_out(weights: Weights, state: CompiledState, logits: Floats, *, top_k: int, horizon: int) -> Floats:
    """From the one-step `logits` `[n, E]`, which become the first entry, predict recursively; `state` stays.

    Returns `[horizon, n, E]`.
    """
    shares = np.empty((horizon, *logits.shape), np.float32)
    _roll_out(weights, CompiledState(state.conv.copy(), state.ssm.copy()), logits.copy(), top_k, shares)
    return shares


def _array(tensor: torch.Tensor) -> Floats:
    return np.array(tensor.detach().float().cpu().numpy(), dtype=np.float32, order="C")


def _stack(tensors: Any) -> Floats:
    return np.stack([_array(tensor) for tensor in tensors])


# ---- compiled: scalar loops only, which compile several times as fast as expressions of arrays


@_compiled
def _roll_out(weights: Any, state: Any, logits: Any, top_k: Any, shares: Any) -> None:
    """`state` and `logits` are written over."""
    for i in range(shares.shape[0]):
        if i:
            _advance(weights, state, logits, top_k, logits)
        for layer in range(logits.shape[0]):
            _softmax(logits[layer], shares[i, layer])


@_compiled
def _advance(weights: Any, state: Any, router_logits: Any, top_k: Any, logits: Any) -> None:
    """One step: the `top_k` of each layer count as activated. `logits` `[n, E]` is filled."""
    num_layers, num_experts = router_logits.shape
    width = weights.project_bias.size
    hidden, normed = weights.project_bias.copy(), np.empty(width, np.float32)
    chosen, shares = np.empty(top_k, np.int64), np.empty(top_k, np.float32)
    for layer in range(num_layers):
        _choose(router_logits[layer], chosen, shares)
        for k in range(top_k):
            row, share = weights.project[layer * num_experts + chosen[k]], shares[k]
            for i in range(width):
                hidden[i] += share * row[i]
    for block in range(weights.norm.shape[0]):
        _norm(hidden, weights.norm[block], normed)
        _mix(weights, state, block, normed, hidden)
    _norm(hidden, weights.final_norm, normed)
    for layer in range(num_layers):
        for expert in range(num_experts):
            feature = layer * num_experts + expert
            logits[layer, expert] = weights.head_bias[feature] + _dot(weights.head[feature], normed)


@_compiled
def _mix(weights: Any, state: Any, block: Any, inputs: Any, hidden: Any) -> None:
    """One mixer's step on `inputs` `[D]`, added to `hidden` `[D]`; the block's state is written over."""
    inner, channels = weights.gated_norm.shape[1], weights.conv.shape[1]
    num_heads, head_dim, num_states = state.ssm.shape[1:]
    mixed = np.empty(weights.in_proj.shape[1], np.float32)
    for row in range(mixed.size):
        mixed[row] = _dot(weights.in_proj[block, row], inputs)
    for channel in range(channels):
        i = inner + channel
        kernel, window = weights.conv[block, channel], state.conv[block, channel]
        mixed[i] = _silu(weights.conv_bias[block, channel] + _convolve(kernel, window, mixed[i]))
    x, b = mixed[inner : 2 * inner], mixed[2 * inner : 2 * inner + num_states]
    c = mixed[2 * inner + num_states : inner + channels]
    out, normed = np.empty(inner, np.float32), np.empty(inner, np.float32)
    for head in range(num_heads):
        dt = _softplus(mixed[inner + channels + head] + weights.dt_bias[block, head])
        kept = np.float32(math.exp(-dt * weights.decay[block, head]))
        for p in range(head_dim):
            i = head * head_dim + p
            y = _remember(state.ssm[block, head, p], kept, dt * x[i], b, c)
            out[i] = (y + weights.skip[block, head] * x[i]) * _silu(mixed[i])
    _norm(out, weights.gated_norm[block], normed)
    for i in range(hidden.size):
        hidden[i] += _dot(weights.out_proj[block, i], normed)


@_compiled
def _remember(memory: Any, kept: Any, taken: Any, b: Any, c: Any) -> Any:
    """One row `[N]` of a head's state moves on; what it contributes."""
    total = np.float32(0)
    for n in range(memory.size):
        memory[n] = memory[n] * kept + taken * b[n]
        total += memory[n] * c[n]
    return total


@_compiled
def _convolve(kernel: Any, window: Any, newest: Any) -> Any:
    """A channel's convolution at the newest input; `window` `[kernel - 1]`, the inputs before, moves on."""
    total = kernel[window.size] * newest
    for i in range(window.size):
        total += kernel[i] * window[i]
        window[i] = window[i + 1] if i + 1 < window.size else newest
    return total


@_compiled
def _dot(left: Any, right: Any) -> Any:
    total = np.float32(0)
    for i in range(right.size):
        total += left[i] * right[i]
    return total


@_compiled
def _norm(vector: Any, weight: Any, out: Any) -> None:
    scale = np.float32(1 / math.sqrt(_dot(vector, vector) / vector.size + NORM_EPS))
    for i in range(vector.size):
        out[i] = vector[i] * scale * weight[i]


@_compiled
def _silu(value: Any) -> Any:
    return np.float32(value / (1 + math.exp(-value)))


@_compiled
def _softplus(value: Any) -> Any:
    return np.float32(value if value > _LINEAR_FROM else math.log1p(math.exp(value)))


@_compiled
def _softmax(logits: Any, out: Any) -> None:
    greatest, total = logits[0], np.float32(0)
    for value in logits:
        greatest = max(greatest, value)
    for i in range(logits.size):
        out[i] = math.exp(logits[i] - greatest)
        total += out[i]
    for i in range(logits.size):
        out[i] /= total


@_compiled
def _choose(logits: Any, chosen: Any, shares: Any) -> None:
    """The greatest of `logits`, greatest first, ties to the lowest, and their softmax. `[top_k]` each."""
    for k in range(chosen.size):
        best = -1
        for i in range(logits.size):
            is_taken = False
            for j in range(k):
                is_taken = is_taken or chosen[j] == i
            if not is_taken and (best < 0 or logits[i] > logits[best]):
                best = i
        chosen[k], shares[k] = best, logits[best]
    _softmax(shares, shares)
