"""Activations of 16 tokens as tiles of digits, two signed bytes each (`digits`), for products of bytes.

    group    |float32 [columns, 16 tokens] |scales of the tokens |block |block ...
             ^ 0                            ^ digits_at
    block    of 64 columns: a tile of high digits, a tile of low ones
    tile     row k: columns 4k, 4k + 1, 4k + 2 and 4k + 3 of token 0, then of token 1 ...

The float32 are outputs of the gate; there are none for the up projection. A scale needs the largest of them
all, which several workers compute: so digits are made when they have met.

    inputs   arguments   0 addresses of 16 tokens' rows of float32; or float32 [columns, 16 tokens]
                         1 where digits go
    gate     as in `tile_values`
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from hetero_cpu_kernels.experts.activations import BYTE_COLUMNS, TILE, TILE_BYTES, Layout
from hetero_cpu_kernels.experts.digits import (
    digit_bytes,
    high_digits,
    larger_magnitudes,
    scale_and_factor,
    whole_numbers,
)
from hetero_cpu_kernels.experts.emitter import F32, I64, LINE_BYTES, Emitter
from hetero_cpu_kernels.experts.form import Gate
from hetero_cpu_kernels.experts.tile_values import gated_row, transposed

BLOCK_BYTES = 2 * TILE_BYTES
_COLUMNS_A_WORD = 4


def write_digits_of_rows(module: ir.Module, name: str, *, layout: Layout) -> None:
    """Add the function `name`, which fills a group of 16 tokens: of the up projection."""
    emit = Emitter(module, name, lanes=TILE)
    table, out = emit.argument(0), emit.argument(1)
    rows = [emit.load(I64, emit.add(table, 8 * token)) for token in range(TILE)]
    with emit.loop(0, layout.columns, step=TILE, carried=[emit.word(0)] * TILE) as turn:
        loaded = [emit.load(emit.words, emit.add(row, emit.mul(turn.index, 4))) for row in rows]
        turn.carried = [
            larger_magnitudes(emit, words, before) for words, before in zip(loaded, turn.carried, strict=True)
        ]
    factors = _store_scales(emit, transposed(emit, turn.carried), out)
    block = ir.VectorType(F32, BYTE_COLUMNS)
    with emit.loop(0, layout.columns, step=BYTE_COLUMNS) as turn:
        digits = []
        for token, row in enumerate(rows):
            floats = emit.load(block, emit.add(row, emit.mul(turn.index, 4)))
            factor = emit.load(F32, emit.add(factors, 4 * token))
            digits.append(
                [emit.build.bitcast(part, emit.words) for part in digit_bytes(emit, floats, factor)]
            )
        place = _block_at(emit, out, emit.build.lshr(turn.index, I64(BYTE_COLUMNS.bit_length() - 1)))
        for number, words in enumerate(zip(*digits, strict=True)):
            for k, line in enumerate(transposed(emit, words)):
                emit.store(line, emit.add(place, number * TILE_BYTES + k * LINE_BYTES))
    emit.finish()


def write_digits_of_outputs(module: ir.Module, name: str, *, layout: Layout) -> None:
    """Add the function `name`, which makes a group's digits of its float32: of the down projection."""
    emit = Emitter(module, name, lanes=TILE)
    source, out = emit.argument(0), emit.argument(1)
    with emit.loop(0, layout.columns, step=_COLUMNS_A_WORD, carried=[emit.word(0)] * _COLUMNS_A_WORD) as turn:
        places = _lines(emit, source, turn.index)
        turn.carried = [
            larger_magnitudes(emit, emit.load(emit.words, place), before)
            for place, before in zip(places, turn.carried, strict=True)
        ]
    factors = emit.load(emit.floats, _store_scales(emit, turn.carried, out))
    with emit.loop(0, layout.columns // BYTE_COLUMNS) as turn, emit.loop(0, TILE) as inner:
        column = emit.add(emit.mul(turn.index, BYTE_COLUMNS), emit.mul(inner.index, _COLUMNS_A_WORD))
        whole = [
            whole_numbers(emit, emit.load(emit.floats, place), factors)
            for place in _lines(emit, source, column)
        ]
        high = [high_digits(emit, part) for part in whole]
        place = emit.add(_block_at(emit, out, turn.index), emit.mul(inner.index, LINE_BYTES))
        emit.store(_packed_bytes(emit, high), place)
        emit.store(_packed_bytes(emit, whole), emit.add(place, TILE_BYTES))
    emit.finish()


def write_float_gate(module: ir.Module, name: str, *, gate: Gate) -> None:
    """Add the function `name`, which puts the gate's outputs where a group has its float32."""
    emit = Emitter(module, name, lanes=TILE)
    gates, ups, row_bytes, num_groups, out, column = map(emit.argument, range(6))
    with emit.loop(0, emit.mul(num_groups, TILE)) as turn:
        at = emit.mul(turn.index, row_bytes)
        value = gated_row(emit, gate, emit.add(gates, at), emit.add(ups, at))
        emit.store(value, _lines(emit, out, emit.add(column, turn.index))[0])
    emit.finish()


def _store_scales(emit: Emitter, magnitudes: Sequence[Any], out: Any) -> Any:
    """Write 16 tokens' scales, of vectors that hold their largest magnitudes; returns where factors lie."""
    largest, *others = magnitudes
    for words in others:
        largest = larger_magnitudes(emit, words, largest)
    scales, factors = scale_and_factor(emit, emit.as_floats(largest))
    emit.store(scales, out)
    with emit.build.goto_entry_block():
        place = emit.build.ptrtoint(emit.build.alloca(emit.floats), I64)
    emit.store(factors, place)
    return place


def _block_at(emit: Emitter, out: Any, number: Any) -> Any:
    return emit.add(emit.add(out, LINE_BYTES), emit.mul(number, BLOCK_BYTES))


def _lines(emit: Emitter, source: Any, column: Any) -> list[Any]:
    """Where four columns of float32 of 16 tokens lie."""
    first = emit.add(source, emit.mul(column, LINE_BYTES))
    return [emit.add(first, number * LINE_BYTES) for number in range(_COLUMNS_A_WORD)]


def _packed_bytes(emit: Emitter, parts: Sequence[Any]) -> Any:
    """A vector of the lowest bytes of four."""
    build = emit.build
    packed = build.and_(parts[0], emit.word(0xFF))
    for number, words in enumerate(parts[1:], start=1):
        octets = build.and_(build.shl(words, emit.word(8 * number)), emit.word(0xFF << 8 * number))
        packed = build.or_(packed, octets)
    return packed
