"""Experts for many tokens: pairs (token, k) grouped by expert, experts taken in waves as they arrive.

    begin   sort the pairs by expert        place 0 1 2 | 3 4 | 5 6 7 8 | ...   pairs of one expert adjoin
    add     a wave: any experts that are in slabs now, each once
              up     a program: some outputs of some places of one expert  -> activated [places, I]
              down   the same                                              -> products  [places, H], weighted
    finish  a program: one token, its places in ascending order            -> out       [tokens, H]

Only a wave's experts have to be in slabs. Every expert writes to places of its own and they are added up at
the end, in ascending order of experts, so the bits of the result depend neither on the waves nor on their
order.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
# ruff: noqa: N803, N806 (upper case marks what the compiler knows)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hetero_gpu.experts.gates import activate, gate_rows
from hetero_gpu.experts.layout import ExpertFormat
from hetero_gpu.experts.tiles import PREFILL_TOKENS, power_of_two_above, prefill_tile
from hetero_gpu.experts.weights import load_floats, load_tile

_SUM_COLS = 1024


class GroupedExperts:
    """One layer at a time: `begin`, then `add` until every expert of the routing has been, then `finish`.

    The buffers, allocated once, take `workspace_bytes`. Everything is asynchronous on the current stream,
    and nothing is read back by the host.
    """

    def __init__(
        self, form: ExpertFormat, top_k: int, *, max_tokens: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.form, self.top_k, self.max_tokens = form, top_k, max_tokens
        places = max_tokens * top_k
        self._activated = torch.empty((places, form.intermediate), dtype=dtype, device=device)
        self._products = torch.empty((places, form.hidden), dtype=dtype, device=device)
        self._numbers = torch.arange(places, dtype=torch.int32, device=device)

    @staticmethod
    def workspace_bytes(form: ExpertFormat, top_k: int, *, max_tokens: int, dtype: torch.dtype) -> int:
        """Bytes of the buffers; the sort takes about 40 bytes a (token, k) more while `begin` runs."""
        return max_tokens * top_k * (form.intermediate + form.hidden) * dtype.itemsize

    def warm_up(self, slabs: torch.Tensor, *, num_experts: int) -> None:
        """Compile what prompts of every length take, so that none waits for it. `slabs` are not read."""
        device = self._products.device
        expert, no_slot = (torch.full((1,), i, dtype=torch.int32, device=device) for i in (0, -1))
        for tokens_per_expert in PREFILL_TOKENS:
            num_tokens = min(-(-tokens_per_expert * num_experts // self.top_k), self.max_tokens)
            hidden = self._products.new_zeros((num_tokens, self.form.hidden))
            experts = torch.zeros((num_tokens, self.top_k), dtype=torch.int64, device=device)
            self.begin(hidden, experts, torch.zeros_like(experts), num_experts=num_experts)
            self.add(slabs, expert, no_slot)
            self.finish(torch.empty_like(hidden))

    @property
    def bounds(self) -> torch.Tensor:
        """Since `begin`: expert e has `bounds[e + 1] - bounds[e]` tokens. int32 `[num_experts + 1]`."""
        return self._bounds

    def begin(
        self, hidden: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, *, num_experts: int
    ) -> None:
        """Start a layer. `hidden`: `[T, H]`. `experts`: integers `[T, K]`. `weights`: `[T, K]`, any float."""
        num_tokens = hidden.shape[0]
        assert num_tokens <= self.max_tokens, f"{num_tokens} tokens, at most {self.max_tokens}"
        assert experts.shape == weights.shape == (num_tokens, self.top_k), "experts and weights are [T, K]"
        self._hidden, self._weights = hidden.contiguous(), weights.float().contiguous()
        by_expert, order = experts.flatten().int().sort(stable=True)
        self._order = order.int()  # [T * K], the pair at each place
        counting = self._counting(max(num_experts + 1, len(order)))
        first_of, each_place = counting[: num_experts + 1], counting[: len(order)]
        self._bounds = torch.searchsorted(
            by_expert, first_of, out_int32=True
        )  # [E + 1], each expert's places
        place_of = torch.empty_like(each_place).scatter_(0, order, each_place)
        self._places = place_of.view(num_tokens, self.top_k).sort(dim=1).values
        self._mean_tokens = order.numel() // num_experts
        self._room = power_of_two_above(num_experts)  # of any wave, so that one compilation serves all

    def _counting(self, length: int) -> torch.Tensor:
        """0, 1, 2, ... int32 `[length]` or longer, made once."""
        if len(self._numbers) < length:
            self._numbers = torch.arange(length, dtype=torch.int32, device=self._products.device)
        return self._numbers

    def add(self, slabs: torch.Tensor, experts: torch.Tensor, slots: torch.Tensor) -> None:
        """Compute a wave: `experts` int32 `[n]`, any of them in any order, from slabs `slots` int32 `[n]`.

        A negative slot gives zero: that expert is computed elsewhere. The slabs may be overwritten once the
        stream has passed this point.
        """
        assert experts.dtype == slots.dtype == torch.int32 and experts.shape == slots.shape
        assert slabs.shape[1] == self.form.record_bytes and slabs.is_contiguous()
        form, num_pairs, num_experts = self.form, self._order.numel(), experts.numel()
        wave = (self._order, self._bounds, experts, slots, num_experts)
        up, down = (
            prefill_tile(matrix, self._mean_tokens, itemsize=self._hidden.element_size())
            for matrix in (form.up, form.down)
        )
        num_tiles = num_pairs // up.tokens + min(num_experts, num_pairs)  # no less than there can be
        up_kernel[(triton.cdiv(2 * form.intermediate, up.rows), num_tiles)](
            self._hidden, slabs, self._activated, *wave, self.top_k, self._room,
            FORM=form, TILE=up, num_warps=up.num_warps, num_stages=up.num_stages,
        )  # fmt: skip
        down_kernel[(triton.cdiv(form.hidden, down.rows), num_tiles)](
            self._activated, slabs, self._products, *wave, self._weights, self._room,
            FORM=form, TILE=down, num_warps=down.num_warps, num_stages=down.num_stages,
        )  # fmt: skip

    def finish(self, out: torch.Tensor) -> None:
        """Write the sum over each token's experts into `out`, `[T, H]`, contiguous, of any float dtype."""
        grid = (triton.cdiv(self.form.hidden, _SUM_COLS), self._hidden.shape[0])
        sum_kernel[grid](
            self._products, self._places, out, TOP_K=self.top_k, HIDDEN=self.form.hidden, COLS=_SUM_COLS
        )


@triton.jit(do_not_specialize=["num_experts"])
def up_kernel(
    hidden, slabs, activated, order, bounds, experts, slots, num_experts,
    TOP_K: tl.constexpr, ROOM: tl.constexpr, FORM: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Program (block of outputs, tile): `activated` = gate(up · hidden of each place's token)."""
    OUTPUTS: tl.constexpr = TILE.rows // 2
    UP: tl.constexpr = FORM.up
    i, begin, end = _find_tile(bounds, experts, num_experts, ROOM, TILE)
    if i < num_experts:
        slot = tl.load(slots + i)
        if slot >= 0:
            rows, is_row = gate_rows(tl.program_id(0), OUTPUTS, FORM)
            places = begin + tl.arange(0, TILE.tokens)
            is_place = places < end
            tokens = tl.load(order + places, mask=is_place, other=0) // TOP_K
            record = slabs + slot.to(tl.int64) * FORM.record_bytes
            y = _matmul(record, hidden + tokens.to(tl.int64) * FORM.hidden, is_place, rows, is_row, UP, TILE)
            h = activate(y, FORM).to(activated.dtype.element_ty)  # [OUTPUTS, places]
            outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
            target = activated + places.to(tl.int64)[None, :] * FORM.intermediate + outputs[:, None]
            tl.store(target, h, mask=is_place[None, :] & (outputs < FORM.intermediate)[:, None])


@triton.jit(do_not_specialize=["num_experts"])
def down_kernel(
    activated, slabs, products, order, bounds, experts, slots, num_experts, weights,
    ROOM: tl.constexpr, FORM: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Program (block of outputs, tile): `products` = weight · (down · activated), at the same places."""
    ROWS: tl.constexpr = TILE.rows
    PLACES: tl.constexpr = TILE.tokens
    DOWN: tl.constexpr = FORM.down
    i, begin, end = _find_tile(bounds, experts, num_experts, ROOM, TILE)
    if i < num_experts:
        rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        is_row = rows < FORM.hidden
        places = begin + tl.arange(0, PLACES)
        is_place = places < end
        y = tl.zeros((ROWS, PLACES), tl.float32)
        slot = tl.load(slots + i)
        if slot >= 0:
            record = slabs + slot.to(tl.int64) * FORM.record_bytes
            x = activated + places.to(tl.int64) * FORM.intermediate
            y = _matmul(record, x, is_place, rows, is_row, DOWN, TILE)
            pairs = tl.load(order + places, mask=is_place, other=0)
            y *= tl.load(weights + pairs, mask=is_place, other=0.0).to(tl.float32)[None, :]
        target = products + places.to(tl.int64)[None, :] * FORM.hidden + rows[:, None]
        tl.store(target, y.to(products.dtype.element_ty), mask=is_place[None, :] & is_row[:, None])


@triton.jit
def sum_kernel(products, places, out, TOP_K: tl.constexpr, HIDDEN: tl.constexpr, COLS: tl.constexpr):
    """Program (block of columns, token)."""
    token = tl.program_id(1).to(tl.int64)
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    is_col = cols < HIDDEN
    total = tl.zeros((COLS,), tl.float32)
    for i in tl.static_range(TOP_K):
        place = tl.load(places + token * TOP_K + i).to(tl.int64)
        total += tl.load(products + place * HIDDEN + cols, mask=is_col, other=0.0).to(tl.float32)
    tl.store(out + token * HIDDEN + cols, total.to(out.dtype.element_ty), mask=is_col)


@triton.jit
def _find_tile(bounds, experts, num_experts, ROOM: tl.constexpr, TILE: tl.constexpr):
    """Which tile of the wave this program has: the expert's index in the wave, first place, end of places.

    Each expert's places are cut into tiles of `TILE.tokens`, and the wave's tiles are numbered through. The
    index is `num_experts` where there are fewer tiles than programs.
    """
    tile = tl.program_id(1)
    i = tl.arange(0, ROOM)
    expert = tl.load(experts + i, mask=i < num_experts, other=0)
    first = tl.load(bounds + expert, mask=i < num_experts, other=0)
    end = tl.load(bounds + expert + 1, mask=i < num_experts, other=0)
    num_tiles = tl.cdiv(end - first, TILE.tokens)
    ends = tl.cumsum(num_tiles, axis=0)
    found = tl.minimum(tl.sum((ends <= tile).to(tl.int32)), num_experts)
    is_found = i == found
    begin = tl.sum(tl.where(is_found, first + (tile - (ends - num_tiles)) * TILE.tokens, 0))
    return found, begin, tl.sum(tl.where(is_found, end, 0))


@triton.jit
def _matmul(record, inputs, is_place, rows, is_row, MATRIX: tl.constexpr, TILE: tl.constexpr):
    """Outputs `rows` [R] of one expert's matrix times the vectors at `inputs` [P]: float32 `[R, P]`."""
    ROWS: tl.constexpr = TILE.rows
    PLACES: tl.constexpr = TILE.tokens
    acc = tl.zeros((ROWS, PLACES), tl.float32)
    for start in tl.range(0, MATRIX.cols, TILE.cols):
        cols = start + tl.arange(0, TILE.cols)
        x_mask = is_place[:, None] & (cols < MATRIX.cols)[None, :]
        x = tl.load(inputs[:, None] + cols[None, :], mask=x_mask, other=0.0)
        weight = load_tile(record, rows, is_row, start, MATRIX, TILE).to(x.dtype)
        acc = tl.dot(weight, tl.trans(x), acc, input_precision="ieee")
    if MATRIX.bias is not None:
        BIAS: tl.constexpr = MATRIX.bias
        acc += load_floats(record, rows, is_row, BIAS)[:, None]
    return acc
