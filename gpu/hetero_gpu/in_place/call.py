"""A layer's call to the CPU, and the sum that comes back: device code around `control.memory_order`."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
# ruff: noqa: N803 (upper case marks what the compiler knows)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hetero_gpu.control.fault import TableError
from hetero_gpu.control.memory_order import load_acquire, pointer_to, store_release
from hetero_gpu.control.region import ControlRegion, Word
from hetero_gpu.in_place.divide import Division
from hetero_gpu.in_place.mailbox import Mailbox

_BLOCK = 1024
"""Values of a program, or of one turn of its loop."""
_NO_ANSWER_ERROR = tl.constexpr(int(TableError.NO_ANSWER))


def call(
    layer: int,
    hidden: torch.Tensor,
    weights: torch.Tensor,
    *,
    division: Division,
    mailbox: Mailbox,
    region: ControlRegion,
) -> None:
    """Hand over what the last `divide` left to the CPU, if anything. `hidden` `[T, H]`, `weights` `[T, K]`,
    contiguous. The answer to the call before has been taken. Asynchronous, capturable."""
    _call_kernel[(1,)](
        hidden,
        weights,
        division.in_place,
        division.count,
        division.num_calls,
        mailbox.head_at,
        mailbox.experts_at,
        mailbox.weights_at,
        mailbox.hidden_at,
        region.address(Word.CALLS),
        layer,
        NUM_ROWS=len(hidden),
        NUM_VALUES=hidden.numel(),
        NUM_PAIRS=weights.numel(),
        PAIR_BLOCK=triton.next_power_of_2(weights.numel()),
        BLOCK=_BLOCK,
        num_warps=8,
    )


def add_answer(
    out: torch.Tensor, *, division: Division, mailbox: Mailbox, region: ControlRegion, error_address: int
) -> None:
    """Add the sum that the CPU made of the last `call` to `out` `[T, H]`, contiguous; wait for it at most
    `division.patience` looks, and then report NO_ANSWER. Asynchronous, capturable."""
    _answer_kernel[(triton.cdiv(out.numel(), _BLOCK),)](
        out,
        division.count,
        division.num_calls,
        division.patience,
        mailbox.total_at,
        region.address(Word.ANSWERS),
        error_address,
        NUM_VALUES=out.numel(),
        BLOCK=_BLOCK,
        num_warps=1,  # it acquires
    )


_ADDRESSES = ["head_at", "experts_at", "weights_at", "hidden_at", "calls_at", "layer"]


@triton.jit(do_not_specialize=_ADDRESSES)
def _call_kernel(
    hidden,
    weights,
    in_place,
    count,
    num_calls,
    head_at,
    experts_at,
    weights_at,
    hidden_at,
    calls_at,
    layer,
    NUM_ROWS: tl.constexpr,
    NUM_VALUES: tl.constexpr,
    NUM_PAIRS: tl.constexpr,
    PAIR_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if tl.load(count) > 0:
        target = pointer_to(hidden_at, tl.float32)
        for start in range(0, NUM_VALUES, BLOCK):
            values = start + tl.arange(0, BLOCK)
            x = tl.load(hidden + values, mask=values < NUM_VALUES)
            tl.store(target + values, x.to(tl.float32), mask=values < NUM_VALUES)
        pairs = tl.arange(0, PAIR_BLOCK)
        is_pair = pairs < NUM_PAIRS
        expert = tl.load(in_place + pairs, mask=is_pair, other=-1)
        tl.store(pointer_to(experts_at, tl.int32) + pairs, expert, mask=is_pair)
        weight = tl.load(weights + pairs, mask=is_pair, other=0.0).to(tl.float32)
        tl.store(pointer_to(weights_at, tl.float32) + pairs, weight, mask=is_pair)
        head = pointer_to(head_at, tl.int64)
        tl.store(head, layer.to(tl.int64))
        tl.store(head + 1, tl.full((), NUM_ROWS, tl.int64))
        store_release(calls_at, tl.load(num_calls))


@triton.jit(do_not_specialize=["total_at", "answers_at", "error_address"])
def _answer_kernel(
    out,
    count,
    num_calls,
    patience,
    total_at,
    answers_at,
    error_address,
    NUM_VALUES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if tl.load(count) > 0:
        expected = tl.load(num_calls)
        looks = tl.load(patience)
        answered = load_acquire(answers_at)
        while (answered < expected) & (looks > 0):
            answered = load_acquire(answers_at)
            looks -= 1
        if answered < expected:
            tl.store(patience, 0)
            store_release(error_address, _NO_ANSWER_ERROR)
        else:
            values = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
            is_value = values < NUM_VALUES
            total = pointer_to(total_at, tl.float32)
            part = tl.load(total + values, mask=is_value, other=0.0, volatile=True)
            x = tl.load(out + values, mask=is_value, other=0.0).to(tl.float32) + part
            tl.store(out + values, x.to(out.dtype.element_ty), mask=is_value)
