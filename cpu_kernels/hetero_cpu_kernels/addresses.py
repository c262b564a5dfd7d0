"""Memory and functions by address, for compiled loops: arrays, atomic words, sleeping, calls.

Words are 64 bits, little-endian, and sequentially consistent. Linux only: a sleeping thread waits on a futex.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
# mypy: disable-error-code="call-arg, attr-defined, var-annotated"

from __future__ import annotations

import ctypes
import platform
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

WORD = ir.IntType(64)
POINTER = ir.PointerType()

_IS_ARM = platform.machine().lower() in ("aarch64", "arm64")
_FUTEX = 98 if _IS_ARM else 202  # number of the system call
_WAIT_PRIVATE, _WAKE_PRIVATE = 128, 129
_ALL_WAITERS = 0x7FFFFFFF

_libc = ctypes.CDLL(None)
_syscall = _libc["syscall"]  # a function object of our own: its signature is set below
_syscall.argtypes = [ctypes.c_int64] * 5
_syscall.restype = ctypes.c_int64
yield_processor = _libc["sched_yield"]
yield_processor.argtypes = []
yield_processor.restype = ctypes.c_int32
_clock_gettime = _libc["clock_gettime"]
_clock_gettime.argtypes = [ctypes.c_int32, ctypes.c_int64]
_clock_gettime.restype = ctypes.c_int32
_MONOTONIC = 1  # the clock of time.perf_counter_ns


@intrinsic
def pointer(typing_context, address):
    """The void pointer that `numba.carray` makes an array of."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], POINTER)

    return types.voidptr(types.int64), generate


@intrinsic
def load_word(typing_context, address):
    """The 64-bit word at an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(arguments[0], POINTER), "seq_cst", 8, typ=WORD)

    return types.int64(types.int64), generate


@intrinsic
def store_word(typing_context, address, value):
    """Write a 64-bit word."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = builder.inttoptr(arguments[0], WORD.as_pointer())
        builder.store_atomic(arguments[1], place, "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def add_to_word(typing_context, address, value):
    """Add to a 64-bit word; what it was before."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = builder.inttoptr(arguments[0], POINTER)
        return builder.atomic_rmw("add", place, arguments[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def pause(typing_context):
    """Tell the core that this loop only waits."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        hint = [ir.IntType(32)(1)] if _IS_ARM else []
        kind = ir.FunctionType(ir.VoidType(), [value.type for value in hint])
        name = "llvm.aarch64.hint" if _IS_ARM else "llvm.x86.sse2.pause"
        builder.call(cgutils.get_or_insert_function(builder.module, kind, name), hint)
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def ask_for(typing_context, address):
    """Ask for a cache line, into the second-level cache; an address outside of memory does no harm."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [POINTER, word, word, word])
        ask = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(ask, [builder.inttoptr(arguments[0], POINTER), word(0), word(2), word(1)])
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def bits_of(typing_context, value):
    """The bits of a float32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.uint32(types.float32), generate


@intrinsic
def float_of(typing_context, bits):
    """The float32 with these bits."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.uint32), generate


@intrinsic
def call_kernel(typing_context, function, arguments_at):
    """Call `void function(i64 *arguments)`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [POINTER])
        place = builder.inttoptr(arguments[0], kind.as_pointer())
        builder.call(place, [builder.inttoptr(arguments[1], POINTER)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def call_job(typing_context, function, plan, index, count):
    """Call `i64 function(i64 plan, i64 index, i64 count)`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(WORD, [WORD, WORD, WORD])
        return builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), arguments[1:])

    return types.int64(types.int64, types.int64, types.int64, types.int64), generate


@njit(nogil=True)
def sleep_while(word_at, value, timeout_at):
    """Sleep while the low half of a word equals that of `value`, until it is woken.

    `timeout_at`: address of a `timespec`, or 0 to sleep for ever. May return early: ask again.
    """
    _syscall(_FUTEX, word_at, _WAIT_PRIVATE, value & 0xFFFFFFFF, timeout_at)


@njit(nogil=True)
def wake_sleepers(word_at):
    """Wake all that sleep on a word."""
    _syscall(_FUTEX, word_at, _WAKE_PRIVATE, _ALL_WAITERS, 0)


@njit(nogil=True)
def monotonic_ns(timespec_at):
    """Nanoseconds, as `time.perf_counter_ns` counts. `timespec_at`: 16 bytes that this thread may use."""
    _clock_gettime(_MONOTONIC, timespec_at)
    return load_word(timespec_at) * 1_000_000_000 + load_word(timespec_at + 8)
