"""Experts for one to eight tokens: two launches, as fast as the weights can be read.

    up     a program: some outputs of one (token, k)          -> activated [tokens, top_k, I]
    down   a program: some outputs of one token, over all k   -> out       [tokens, H]

Few tokens use each weight about once, so memory is the limit, and what counts is how many bytes are on
their way: each thread asks for 16 bytes of several rows before it uses any. The sum over k is taken in a
fixed order inside one program. So the same input gives the same bits, and a token's output depends neither
on the other tokens nor on the slabs that its experts lie in.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
# ruff: noqa: N803, N806 (upper case marks what the compiler knows)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hetero_gpu.experts.gates import activate, gate_rows
from hetero_gpu.experts.layout import ExpertFormat
from hetero_gpu.experts.tiles import down_tile, up_tile
from hetero_gpu.experts.weights import load_floats, load_packed, load_scales, load_values
from hetero_gpu.overlap import meet, overlap_options

MOST_TOKENS = 8
"""Above this, tokens share experts often enough that grouping them by expert pays."""


_MOST_OVERLAPPED = 2
"""Tokens for which the two launches overlap."""


class DecodeExperts:
    """The two launches and the buffer between them, which is allocated once: fit for a CUDA graph."""

    def __init__(
        self,
        form: ExpertFormat,
        top_k: int,
        *,
        max_tokens: int = MOST_TOKENS,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.form, self.top_k, self.max_tokens = form, top_k, max_tokens
        self.up_tile, self.down_tile = up_tile(form), down_tile(form, top_k)
        self._activated = torch.empty((max_tokens, top_k, form.intermediate), dtype=dtype, device=device)

    def __call__(
        self,
        hidden: torch.Tensor,
        slabs: torch.Tensor,
        *,
        slots: torch.Tensor,
        weights: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Write the experts' weighted sum for every token into `out`, `[T, H]`, of any float dtype.

        `hidden`: `[T, H]`. `slabs`: uint8 `[num_slabs, record_bytes]`. `slots`: int32 `[T, K]`, the slab of
        each (token, k), negative where the expert is computed elsewhere, which then adds nothing here.
        `weights`: `[T, K]`. All contiguous, T up to `max_tokens`. Asynchronous on the current stream.
        """
        num_tokens = hidden.shape[0]
        assert num_tokens <= self.max_tokens, f"{num_tokens} tokens, at most {self.max_tokens}"
        assert slots.shape == weights.shape == (num_tokens, self.top_k), "slots and weights are [T, K]"
        assert slabs.shape[1] == self.form.record_bytes and slots.dtype == torch.int32
        assert all(tensor.is_contiguous() for tensor in (hidden, slabs, slots, weights, out))
        up, down, form = self.up_tile, self.down_tile, self.form
        early = overlap_options(hidden.device) if self._overlaps(num_tokens) else {"OVERLAPS": False}
        grid = (triton.cdiv(form.intermediate, up.rows // 2), num_tokens * self.top_k)
        up_kernel[grid](
            hidden,
            slabs,
            slots,
            self._activated,
            self.top_k,
            FORM=form,
            TILE=up,
            num_warps=up.num_warps,
            **early,
        )
        grid = (triton.cdiv(form.hidden, down.rows), num_tokens)
        down_kernel[grid](
            self._activated,
            slabs,
            slots,
            weights,
            out,
            self.top_k,
            FORM=form,
            TILE=down,
            num_warps=down.num_warps,
            **early,
        )

    def _overlaps(self, num_tokens: int) -> bool:
        """Whether starting early pays: not where the programs of `up` come in several waves, which those of
        `down` would hinder, nor where decoding is the limit."""
        is_decoded = self.form.up.is_packed or self.form.down.is_packed
        return num_tokens <= _MOST_OVERLAPPED and not is_decoded


@triton.jit
def up_kernel(
    hidden,
    slabs,
    slots,
    activated,
    TOP_K: tl.constexpr,
    FORM: tl.constexpr,
    TILE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Program (block of outputs, pair): `activated[pair]` = gate(up · hidden of the pair's token)."""
    OUTPUTS: tl.constexpr = TILE.rows // 2
    UP: tl.constexpr = FORM.up
    meet(OVERLAPS)
    pair = tl.program_id(1)
    slot = tl.load(slots + pair)
    if slot >= 0:
        rows, is_row = gate_rows(tl.program_id(0), OUTPUTS, FORM)
        record = slabs + tl.full((1,), slot, tl.int64) * FORM.record_bytes
        x = hidden + tl.full((1,), pair // TOP_K, tl.int64) * FORM.hidden
        y = _project(record, x, tl.full((1,), True, tl.int1), rows, is_row, UP, TILE, False)
        h = tl.reshape(activate(tl.trans(y), FORM), (OUTPUTS,))
        outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
        target = activated + pair.to(tl.int64) * FORM.intermediate + outputs
        tl.store(target, h.to(activated.dtype.element_ty), mask=outputs < FORM.intermediate)


@triton.jit
def down_kernel(
    activated,
    slabs,
    slots,
    weights,
    out,
    TOP_K: tl.constexpr,
    FORM: tl.constexpr,
    TILE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Program (block of outputs, token): `out[token]` = sum over k of weight · (down · activated)."""
    DOWN: tl.constexpr = FORM.down
    token = tl.program_id(1)
    rows = tl.program_id(0) * TILE.rows + tl.arange(0, TILE.rows)
    is_row = rows < FORM.hidden
    k = tl.arange(0, TILE.pairs)
    pairs = token * TOP_K + k
    slot = tl.load(slots + pairs, mask=k < TOP_K, other=-1)
    is_pair = slot >= 0
    weight = tl.load(weights + pairs, mask=is_pair, other=0.0).to(tl.float32)
    records = slabs + tl.where(is_pair, slot, 0).to(tl.int64) * FORM.record_bytes
    x = activated + pairs.to(tl.int64) * FORM.intermediate
    y = _project(records, x, is_pair, rows, is_row, DOWN, TILE, OVERLAPS)
    total = tl.sum(y * weight[:, None], axis=0)
    target = out + token.to(tl.int64) * FORM.hidden + rows
    tl.store(target, total.to(out.dtype.element_ty), mask=is_row)


@triton.jit
def _project(
    records, inputs, is_pair, rows, is_row, MATRIX: tl.constexpr, TILE: tl.constexpr, OVERLAPS: tl.constexpr
):
    """Outputs `rows` [R] of the matrix in each of `records` [P] times the vector at each of `inputs` [P].

    Returns float32 `[P, R]`. A thread adds up its own products of `TILE.lane` neighbouring columns, which
    share a scale; the threads' sums meet once, after the loop.
    """
    PAIRS: tl.constexpr = TILE.pairs
    ROWS: tl.constexpr = TILE.rows
    LANES: tl.constexpr = TILE.cols // TILE.lane
    IS_ROW_SCALED: tl.constexpr = MATRIX.is_row_scaled
    record, row = records[:, None, None], rows[None, :, None]
    is_used = is_pair[:, None, None] & is_row[None, :, None]
    acc = tl.zeros((PAIRS, ROWS, LANES), tl.float32)
    for start in tl.range(0, MATRIX.cols, TILE.cols, num_stages=TILE.num_stages):
        cols = start + tl.arange(0, TILE.cols)
        if MATRIX.is_packed:
            halves = start // 2 + tl.arange(0, TILE.cols // 2)
            mask = is_used & (halves < MATRIX.cols // 2)[None, None, :]
            low, high = load_packed(record, row, halves[None, None, :], mask, MATRIX)
            x = _load_inputs(inputs, is_pair, cols, MATRIX, OVERLAPS)
            x_low, x_high = tl.split(tl.reshape(x, (PAIRS, TILE.cols // 2, 2)))
            products = low * x_low[:, None, :] + high * x_high[:, None, :]
        else:
            mask = is_used & (cols < MATRIX.cols)[None, None, :]
            values = load_values(record, row, cols[None, None, :], mask, MATRIX)
            products = values * _load_inputs(inputs, is_pair, cols, MATRIX, OVERLAPS)[:, None, :]
        sums = tl.sum(tl.reshape(products, (PAIRS, ROWS, LANES, products.shape[2] // LANES)), axis=3)
        if MATRIX.scales is not None and not IS_ROW_SCALED:
            lanes = start + tl.arange(0, LANES) * TILE.lane
            mask = is_used & (lanes < MATRIX.cols)[None, None, :]
            sums *= load_scales(record, row, lanes[None, None, :], mask, MATRIX)
        acc += sums
    y = tl.sum(acc, axis=2)
    if IS_ROW_SCALED:
        y *= tl.reshape(load_scales(record, row, 0, is_used, MATRIX), y.shape)
    if MATRIX.bias is not None:
        BIAS: tl.constexpr = MATRIX.bias
        y += tl.reshape(load_floats(record, row, is_used, BIAS), y.shape)
    return y


@triton.jit
def _load_inputs(inputs, is_pair, cols, MATRIX: tl.constexpr, OVERLAPS: tl.constexpr):
    """Columns `cols` of each vector, `[P, C]`: after the weights, which are older than the kernel before."""
    meet(OVERLAPS)
    mask = is_pair[:, None] & (cols < MATRIX.cols)[None, :]
    return tl.load(inputs[:, None] + cols[None, :], mask=mask, other=0.0).to(tl.float32)
