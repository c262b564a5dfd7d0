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
def know_head(row, head, block, step, weights, memory, NUM_ROWS: tl.constexpr, SIZES: tl.constexpr):
    """What `mix_head` reads and the phase before did not write: weights, and what was before this step.

    Loads that wait for nothing; behind the first one that does, each would cost a trip to memory of its own.
    """
    D: tl.constexpr = SIZES.width
    INNER: tl.constexpr = SIZES.heads * SIZES.head_dim
    CHANNELS: tl.constexpr = INNER + 2 * SIZES.states
    dims = tl.arange(0, triton.next_power_of_2(SIZES.head_dim))
    states = tl.arange(0, triton.next_power_of_2(SIZES.states))
    is_dim, is_state = dims < SIZES.head_dim, states < SIZES.states
    own = head * SIZES.head_dim + dims
    in_proj = weights.in_proj + block * ((INNER + CHANNELS + SIZES.heads) * D)
    gate = load_matrix(in_proj, own, is_dim, D)
    x = load_matrix(in_proj, INNER + own, is_dim, D)
    b = load_matrix(in_proj, 2 * INNER + states, is_state, D)
    c = load_matrix(in_proj, 2 * INNER + SIZES.states + states, is_state, D)
    dt = load_features(in_proj + (INNER + CHANNELS + head) * D, D)
    conv_x = _know_convolution(own, is_dim, row, block, step, weights, memory, SIZES)
    conv_b = _know_convolution(INNER + states, is_state, row, block, step, weights, memory, SIZES)
    conv_c = _know_convolution(
        INNER + SIZES.states + states, is_state, row, block, step, weights, memory, SIZES
    )
    at = block * SIZES.heads + head
    state = load_matrix(_state_read(row, at, step, memory, NUM_ROWS, SIZES), dims, is_dim, SIZES.states)
    features = tl.arange(0, triton.next_power_of_2(D))
    out_proj = tl.load(
        weights.out_proj + (block * D + features)[:, None] * INNER + own[None, :],
        mask=(features < D)[:, None] & is_dim[None, :],
        other=0.0,
    ).to(tl.float32)
    gated_norm = tl.load(weights.gated_norm + block * INNER + own, mask=is_dim, other=0.0)
    dt_bias, decay = tl.load(weights.dt_bias + at), tl.load(weights.decay + at)
    scalars = (dt_bias, decay, tl.load(weights.skip + at))
    norm = load_features(weights.norm + block * D, D)
    return norm, (gate, x, b, c, dt), (conv_x, conv_b, conv_c), scalars, state, (gated_norm, out_proj)


@triton.jit
def mix_head(
    known, row, head, block, step, weights, memory, scratch, NUM_ROWS: tl.constexpr, SIZES: tl.constexpr
):
    """`row`'s `head` of `block` at `step` (0: what was routed, then recursive ones). Its parts go to scratch.

    `known`: of `know_head`.
    """
    norm, projections, convolutions, scalars, state, out = known
    gate, x_weight, b_weight, c_weight, dt_weight = projections
    D: tl.constexpr = SIZES.width
    INNER: tl.constexpr = SIZES.heads * SIZES.head_dim
    dims = tl.arange(0, triton.next_power_of_2(SIZES.head_dim))
    states = tl.arange(0, triton.next_power_of_2(SIZES.states))
    features = tl.arange(0, triton.next_power_of_2(D))
    is_dim, is_state, is_feature = dims < SIZES.head_dim, states < SIZES.states, features < D
    own = head * SIZES.head_dim + dims
    if block == 0:
        hidden = _first_input(row, weights, scratch, SIZES)
    else:
        hidden = output_of(block - 1, row, scratch, SIZES)
    if head == 0:
        tl.store(scratch.hidden + (row * SIZES.blocks + block) * D + features, hidden, mask=is_feature)
    normed = norm_features(hidden, norm, D)

    new_x, new_b = apply_matrix(x_weight, normed), apply_matrix(b_weight, normed)
    new_c = apply_matrix(c_weight, normed)
    inputs = _inputs_at(row, block, step + SIZES.window, memory, SIZES)
    tl.store(inputs + own, new_x, mask=is_dim)
    if head == 0:  # B and C are those of all heads: one keeps their inputs
        tl.store(inputs + INNER + states, new_b, mask=is_state)
        tl.store(inputs + INNER + SIZES.states + states, new_c, mask=is_state)
    x, b = _convolve(convolutions[0], new_x), _convolve(convolutions[1], new_b)
    c = _convolve(convolutions[2], new_c)

    dt_bias, decay, skip = scalars
    dt = _softplus(tl.sum(dt_weight * normed, 0) + dt_bias)
    state = state * tl.exp(-dt * decay) + (dt * x)[:, None] * b[None, :]
    at = block * SIZES.heads + head
    tl.store(
        _state_written(row, at, step, memory, NUM_ROWS, SIZES)
        + dims[:, None] * SIZES.states
        + states[None, :],
        state,
        mask=is_dim[:, None] & is_state[None, :],
    )
    y = (tl.sum(state * c[None, :], 1) + skip * x) * _silu(apply_matrix(gate, normed))

    gated_norm, out_proj = out
    part = tl.sum(out_proj * (y * gated_norm)[None, :], 1)
    at = (row * SIZES.blocks + block) * SIZES.heads + head
    tl.store(scratch.mixed + at * D + features, part, mask=is_feature)
    tl.store(scratch.energy + at, tl.sum(y * y, 0))


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
    return hidden * tl.rsqrt(tl.sum(hidden * hidden, 0) / D + _EPS) * weight


@triton.jit
def load_features(vector, D: tl.constexpr):
    """`vector` `[width]` in float32; padding is 0."""
    features = tl.arange(0, triton.next_power_of_2(D))
    return tl.load(vector + features, mask=features < D, other=0.0).to(tl.float32)


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
def _inputs_at(row, block, place, memory, SIZES: tl.constexpr):
    """Where the inputs `[channels]` of the convolution at `place` are."""
    CHANNELS: tl.constexpr = SIZES.heads * SIZES.head_dim + 2 * SIZES.states
    return memory.inputs + ((row * SIZES.blocks + block) * (SIZES.window + SIZES.horizon) + place) * CHANNELS


@triton.jit
def _know_convolution(channels, mask, row, block, step, weights, memory, SIZES: tl.constexpr):
    """What older inputs come to in the convolution of `channels`, and the weight of the newest."""
    CHANNELS: tl.constexpr = SIZES.heads * SIZES.head_dim + 2 * SIZES.states
    WINDOW: tl.constexpr = SIZES.window
    inputs = _inputs_at(row, block, step, memory, SIZES)
    kernel = weights.conv + (block * CHANNELS + channels) * (WINDOW + 1)
    newest = tl.load(kernel + WINDOW, mask=mask, other=0.0)
    total = tl.load(weights.conv_bias + block * CHANNELS + channels, mask=mask, other=0.0)
    for tap in tl.static_range(WINDOW):
        before = tl.load(inputs + tap * CHANNELS + channels, mask=mask, other=0.0)
        total += tl.load(kernel + tap, mask=mask, other=0.0) * before
    return total, newest


@triton.jit
def _convolve(known, newest):
    """The convolution at the `newest` input. `known`: of `_know_convolution`."""
    total, weight = known
    return _silu(total + weight * newest)


@triton.jit
def _state_read(row, at, step, memory, NUM_ROWS: tl.constexpr, SIZES: tl.constexpr):
    """Where the head's state `[head_dim, states]` before `step` is; `at`: its place among a row's heads."""
    return _state_written(row, at, step - 1, memory, NUM_ROWS, SIZES)


@triton.jit
def _state_written(row, at, step, memory, NUM_ROWS: tl.constexpr, SIZES: tl.constexpr):
    """Where the head's state after `step` is: recursive steps have a place of their own."""
    PLACE: tl.constexpr = NUM_ROWS * SIZES.blocks * SIZES.heads
    place = tl.where(step > 0, PLACE, 0) + row * (SIZES.blocks * SIZES.heads) + at
    return memory.recurrence + place * (SIZES.head_dim * SIZES.states)


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
