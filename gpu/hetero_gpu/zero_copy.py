"""Read host memory from a kernel, without a copy engine.

A kernel reads mapped (registered) host memory over the link as if it were its own. A few thread blocks
with wide loads already fill the link, so such a kernel can run beside the computation, and it needs no
host: this is how a decode step inside a CUDA graph fetches what it misses.

    host, registered   [ w0 | w1 | w2 | ........................ ]   16 B a load, 4 loads a thread
                          ^ program 0, then 8, 16, ...   one block of 32 KiB at a time
    device             [ w0 | w1 | w2 | ........................ ]

The source is an address, not a tensor: on the device it will come out of a table.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

WORD_BYTES = 4
_BLOCK_WORDS = 8192
_MOST_BYTES = 1 << 33  # word offsets are 32-bit
_NUM_WARPS = 16
NUM_PROGRAMS = 8
"""Enough to fill a PCIe 5 link, and few enough to leave a GPU to its work."""


def copy_from_host(
    source_address: int, destination: torch.Tensor, *, num_programs: int = NUM_PROGRAMS
) -> None:
    """Copy `destination.numel()` bytes from `source_address` into `destination`, uint8 `[bytes]`.

    `source_address` is what the device calls the memory (`mapped.device_address`). It and the destination are
    aligned to 16 bytes, and the size is a multiple of 4 below 8 GiB; else ValueError. Asynchronous: valid
    once the current stream has passed. Same result as `copy_from_host_reference`.
    """
    if destination.dtype != torch.uint8 or not destination.is_contiguous():
        raise ValueError(f"the destination must be contiguous uint8, not {destination.dtype}")
    if source_address % 16 or destination.data_ptr() % 16:
        raise ValueError(f"source {source_address:#x} and destination must be aligned to 16 bytes")
    if destination.numel() % WORD_BYTES or destination.numel() >= _MOST_BYTES:
        raise ValueError(
            f"{destination.numel()} bytes: must be a multiple of {WORD_BYTES} below {_MOST_BYTES}"
        )
    words = destination.view(torch.int32)
    _copy_kernel[(num_programs,)](
        source_address, words, words.numel(), BLOCK_WORDS=_BLOCK_WORDS, num_warps=_NUM_WARPS
    )


def copy_from_host_reference(source: torch.Tensor, destination: torch.Tensor) -> None:
    """What `copy_from_host` must give: both uint8 `[bytes]`."""
    destination.copy_(source)


@triton.jit  # type: ignore[untyped-decorator]
def _copy_kernel(source_address, destination, num_words, BLOCK_WORDS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    source = tl.multiple_of(tl.cast(source_address, tl.int64).to(tl.pointer_type(tl.int32)), 16)
    start = tl.program_id(0) * BLOCK_WORDS
    while start < num_words:  # not a range: the interpreter cannot step through one of tensors
        offsets = start + tl.arange(0, BLOCK_WORDS)
        inside = offsets < num_words
        words = tl.load(source + offsets, mask=inside)
        tl.store(destination + offsets, words, mask=inside)
        start += tl.num_programs(0) * BLOCK_WORDS
