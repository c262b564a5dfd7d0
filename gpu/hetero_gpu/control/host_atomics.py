"""The host's side of `memory_order`, and calls by address, for compiled code that runs without the GIL.

Everything here is a numba intrinsic: usable inside `@njit` functions only. Addresses are int64.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

_I64, _I32 = ir.IntType(64), ir.IntType(32)


def _load_acquire(_typing: Any, address: Any) -> Any:
    """int64 at `address`; what its writer wrote before releasing it is seen from here on."""

    def emit(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(arguments[0], _I64.as_pointer()), "acquire", 8)

    return types.int64(types.int64), emit


def _store_release(_typing: Any, address: Any, value: Any) -> Any:
    """Write int64 `value` to `address`, after everything that this thread wrote before."""

    def emit(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], _I64.as_pointer())
        builder.store_atomic(arguments[1], pointer, "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit


def _call(builder: Any, address: Any, argument_types: list[Any], arguments: list[Any]) -> Any:
    function_type = ir.FunctionType(_I32, argument_types)
    function = builder.inttoptr(address, function_type.as_pointer())
    return builder.sext(builder.call(function, arguments), _I64)


def _call_copy(_typing: Any, function: Any, to: Any, source: Any, num_bytes: Any, stream: Any) -> Any:
    """`int function(void *to, const void *source, size_t num_bytes, int kind = 1, void *stream)`, as
    cudaMemcpyAsync (kind 1: host to device)."""

    def emit(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        address, target, origin, size, queue = arguments
        kinds = [_I64, _I64, _I64, _I32, _I64]
        return _call(builder, address, kinds, [target, origin, size, ir.Constant(_I32, 1), queue])

    return types.int64(*[types.int64] * 5), emit


def _call_record(_typing: Any, function: Any, event: Any, stream: Any) -> Any:
    """`int function(void *event, void *stream)`, as cudaEventRecord."""

    def emit(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return _call(builder, arguments[0], [_I64, _I64], arguments[1:])

    return types.int64(*[types.int64] * 3), emit


def _call_query(_typing: Any, function: Any, event: Any) -> Any:
    """`int function(void *event)`, as cudaEventQuery."""

    def emit(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return _call(builder, arguments[0], [_I64], arguments[1:])

    return types.int64(*[types.int64] * 2), emit


def _call_sleep(_typing: Any, function: Any, microseconds: Any) -> Any:
    """`int function(unsigned microseconds)`, as usleep."""

    def emit(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return _call(builder, arguments[0], [_I32], [builder.trunc(arguments[1], _I32)])

    return types.int64(*[types.int64] * 2), emit


# mypy sees numba's decorator keep the typing context among the arguments, which a caller does not give.
load_acquire: Any = intrinsic(_load_acquire)
store_release: Any = intrinsic(_store_release)
call_copy: Any = intrinsic(_call_copy)
call_record: Any = intrinsic(_call_record)
call_query: Any = intrinsic(_call_query)
call_sleep: Any = intrinsic(_call_sleep)
