"""One launch a layer for the keys and values of a decode step."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"
# ruff: noqa: N803 (compile-time constants are written in capitals)

from __future__ import annotations

import torch
import triton
import triton.language as tl


def append_kv_kernel(
    new: tuple[torch.Tensor, torch.Tensor],
    cache: tuple[torch.Tensor, torch.Tensor],
    positions: torch.Tensor,
) -> None:
    """See `hetero_gpu.attention.append_kv`. The last axis of the cache must be contiguous."""
    (new_keys, new_values), (keys, values) = new, cache
    for source, target in zip(new, cache, strict=True):
        if source.shape[:2] != target.shape[:2] or source.shape[2] != 1 or source.shape[3] != target.shape[3]:
            raise ValueError(f"{tuple(source.shape)} is no token for a cache of {tuple(target.shape)}")
        if source.dtype != target.dtype or target.stride(-1) != 1:
            raise ValueError(
                f"a token of {source.dtype} for a cache of {target.dtype}, strides {target.stride()}"
            )
    _append[(keys.shape[0], keys.shape[1])](
        new_keys,
        new_values,
        keys,
        values,
        positions,
        keys.shape[2],
        *(new_keys.stride(axis) for axis in (0, 1, 3)),
        *(new_values.stride(axis) for axis in (0, 1, 3)),
        *keys.stride()[:3],
        *values.stride()[:3],
        KEY_SIZE=keys.shape[3],
        VALUE_SIZE=values.shape[3],
        KEY_SLOTS=triton.next_power_of_2(keys.shape[3]),
        VALUE_SLOTS=triton.next_power_of_2(values.shape[3]),
        num_warps=1,
    )


@triton.jit
def _append(
    new_key_pointer,
    new_value_pointer,
    key_pointer,
    value_pointer,
    position_pointer,
    max_length,
    new_key_row,
    new_key_head,
    new_key_size,
    new_value_row,
    new_value_head,
    new_value_size,
    key_row,
    key_head,
    key_token,
    value_row,
    value_head,
    value_token,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    KEY_SLOTS: tl.constexpr,
    VALUE_SLOTS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    position = tl.load(position_pointer + row).to(tl.int64)
    if position >= max_length:
        return
    size = tl.arange(0, KEY_SLOTS)
    is_inside = size < KEY_SIZE
    key = tl.load(
        new_key_pointer + row * new_key_row + head * new_key_head + size * new_key_size, mask=is_inside
    )
    tl.store(key_pointer + row * key_row + head * key_head + position * key_token + size, key, mask=is_inside)
    size = tl.arange(0, VALUE_SLOTS)
    is_inside = size < VALUE_SIZE
    value = tl.load(
        new_value_pointer + row * new_value_row + head * new_value_head + size * new_value_size,
        mask=is_inside,
    )
    tl.store(
        value_pointer + row * value_row + head * value_head + position * value_token + size,
        value,
        mask=is_inside,
    )
