"""Split-K decode attention: the tokens of a row are divided among programs, then the parts are put together.

One row, one KV head, position 99, splits of one or more blocks:

    tokens     0 ......... 31 | 32 ........ 63 | 64 ........ 95 | 96 .. 99 |
    programs   split 0        | split 1        | split 2        | split 3  | splits 4, 5, ...: nothing, leave
    partials   sum of exp·V, peak logit, sum of exp: one of each a split
    reduce     one program a head and block of its value, in the order of splits: the same bits every time

The grid is fixed when it is captured, for the largest cache; how many tokens a split takes is computed on the
device from the position, so short rows use many programs too, and programs without tokens end at once.
Key sizes that are no power of two are read as two parts (192 = 128 + 64), so that little is masked away.
Source: Dao et al., "Flash-Decoding for long-context inference", 2023.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"
# ruff: noqa: N803 (compile-time constants are written in capitals)

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import triton
import triton.language as tl

from hetero_gpu.attention.base import AttentionForm
from hetero_gpu.overlap import meet, overlap_options

_BLOCK = 16
"""Tokens read at once: the least that a matrix product takes, so that 512 tokens already occupy 32 splits."""
_HEADS = 16
"""Query heads a program: what a matrix product takes at least; fewer are masked."""
_PROGRAMS_PER_PROCESSOR = 2
_MAX_SPLITS = 128
_MOST_PARTS = 32
"""Partial results that one step of the reduction reads: those of 512 tokens in one."""
_REDUCED_VALUES = 128
"""Elements of a head that one program of the reduction puts together; latents are several times as long."""
_ALL = 2**31 - 1


def decode_attention_split(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    positions: torch.Tensor,
    form: AttentionForm,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `hetero_gpu.attention.decode_attention`. The last axis of each tensor must be contiguous."""
    _check(query, keys, values, positions)
    rows, heads, key_size = query.shape
    kv_heads, max_length, value_size = keys.shape[1], keys.shape[2], values.shape[-1]
    head_blocks = math.ceil(heads // kv_heads / _HEADS)
    splits = num_splits(rows * kv_heads * head_blocks, max_length, _num_processors(query.device))
    partial = query.new_empty((rows, heads, splits, value_size), dtype=torch.float32)
    peaks, totals = query.new_empty((2, rows, heads, splits), dtype=torch.float32)
    output = query.new_empty((rows, heads, value_size))
    main = 1 << (key_size.bit_length() - 1)
    shared: dict[str, Any] = {
        "WINDOW": form.window or _ALL,
        "SPLITS": splits,
        "BLOCK": _BLOCK,
        "VALUE_SIZE": value_size,
        **overlap_options(query.device),
    }
    _attend_split[(rows, kv_heads * head_blocks, splits)](
        query,
        keys,
        values,
        positions,
        partial,
        peaks,
        totals,
        form.scaling,
        form.soft_cap or 0.0,
        max_length,
        query.stride(0),
        query.stride(1),
        *keys.stride()[:3],
        *values.stride()[:3],
        KV_HEADS=kv_heads,
        GROUP=heads // kv_heads,
        HEADS=_HEADS,
        KEY_SIZE=key_size,
        MAIN=max(main, 16),
        TAIL=0 if main == key_size else max(16, triton.next_power_of_2(key_size - main)),
        IS_CAPPED=form.soft_cap is not None,
        IS_INTERPRETED=triton.knobs.runtime.interpret,
        VALUE_SLOTS=triton.next_power_of_2(value_size),
        num_warps=4 if value_size > 128 else 2,
        num_stages=3,
        **shared,
    )
    reduced = min(triton.next_power_of_2(value_size), _REDUCED_VALUES)
    _reduce_splits[(rows, heads, triton.cdiv(value_size, reduced))](
        partial,
        peaks,
        totals,
        positions,
        output if sinks is None else sinks,
        output,
        max_length,
        HAS_SINKS=sinks is not None,
        SPLIT_SLOTS=triton.next_power_of_2(splits),
        CHUNK=min(triton.next_power_of_2(splits), _MOST_PARTS),
        VALUE_BLOCK=reduced,
        num_warps=4,
        **shared,
    )
    return output


def num_splits(num_programs: int, max_length: int, num_processors: int) -> int:
    """Splits of a row, so that `num_programs` (rows · KV heads) times them fill the processors."""
    wanted = math.ceil(_PROGRAMS_PER_PROCESSOR * num_processors / num_programs)
    return max(1, min(wanted, math.ceil(max_length / _BLOCK), _MAX_SPLITS))


@functools.cache
def _num_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 4  # the interpreter: enough for several splits
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _check(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, positions: torch.Tensor) -> None:
    if query.shape[1] % keys.shape[1] or keys.shape[:3] != values.shape[:3]:
        raise ValueError(
            f"{query.shape[1]} query heads over keys {tuple(keys.shape)} and values {tuple(values.shape)}: "
            "heads must be a multiple of KV heads, and keys and values agree but for the head size"
        )
    if query.shape[-1] != keys.shape[-1] or positions.shape != query.shape[:1]:
        raise ValueError(
            f"query {tuple(query.shape)}, keys {tuple(keys.shape)}, positions {tuple(positions.shape)}: "
            "head sizes or rows differ"
        )
    if any(tensor.stride(-1) != 1 for tensor in (query, keys, values)):
        raise ValueError("the last axis of query, keys and values must be contiguous")


@triton.jit
def _span(position, split, WINDOW: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """Tokens [start, end) of one split. Empty splits come last."""
    end = position + 1
    first = tl.maximum(end - WINDOW, 0)
    length = tl.cdiv(tl.cdiv(end - first, BLOCK), SPLITS) * BLOCK
    start = first + split * length
    return start, tl.minimum(start + length, end)


@triton.jit
def _add_block(
    query_main,
    query_tail,
    total_value,
    peak,
    total,
    key_base,
    value_base,
    start,
    end,
    key_stride,
    value_stride,
    scaling,
    soft_cap,
    KEY_SIZE: tl.constexpr,
    MAIN: tl.constexpr,
    TAIL: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    VALUE_SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_CAPPED: tl.constexpr,
):
    """The running softmax over one block of tokens more."""
    tokens = start + tl.arange(0, BLOCK)
    is_seen = tokens < end
    main = tl.arange(0, MAIN)
    keys = tl.load(
        key_base + tokens[:, None] * key_stride + main[None, :],
        mask=is_seen[:, None] & (main < KEY_SIZE)[None, :],
        other=0.0,
    )
    logits = tl.dot(query_main, tl.trans(keys), input_precision="ieee")  # [heads, block]
    if TAIL > 0:
        tail = MAIN + tl.arange(0, TAIL)
        tail_keys = tl.load(
            key_base + tokens[:, None] * key_stride + tail[None, :],
            mask=is_seen[:, None] & (tail < KEY_SIZE)[None, :],
            other=0.0,
        )
        logits += tl.dot(query_tail, tl.trans(tail_keys), input_precision="ieee")
    logits *= scaling
    if IS_CAPPED:
        logits = soft_cap * (2 * tl.sigmoid(2 * logits / soft_cap) - 1)
    logits = tl.where(is_seen[None, :], logits, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(logits, 1))
    weights = tl.exp(logits - new_peak[:, None])
    shrink = tl.exp(peak - new_peak)
    size = tl.arange(0, VALUE_SLOTS)
    values = tl.load(
        value_base + tokens[:, None] * value_stride + size[None, :],
        mask=is_seen[:, None] & (size < VALUE_SIZE)[None, :],
        other=0.0,
    )
    total = total * shrink + tl.sum(weights, 1)
    part = tl.dot(weights.to(values.dtype), values, input_precision="ieee")
    return total_value * shrink[:, None] + part, new_peak, total


@triton.jit
def _attend_split(
    query_pointer,
    key_pointer,
    value_pointer,
    position_pointer,
    partial_pointer,
    peak_pointer,
    total_pointer,
    scaling,
    soft_cap,
    max_length,
    query_row,
    query_head,
    key_row,
    key_head,
    key_token,
    value_row,
    value_head,
    value_token,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    MAIN: tl.constexpr,
    TAIL: tl.constexpr,
    IS_CAPPED: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    VALUE_SLOTS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    meet(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(2)
    position = tl.minimum(tl.load(position_pointer + row).to(tl.int32), max_length - 1)
    start, end = _span(position, split, WINDOW, SPLITS, BLOCK)
    if start >= end:
        return
    kv_head = tl.program_id(1) % KV_HEADS
    in_group = (tl.program_id(1) // KV_HEADS) * HEADS + tl.arange(0, HEADS)
    is_head = in_group < GROUP
    heads = kv_head * GROUP + in_group
    main = tl.arange(0, MAIN)
    query_base = query_pointer + row * query_row + heads[:, None] * query_head
    query_main = tl.load(
        query_base + main[None, :], mask=is_head[:, None] & (main < KEY_SIZE)[None, :], other=0.0
    )
    query_tail = query_main
    if TAIL > 0:
        tail = MAIN + tl.arange(0, TAIL)
        query_tail = tl.load(
            query_base + tail[None, :], mask=is_head[:, None] & (tail < KEY_SIZE)[None, :], other=0.0
        )
    key_base = key_pointer + row * key_row + kv_head.to(tl.int64) * key_head
    value_base = value_pointer + row * value_row + kv_head.to(tl.int64) * value_head
    total_value = tl.zeros((HEADS, VALUE_SLOTS), tl.float32)
    peak = tl.full((HEADS,), float("-inf"), tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    # fmt: off
    if IS_INTERPRETED:  # its `range` does not take device values
        while start < end:
            total_value, peak, total = _add_block(
                query_main, query_tail, total_value, peak, total, key_base, value_base, start, end,
                key_token, value_token, scaling, soft_cap,
                KEY_SIZE, MAIN, TAIL, VALUE_SIZE, VALUE_SLOTS, BLOCK, IS_CAPPED)
            start += BLOCK
    else:
        for block_start in tl.range(start, end, BLOCK):
            total_value, peak, total = _add_block(
                query_main, query_tail, total_value, peak, total, key_base, value_base, block_start, end,
                key_token, value_token, scaling, soft_cap,
                KEY_SIZE, MAIN, TAIL, VALUE_SIZE, VALUE_SLOTS, BLOCK, IS_CAPPED)
    # fmt: on
    size = tl.arange(0, VALUE_SLOTS)
    slot = (row * KV_HEADS * GROUP + heads) * SPLITS + split
    tl.store(
        partial_pointer + slot[:, None] * VALUE_SIZE + size[None, :],
        total_value,
        mask=is_head[:, None] & (size < VALUE_SIZE)[None, :],
    )
    tl.store(peak_pointer + slot, peak, mask=is_head)
    tl.store(total_pointer + slot, total, mask=is_head)


@triton.jit
def _reduce_splits(
    partial_pointer,
    peak_pointer,
    total_pointer,
    position_pointer,
    sink_pointer,
    output_pointer,
    max_length,
    HAS_SINKS: tl.constexpr,
    SPLIT_SLOTS: tl.constexpr,
    CHUNK: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    meet(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    at = row * tl.num_programs(1) + head
    splits = tl.arange(0, SPLIT_SLOTS)
    # What was not written is loaded too and left out: waiting for the position first would cost more.
    is_split = splits < SPLITS
    peaks = tl.load(peak_pointer + at * SPLITS + splits, mask=is_split, other=float("-inf"))
    totals = tl.load(total_pointer + at * SPLITS + splits, mask=is_split, other=0.0)
    chunk, size = tl.arange(0, CHUNK), tl.program_id(2) * VALUE_BLOCK + tl.arange(0, VALUE_BLOCK)
    is_value = (size < VALUE_SIZE)[None, :]
    at_part = (at * SPLITS + chunk)[:, None] * VALUE_SIZE + size[None, :]
    parts = _load(partial_pointer, at_part, (chunk < SPLITS)[:, None] & is_value, 0.0)
    position = tl.minimum(tl.load(position_pointer + row).to(tl.int32), max_length - 1)
    start, end = _span(position, splits, WINDOW, SPLITS, BLOCK)
    is_written = is_split & (start < end)
    peaks = tl.where(is_written, peaks, float("-inf"))
    peak = tl.max(peaks, 0)
    if HAS_SINKS:
        sink = tl.load(sink_pointer + head).to(tl.float32)
        peak = tl.maximum(peak, sink)
    total = tl.sum(tl.exp(peaks - peak) * tl.where(is_written, totals, 0.0), 0)
    if HAS_SINKS:
        total += tl.exp(sink - peak)
    num_written = tl.sum(is_written.to(tl.int32), 0)
    weights = tl.exp(_load(peak_pointer, at * SPLITS + chunk, chunk < num_written, float("-inf")) - peak)
    output = tl.where((chunk < num_written)[:, None], parts, 0.0) * weights[:, None]
    chunk += CHUNK
    while tl.min(chunk, 0) < num_written:
        slots, is_part = at * SPLITS + chunk, chunk < num_written
        weights = tl.exp(_load(peak_pointer, slots, is_part, float("-inf")) - peak)
        at_part = slots[:, None] * VALUE_SIZE + size[None, :]
        output += _load(partial_pointer, at_part, is_part[:, None] & is_value, 0.0) * weights[:, None]
        chunk += CHUNK
    tl.store(output_pointer + at * VALUE_SIZE + size, tl.sum(output, 0) / total, mask=size < VALUE_SIZE)


@triton.jit
def _load(pointer, index, mask, other):
    return tl.load(pointer + index, mask=mask, other=other)
