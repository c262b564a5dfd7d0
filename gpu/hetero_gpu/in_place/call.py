"""A layer's call to the CPU, and the sum that comes back: device code around `control.memory_order`."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
# ruff: noqa: N803 (upper case marks what the compiler knows)

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from hetero_gpu.control.fault import TableError
from hetero_gpu.control.memory_order import load_acquire, pointer_to, store_release
from hetero_gpu.control.region import ControlRegion, Word
from hetero_gpu.in_place.mailbox import Mailbox
from hetero_gpu.overlap import meet, overlap_options

MOST_LOOKS = 1_000_000
"""At an answer: some two seconds; then the CPU counts as stuck."""
_BLOCK = 1024
"""Values of a program, or of one turn of its loop."""
_VALUES = tl.constexpr(_BLOCK)
_NO_ANSWER_ERROR = tl.constexpr(int(TableError.NO_ANSWER))


class CallTables(NamedTuple):
    """What kernels see of `Calls`."""

    experts: torch.Tensor
    number: torch.Tensor
    num_calls: torch.Tensor
    num_rows: int
    num_values: int
    head_at: int
    experts_at: int
    weights_at: int
    hidden_at: int
    calls_at: int


class Calls:
    """The device's end of the line to the CPU: what the running layer hands over through `mailbox`, and what
    comes back. Kernels number calls and await answers in `region`."""

    def __init__(self, mailbox: Mailbox, region: ControlRegion, device: torch.device) -> None:
        self._mailbox, self._region = mailbox, region
        pairs = mailbox.rows * mailbox.top_k
        self.experts = torch.full((pairs,), -1, dtype=torch.int32, device=device)
        """Of the pairs of the running layer, -1 where the device brings it."""
        self.number = torch.zeros(1, dtype=torch.int32, device=device)
        """Experts of the running layer that are computed in place."""
        self.num_calls = torch.zeros(1, dtype=torch.int64, device=device)
        """Layers so far that had some."""
        self.patience = torch.full((1,), MOST_LOOKS, dtype=torch.int32, device=device)
        """How often a layer looks for its answer; 0 once one looked in vain, until the host sets it again."""

    def for_kernels(self, hidden: torch.Tensor) -> CallTables:
        """What kernels read and write where a layer takes `hidden` `[T, H]`."""
        mailbox = self._mailbox
        return CallTables(
            self.experts,
            self.number,
            self.num_calls,
            len(hidden),
            hidden.numel(),
            mailbox.head_at,
            mailbox.experts_at,
            mailbox.weights_at,
            mailbox.hidden_at,
            self._region.address(Word.CALLS),
        )

    def add_answer(self, out: torch.Tensor, *, error_address: int) -> None:
        """Add the sum that the CPU made of the layer's call, if there was one, to `out` `[T, H]`, contiguous;
        wait for it at most `patience` looks, and then report NO_ANSWER. Asynchronous, capturable."""
        _answer_kernel[(triton.cdiv(out.numel(), _BLOCK),)](
            out,
            self.number,
            self.num_calls,
            self.patience,
            self._mailbox.total_at,
            self._region.address(Word.ANSWERS),
            error_address,
            NUM_VALUES=out.numel(),
            BLOCK=_BLOCK,
            num_warps=1,  # it acquires
            **overlap_options(out.device),
        )


@triton.jit
def call_cpu(layer, hidden, weights, calls, NUM_PAIRS: tl.constexpr, PAIR_BLOCK: tl.constexpr):
    """Hand over what `calls` says of the layer, if anything, by one program. `hidden` `[T, H]`, `weights`
    `[T, K]`, contiguous. The answer to the call before has been taken."""
    if tl.load(calls.number) > 0:
        target = pointer_to(calls.hidden_at, tl.float32)
        for start in range(0, calls.num_values, _VALUES):
            values = start + tl.arange(0, _VALUES)
            x = tl.load(hidden + values, mask=values < calls.num_values)
            tl.store(target + values, x.to(tl.float32), mask=values < calls.num_values)
        pairs = tl.arange(0, PAIR_BLOCK)
        is_pair = pairs < NUM_PAIRS
        expert = tl.load(calls.experts + pairs, mask=is_pair, other=-1)
        tl.store(pointer_to(calls.experts_at, tl.int32) + pairs, expert, mask=is_pair)
        weight = tl.load(weights + pairs, mask=is_pair, other=0.0).to(tl.float32)
        tl.store(pointer_to(calls.weights_at, tl.float32) + pairs, weight, mask=is_pair)
        head = pointer_to(calls.head_at, tl.int64)
        tl.store(head, layer.to(tl.int64))
        tl.store(head + 1, tl.full((), 1, tl.int64) * calls.num_rows)
        store_release(calls.calls_at, tl.load(calls.num_calls))


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
    OVERLAPS: tl.constexpr,
):
    is_called = tl.load(count) > 0  # older than the kernel before
    if is_called:
        expected = tl.load(num_calls)
        looks = tl.load(patience)
        answered = load_acquire(answers_at)
        while (answered < expected) & (looks > 0):
            answered = load_acquire(answers_at)
            looks -= 1
        meet(OVERLAPS)
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
    meet(OVERLAPS)
