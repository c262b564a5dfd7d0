"""Acquire and release between a kernel and the host, through mapped host memory.

    one side   writes the payload ── store_release(flag) ─┐
    the other                                             └─ load_acquire(flag) ── reads the payload

What was written before the release is seen after an acquire that reads the released value. Words are 64-bit
and aligned. On the GPU the pair is PTX at system scope. The interpreter runs a kernel as one thread of the
host, so its twin is a plain load or store there (x86 and the interpreter's locks keep their order).
The host's own side of the pair is `host_atomics`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import num_threads

IS_INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Whether kernels run in Triton's interpreter (TRITON_INTERPRET=1 when triton was imported)."""


@triton.jit  # type: ignore[untyped-decorator]
def pointer_to(address, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """The address of a DTYPE, which a kernel got as a number: one below 2 GiB has 32 bits for Triton."""
    return tl.cast(address, tl.int64).to(tl.pointer_type(DTYPE))


if IS_INTERPRETED:

    @triton.jit
    def store_release(address, value):  # type: ignore[no-untyped-def]
        tl.store(pointer_to(address, tl.int64), value)

    @triton.jit
    def load_acquire(address):  # type: ignore[no-untyped-def]
        return tl.load(pointer_to(address, tl.int64))

else:

    @triton.jit
    def store_release(address, value):  # type: ignore[no-untyped-def]
        # Inline PTX runs in every thread, so it picks one; the barrier brings the writes of all the others.
        tl.debug_barrier()
        tl.inline_asm_elementwise(
            "{ .reg .pred is_first; .reg .b32 thread; mov.u32 thread, %tid.x; "
            "setp.eq.u32 is_first, thread, 0; @is_first st.release.sys.global.b64 [$1], $2; "
            "mov.b64 $0, $2; }",
            "=l,l,l",
            [tl.cast(address, tl.int64), tl.cast(value, tl.int64)],
            dtype=tl.int64,
            is_pure=False,
            pack=1,
        )

    @triton.jit
    def load_acquire(address):  # type: ignore[no-untyped-def]
        # All threads must go on with one value although the word may change between two of their loads: each
        # loads it, and they agree on the least. So the word must only grow, and everything that was written
        # before a release must stay true after the next.
        values = tl.inline_asm_elementwise(
            "ld.acquire.sys.global.b64 $0, [$1];",
            "=l,l",
            [tl.cast(address, tl.int64) + tl.zeros((num_threads(),), tl.int64)],
            dtype=tl.int64,
            is_pure=False,
            pack=1,
        )
        return tl.min(values, axis=0)
