"""One head of one block moves on by one input: Mamba2's recurrence, and its share of the block's output.

A block needs two sums over all of its heads: the mean square of the gated norm, and the output projection.
Both are linear in what a head computes alone: `out = Σ_h W_h (y_h · g_h) · scale`, and the scale is a number
that is known once all heads are through. So heads leave their parts, and whoever reads a block's output adds
them up; between two blocks there is one exchange, not three.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"
# ruff: noqa: N803, N806 (compile-time constants are written in capitals)

from __future__ import annotations

import triton
import triton.language as tl

from hetero_scheduler.predict.mamba2_block import NORM_EPS

_EPS = tl.constexpr(NORM_EPS)
_LAST_TERM = tl.constexpr(13)
"""Of the series in `_softplus`: what comes after it is below 5e-9."""


@triton.jit
def mix_head(row, head, block, step, weights, memory, scratch, NUM_ROWS: tl.constexpr, SIZES: tl.constexpr):
    """`row`'s `head` of `block` at `step` (0: what was routed, then recursive ones). Its parts go to scratch.

    Weights are asked for first: they are old, and under way while the input is added up.
    """
    D: tl.constexpr = SIZES.width
    INNER: tl.constexpr = SIZES.heads * SIZES.head_dim
    CHANNELS: tl.constexpr = INNER + 2 * SIZES.states
    dims = tl.arange(0, triton.next_power_of_2(SIZES.head_dim))
    states = tl.arange(0, triton.next_power_of_2(SIZES.states))
    is_dim, is_state = dims < SIZES.head_dim, states < SIZES.states
    own = head * SIZES.head_dim + dims
    in_proj = weights.in_proj + block * ((INNER + CHANNELS + SIZES.heads) * D)
    gate_weight = load_matrix(in_proj, own, is_dim, D)
    x_weight = load_matrix(in_proj, INNER + own, is_dim, D)
    b_weight = load_matrix(in_proj, 2 * INNER + states, is_state, D)
    c_weight = load_matrix(in_proj, 2 * INNER + SIZES.states + states, is_state, D)
    features = tl.arange(0, triton.next_power_of_2(D))
    is_feature = features < D
    dt_row = (INNER + CHANNELS + head) * D
    dt_weight = tl.load(in_proj + dt_row + features, mask=is_feature, other=0.0).to(tl.float32)

    if block == 0:
        hidden = _first_input(row, weights, scratch, SIZES)
    else:
        hidden = output_of(block - 1, row, scratch, SIZES)
    if head == 0:
        tl.store(scratch.hidden + (row * SIZES.blocks + block) * D + features, hidden, mask=is_feature)
    normed = norm_features(hidden, weights.norm + block * D, D)

    x = _convolve(apply_matrix(x_weight, normed), own, is_dim, True, row, block, step, weights, memory, SIZES)
    is_first = head == 0  # B and C are those of all heads: one keeps their inputs
    b = _convolve(
        apply_matrix(b_weight, normed), INNER + states, is_state, is_first, row, block, step,
        weights, memory, SIZES,
    )  # fmt: skip
    c = _convolve(
        apply_matrix(c_weight, normed), INNER + SIZES.states + states, is_state, is_first, row, block, step,
        weights, memory, SIZES,
    )  # fmt: skip
    at = block * SIZES.heads + head
    dt = _softplus(tl.sum(dt_weight * normed, 0) + tl.load(weights.dt_bias + at))
    kept = tl.exp(-dt * tl.load(weights.decay + at))
    y = _remember(kept, dt * x, b, c, row, at, step, memory, NUM_ROWS, SIZES)
    gate = apply_matrix(gate_weight, normed)
    y = (y + tl.load(weights.skip + at) * x) * _silu(gate)
    _store_parts(y, own, is_dim, row, block, head, weights, scratch, SIZES)


@triton.jit
def output_of(block, row, scratch, SIZES: tl.constexpr):
    """`[width]`: what went into `block` of `row` and what its heads made of it, added up."""
    D: tl.constexpr = SIZES.width
    features = tl.arange(0, triton.next_power_of_2(D))
    heads = tl.arange(0, triton.next_power_of_2(SIZES.heads))
    is_head = heads < SIZES.heads
    at = row * SIZES.blocks + block
    parts = load_matrix(scratch.mixed + at * (SIZES.heads * D), heads, is_head, D)
    before = tl.load(scratch.hidden + at * D + features, mask=features < D, other=0.0)
    energy = tl.load(scratch.energy + at * SIZES.heads + heads, mask=is_head, other=0.0)
    scale = tl.rsqrt(tl.sum(energy, 0) / (SIZES.heads * SIZES.head_dim) + _EPS)
    return before + tl.sum(parts, 0) * scale


@triton.jit
def _first_input(row, weights, scratch, SIZES: tl.constexpr):
    """`[width]`: the input projection of `row`, added up over the layers."""
    D: tl.constexpr = SIZES.width
    features = tl.arange(0, triton.next_power_of_2(D))
    layers = tl.arange(0, triton.next_power_of_2(SIZES.layers))
    parts = load_matrix(scratch.taken_in + row * (SIZES.layers * D), layers, layers < SIZES.layers, D)
    return tl.load(weights.project_bias + features, mask=features < D, other=0.0) + tl.sum(parts, 0)


@triton.jit
def norm_features(hidden, weight, D: tl.constexpr):
    """RMS norm of `hidden` `[width]`, whose padding is 0."""
    features = tl.arange(0, triton.next_power_of_2(D))
    weight = tl.load(weight + features, mask=features < D, other=0.0)
    return hidden * tl.rsqrt(tl.sum(hidden * hidden, 0) / D + _EPS) * weight


@triton.jit
def load_matrix(matrix, rows, is_row, COLS: tl.constexpr):
    """Rows `rows` of a matrix `[..., COLS]` in float32; padding is 0."""
    cols = tl.arange(0, triton.next_power_of_2(COLS))
    mask = is_row[:, None] & (cols < COLS)[None, :]
    return tl.load(matrix + rows[:, None] * COLS + cols[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def apply_matrix(matrix, vector):
    """`[outputs]`"""
    return tl.sum(matrix * vector[None, :], 1)


@triton.jit
def keep_window(row, block, memory, SIZES: tl.constexpr):
    """The window moves on by the newest input; what recursive steps put behind it is forgotten."""
    CHANNELS: tl.constexpr = SIZES.heads * SIZES.head_dim + 2 * SIZES.states
    if SIZES.window > 0:
        inputs = memory.inputs + (row * SIZES.blocks + block) * ((SIZES.window + SIZES.horizon) * CHANNELS)
        taps = tl.arange(0, triton.next_power_of_2(SIZES.window))
        channels = tl.arange(0, triton.next_power_of_2(CHANNELS))
        at = inputs + taps[:, None] * CHANNELS + channels[None, :]
        mask = (taps < SIZES.window)[:, None] & (channels < CHANNELS)[None, :]
        moved = tl.load(at + CHANNELS, mask=mask)
        tl.debug_barrier()  # all threads have read before one of them writes
        tl.store(at, moved, mask=mask)


@triton.jit
def _convolve(newest, channels, mask, is_kept, row, block, step, weights, memory, SIZES: tl.constexpr):
    """The convolution of `channels` at the `newest` input, which is put in line where `is_kept`."""
    CHANNELS: tl.constexpr = SIZES.heads * SIZES.head_dim + 2 * SIZES.states
    WINDOW: tl.constexpr = SIZES.window
    inputs = memory.inputs + ((row * SIZES.blocks + block) * (WINDOW + SIZES.horizon) + step) * CHANNELS
    kernel = weights.conv + (block * CHANNELS + channels) * (WINDOW + 1)
    total = tl.load(weights.conv_bias + block * CHANNELS + channels, mask=mask, other=0.0)
    total += tl.load(kernel + WINDOW, mask=mask, other=0.0) * newest
    for tap in tl.static_range(WINDOW):
        before = tl.load(inputs + tap * CHANNELS + channels, mask=mask, other=0.0)
        total += tl.load(kernel + tap, mask=mask, other=0.0) * before
    tl.store(inputs + WINDOW * CHANNELS + channels, newest, mask=mask & is_kept)
    return _silu(total)


@triton.jit
def _remember(kept, taken, b, c, row, at, step, memory, NUM_ROWS: tl.constexpr, SIZES: tl.constexpr):
    """The head's state `[head_dim, states]` moves on; what it contributes, `[head_dim]`."""
    PLACE: tl.constexpr = NUM_ROWS * SIZES.blocks * SIZES.heads
    dims = tl.arange(0, triton.next_power_of_2(SIZES.head_dim))
    own = memory.recurrence + (row * (SIZES.blocks * SIZES.heads) + at) * (SIZES.head_dim * SIZES.states)
    recursive = own + PLACE * (SIZES.head_dim * SIZES.states)
    source, target = own, own
    if step > 1:
        source = recursive
    if step > 0:
        target = recursive
    state = load_matrix(source, dims, dims < SIZES.head_dim, SIZES.states)
    state = state * kept + taken[:, None] * b[None, :]
    states = tl.arange(0, triton.next_power_of_2(SIZES.states))
    tl.debug_barrier()  # all threads have read before one of them writes
    tl.store(
        target + dims[:, None] * SIZES.states + states[None, :],
        state,
        mask=(dims < SIZES.head_dim)[:, None] & (states < SIZES.states)[None, :],
    )
    return tl.sum(state * c[None, :], 1)


@triton.jit
def _store_parts(y, own, is_dim, row, block, head, weights, scratch, SIZES: tl.constexpr):
    """The head's part of the output projection `[width]`, and of the norm that is still to come."""
    D: tl.constexpr = SIZES.width
    INNER: tl.constexpr = SIZES.heads * SIZES.head_dim
    features = tl.arange(0, triton.next_power_of_2(D))
    is_feature = features < D
    out_proj = tl.load(
        weights.out_proj + (block * D + features)[:, None] * INNER + own[None, :],
        mask=is_feature[:, None] & is_dim[None, :],
        other=0.0,
    ).to(tl.float32)
    weighted = y * tl.load(weights.gated_norm + block * INNER + own, mask=is_dim, other=0.0)
    at = (row * SIZES.blocks + block) * SIZES.heads + head
    tl.store(scratch.mixed + at * D + features, tl.sum(out_proj * weighted[None, :], 1), mask=is_feature)
    tl.store(scratch.energy + at, tl.sum(y * y, 0))


@triton.jit
def _silu(value):
    return value / (1.0 + tl.exp(-value))


@triton.jit
def _softplus(value):
    """log(1 + exp(value)), small results as exact as large ones: log(1 + e) = 2 artanh(e / (2 + e))."""
    small = tl.exp(-tl.abs(value))
    ratio = small / (2.0 + small)  # at most 1/3
    power, total = ratio, ratio
    for term in tl.static_range(3, _LAST_TERM + 1, 2):
        power *= ratio * ratio
        total += power / term
    return tl.maximum(value, 0.0) + 2.0 * total
