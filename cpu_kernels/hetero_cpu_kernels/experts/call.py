"""What changes from call to call, checked and written to a plan by compiled code.

A layer of one token may last a third of a millisecond: a score of numpy's small operations would be a tenth
of that.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from hetero_cpu_kernels.experts.form import ExpertForm
from hetero_cpu_kernels.experts.plan import MOST_TOKENS

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]


class Routing(NamedTuple):
    """Which experts compute which tokens.

    Expert i has its record at byte `offsets[i]` of the bank, and the tokens `tokens[bounds[i]:bounds[i+1]]`
    with those `weights`. A token's sum is in the order of the experts: list them ascending.
    """

    offsets: Integers
    """`[experts]`"""
    bounds: Integers
    """`[experts + 1]`"""
    tokens: Integers
    """`[pairs]`, rows of `hidden`"""
    weights: Floats
    """`[pairs]`"""


class Extent(NamedTuple):
    """The ends of what a routing names; of an empty one nothing is out of bounds."""

    least_tokens: int
    most_tokens: int
    first_token: int
    last_token: int
    first_offset: int
    last_offset: int


def check_arrays(form: ExpertForm, *, hidden: Floats, bank: Bytes, out: Floats) -> None:
    """Raises ValueError for arrays that the kernels cannot use as they are."""
    for name, floats in (("hidden", hidden), ("out", out)):
        if floats.dtype != np.float32 or floats.ndim != 2 or floats.shape[1] != form.hidden:
            raise ValueError(f"{name} is {floats.dtype} {floats.shape}, not float32 [tokens, {form.hidden}]")
    if len(hidden) != len(out):
        raise ValueError(f"hidden has {len(hidden)} tokens, out {len(out)}")
    if bank.dtype != np.uint8 or bank.ndim != 1:
        raise ValueError(f"bank is {bank.dtype} {bank.shape}, not flat uint8")
    arrays: tuple[tuple[str, npt.NDArray[Any]], ...] = (("hidden", hidden), ("bank", bank), ("out", out))
    for name, array in arrays:
        if not array.flags.c_contiguous:
            raise ValueError(f"{name} is not C-contiguous")


def check_routing(form: ExpertForm, routing: Routing, *, num_tokens: int, bank_bytes: int) -> Extent:
    """Raises ValueError for a routing that names what is not there."""
    for name, array in zip(Routing._fields, routing, strict=True):
        expected = np.float32 if name == "weights" else np.int64
        if array.dtype != expected or array.ndim != 1 or not array.flags.c_contiguous:  # type: ignore[attr-defined]
            raise ValueError(f"routing.{name} is {array.dtype} {array.shape}, not flat {expected.__name__}")  # type: ignore[attr-defined]
    offsets, bounds, tokens, weights = routing
    if len(bounds) != len(offsets) + 1 or bounds[0] != 0 or bounds[-1] != len(tokens):
        raise ValueError(f"routing.bounds must be {len(offsets) + 1} numbers from 0 to {len(tokens)}")
    if len(weights) != len(tokens):
        raise ValueError(f"routing has {len(tokens)} tokens and {len(weights)} weights")
    extent = Extent(*_extent(offsets, bounds, tokens))
    least, most = extent.least_tokens, extent.most_tokens
    if least < 1 or most > MOST_TOKENS:
        raise ValueError(f"an expert has {least if least < 1 else most} tokens, not 1 to {MOST_TOKENS}")
    if extent.first_token < 0 or extent.last_token >= num_tokens:
        raise ValueError(f"routing.tokens name rows outside of the {num_tokens} of hidden")
    if extent.first_offset < 0 or extent.last_offset + form.record_bytes > bank_bytes:
        raise ValueError(f"a record of {form.record_bytes} bytes ends outside of the bank's {bank_bytes}")
    return extent


@njit(nogil=True)
def _extent(offsets, bounds, tokens):
    least, most = MOST_TOKENS, 0
    for expert in range(offsets.size):
        count = bounds[expert + 1] - bounds[expert]
        least, most = min(least, count), max(most, count)
    if offsets.size == 0:
        return 1, 1, 0, -1, 0, -(1 << 62)
    first = last = tokens[0] if tokens.size else 0
    for token in tokens:
        first, last = min(first, token), max(last, token)
    return least, most, first, last, offsets.min(), offsets.max()


@njit(nogil=True)
def write_addresses(words, slots, hidden, out, records, routing):
    """Addresses of the arrays, to the words of a plan that `slots` number; `records`: the bank's is added."""
    words[slots[0]] = hidden.ctypes.data
    words[slots[1]] = out.ctypes.data
    words[slots[2]] = records.ctypes.data
    words[slots[3]] = routing.bounds.ctypes.data
    words[slots[4]] = routing.tokens.ctypes.data
    words[slots[5]] = routing.weights.ctypes.data
