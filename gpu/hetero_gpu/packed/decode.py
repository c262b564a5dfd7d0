"""Unpacking on the device: a packed record becomes bf16 in its slab, chunk by chunk.

    packed, device or mapped host   |mantissas|codes|table|escapes|
                                       │ 16 KiB  │ 8 KiB a chunk, 16 B a load
    slab                            |bf16, 8 B a word                  |

A program has a chunk to itself: it stores the chunk, waits for its own threads, then stores the chunk's
escapes over what their codes made. No two programs write to the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from hetero_gpu.packed.layout import CHUNK_ELEMENTS, PackedLayout

NUM_WARPS = 16
_CHUNK = tl.constexpr(CHUNK_ELEMENTS)
_ESCAPES = tl.constexpr(512)
_ANY_ADDRESS = 1 << 40
"""Tells the compiler that addresses have 64 bits."""


class Decoder:
    """Decodes records of one layout on a CUDA device, with little work for the host.

    Triton looks a kernel up anew at every launch, which takes the host longer than all else in a copy. All
    launches here have the same constants, so the kernel is compiled once, at the start.
    """

    def __init__(self, layout: PackedLayout) -> None:
        self._constants = _constants(layout)
        grid = (layout.num_chunks, 1, 1)
        kernel = _decode_kernel.warmup(
            _ANY_ADDRESS, _ANY_ADDRESS, *self._constants, num_warps=NUM_WARPS, grid=grid
        )
        self._launch: Callable[..., None] = kernel[grid]

    def decode(self, packed_address: int, slab_address: int, stream: torch.cuda.Stream) -> None:
        """Write the record whose packed form is at `packed_address` to the slab at `slab_address`, both
        device memory, on `stream`. Same result as `unpack_reference`."""
        self._launch(packed_address, slab_address, *self._constants, stream=stream.cuda_stream)


def decode(packed: torch.Tensor, slab: torch.Tensor, layout: PackedLayout) -> None:
    """Write the record whose packed form is `packed` (device uint8 `[packed_bytes]`) to `slab` (uint8
    `[plain_bytes]`), on the current stream. Same result as `unpack_reference`."""
    if packed.numel() != layout.packed_bytes or slab.numel() != layout.plain_bytes:
        raise ValueError(
            f"{packed.numel()} bytes decoded to {slab.numel()}: the layout has {layout.packed_bytes} and "
            f"{layout.plain_bytes}"
        )
    _decode_kernel[(layout.num_chunks,)](
        packed.data_ptr(), slab.data_ptr(), *_constants(layout), num_warps=NUM_WARPS
    )


def _constants(layout: PackedLayout) -> tuple[int, int, int, int]:
    """The constants of the kernel, in its order."""
    return layout.num_elements, layout.codes_at, layout.table_at, layout.escapes_at


@triton.jit(do_not_specialize=["packed_address", "slab_address"])  # type: ignore[untyped-decorator]
def _decode_kernel(  # type: ignore[no-untyped-def]
    packed_address,
    slab_address,
    NUM_ELEMENTS: tl.constexpr,  # noqa: N803
    CODES_AT: tl.constexpr,  # noqa: N803
    TABLE_AT: tl.constexpr,  # noqa: N803
    ESCAPES_AT: tl.constexpr,  # noqa: N803
):
    decode_chunk(packed_address, slab_address, tl.program_id(0), NUM_ELEMENTS, CODES_AT, TABLE_AT, ESCAPES_AT)


@triton.jit  # type: ignore[untyped-decorator]
def decode_chunk(  # type: ignore[no-untyped-def]
    packed_address,
    slab_address,
    chunk,
    NUM_ELEMENTS: tl.constexpr,  # noqa: N803
    CODES_AT: tl.constexpr,  # noqa: N803
    TABLE_AT: tl.constexpr,  # noqa: N803
    ESCAPES_AT: tl.constexpr,  # noqa: N803
):
    """Decode one chunk of the record at `packed_address` into the slab at `slab_address`.

    Returns the bytes that were read.
    """
    packed_address, slab_address = tl.cast(packed_address, tl.int64), tl.cast(slab_address, tl.int64)
    start = chunk * _CHUNK
    size = tl.minimum(NUM_ELEMENTS - start, _CHUNK)
    half = tl.multiple_of(size // 8, 4)  # words of mantissas in half a chunk
    mantissas = tl.multiple_of((packed_address + start).to(tl.pointer_type(tl.uint32)), 16)
    upper_mantissas = tl.multiple_of(mantissas + half, 16)
    codes = tl.multiple_of((packed_address + CODES_AT + start // 2).to(tl.pointer_type(tl.uint32)), 16)
    quads = tl.multiple_of((slab_address + start.to(tl.int64) * 2).to(tl.pointer_type(tl.int64)), 16)
    upper_quads = tl.multiple_of(quads + half, 16)
    table = (packed_address + TABLE_AT).to(tl.pointer_type(tl.uint32)) + chunk

    words = tl.arange(0, _CHUNK // 8)
    is_inside = words < half
    code = tl.load(codes + words, mask=is_inside, other=0)
    lower = tl.load(mantissas + words, mask=is_inside, other=0)
    upper = tl.load(upper_mantissas + words, mask=is_inside, other=0)
    entry, next_entry = tl.load(table), tl.load(table + 1)
    base = entry & 0xFF
    tl.store(quads + words, _decode_quad(lower, code & 0xFFFF, base), mask=is_inside)
    tl.store(upper_quads + words, _decode_quad(upper, code >> 16, base), mask=is_inside)

    escape = (entry >> 8).to(tl.int32)
    end = (next_entry >> 8).to(tl.int32)
    num_bytes = size + size // 2 + 8 + 4 * (end - escape)
    if escape < end:
        tl.debug_barrier()  # the chunk is stored
        escapes = (packed_address + ESCAPES_AT).to(tl.pointer_type(tl.uint32))
        elements = quads.to(tl.pointer_type(tl.uint16), bitcast=True)
        while escape < end:
            listed = escape + tl.arange(0, _ESCAPES)
            whole = tl.load(escapes + listed, mask=listed < end, other=0)
            tl.store(elements + (whole >> 16), (whole & 0xFFFF).to(tl.uint16), mask=listed < end)
            escape += _ESCAPES
    return num_bytes


@triton.jit
def _decode_quad(mantissas, codes, base):  # type: ignore[no-untyped-def]
    """Four bf16 in an int64, from words of four mantissa bytes and of four codes (in the low half)."""
    low = _decode_pair(
        (mantissas & 0xFF) | ((mantissas & 0xFF00) << 8), (codes & 0xF) | ((codes & 0xF0) << 12), base
    )
    mantissas, codes = mantissas >> 16, codes >> 8
    high = _decode_pair(
        (mantissas & 0xFF) | ((mantissas & 0xFF00) << 8), (codes & 0xF) | ((codes & 0xF0) << 12), base
    )
    return (high.to(tl.int64) << 32) | low.to(tl.int64)


@triton.jit
def _decode_pair(mantissas, codes, base):  # type: ignore[no-untyped-def]
    """Two bf16 in a word. `mantissas`, `codes`: one in each half. For an escape: bits without meaning."""
    has_base = ((codes + 0x000F000F) >> 4) & 0x00010001  # code 0 is exponent 0
    exponents = codes + has_base * base
    return ((mantissas & 0x00800080) << 8) | (exponents << 7) | (mantissas & 0x007F007F)
