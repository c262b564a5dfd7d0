"""What goes into tiles of activations and what comes out of tiles of results, 16 tokens at once.

    inputs   arguments   0 addresses of the tokens' rows of float32, 16 of them   1 the group's tiles
    gate     arguments   0 gate results [rows, 16 tokens]   1 those of up   2 bytes from a row to the next
                         3 groups of 16 outputs   4 the tiles that they go to   5 column of the first one
    add      arguments   0 results [rows, 16 tokens]   1 groups of 16 rows   2 numbers of the tokens
                         3 their weights, float32   4 how many they are   5 output of token 0 at the first row
                         6 bytes from a token's output to the next

`inputs` writes whole blocks of columns. `gate` needs no transposition: what one row of a tile of activations
holds, two columns of 16 tokens, two rows of results are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import ir

from hetero_cpu_kernels.experts.activations import TILE, TILE_COLUMNS, Layout
from hetero_cpu_kernels.experts.emitter import F32, I16, I32, I64, LINE_BYTES, Emitter
from hetero_cpu_kernels.experts.form import Gate
from hetero_cpu_kernels.experts.vector_gate import gated


def write_inputs(module: ir.Module, name: str, *, layout: Layout) -> None:
    """Add the function `name`, which fills a group of 16 tokens."""
    emit = Emitter(module, name, lanes=TILE)
    table, out = emit.argument(0), emit.argument(1)
    rows = [emit.load(I64, emit.add(table, 8 * token)) for token in range(TILE)]
    block = layout.order.size
    with emit.loop(0, layout.columns - layout.columns % block, step=block) as turn:
        halves = [_halves(emit, emit.add(row, emit.mul(turn.index, 4)), block) for row in rows]
        for first in range(0, block, TILE_COLUMNS):
            order = ir.Constant(
                ir.VectorType(I32, TILE_COLUMNS), layout.order[first : first + TILE_COLUMNS].tolist()
            )
            words = [
                emit.build.bitcast(emit.build.shuffle_vector(of_row, of_row, order), emit.words)
                for of_row in halves
            ]
            line = emit.add(emit.build.lshr(turn.index, I64(1)), first // 2)
            place = emit.add(out, emit.mul(line, LINE_BYTES))
            for number, column_pair in enumerate(transposed(emit, words)):
                emit.store(column_pair, emit.add(place, number * LINE_BYTES))
    emit.finish()


def _halves(emit: Emitter, address: Any, columns: int) -> Any:
    """The nearest bfloat16 of so many float32 at an address, in their order, as 16-bit lanes."""
    pairs = ir.VectorType(I16, TILE_COLUMNS)
    parts = []
    for first in range(0, columns, TILE_COLUMNS):
        place = emit.add(address, 4 * first)
        floats = [emit.load(emit.floats, emit.add(place, LINE_BYTES * half)) for half in range(2)]
        parts.append(emit.build.bitcast(emit.round_to_pairs(*floats), pairs))
    if len(parts) == 1:
        return parts[0]
    both = ir.Constant(ir.VectorType(I32, columns), list(range(columns)))
    return emit.build.shuffle_vector(*parts, both)


def transposed(emit: Emitter, vectors: Sequence[Any]) -> list[Any]:
    """16 vectors of 16 lanes, each with the lanes of one number of all."""
    vectors, lanes = list(vectors), np.arange(TILE)
    for step in (1, 2, 4, 8):
        is_upper = lanes & step != 0
        masks = [
            ir.Constant(ir.VectorType(I32, TILE), np.where(is_upper, TILE + lanes - step, lanes).tolist()),
            ir.Constant(ir.VectorType(I32, TILE), np.where(is_upper, TILE + lanes, lanes + step).tolist()),
        ]
        for i in range(TILE):
            if not i & step:
                pair = vectors[i], vectors[i + step]
                vectors[i], vectors[i + step] = (emit.build.shuffle_vector(*pair, mask) for mask in masks)
    return vectors


def write_gate(module: ir.Module, name: str, *, gate: Gate, layout: Layout) -> None:
    """Add the function `name`, which makes activations in `layout` of the results of gate and up."""
    emit = Emitter(module, name, lanes=TILE)
    gates, ups, row_bytes, num_groups, out, column = map(emit.argument, range(6))
    block = layout.order.size
    with emit.loop(0, num_groups) as turn:
        first = emit.add(column, emit.mul(turn.index, TILE))
        begin = emit.mul(emit.mul(turn.index, TILE), row_bytes)
        within = emit.build.and_(first, I64(block - 1))
        block_at = emit.add(out, emit.mul(emit.build.sub(first, within), LINE_BYTES // 2))
        lines, shift = _lines_of_group(layout)
        moved = emit.mul(emit.build.lshr(within, I64(TILE.bit_length() - 1)), shift * LINE_BYTES)
        for line, rows in lines:
            values = []
            for row in rows:
                at = emit.add(begin, emit.mul(row_bytes, row))
                values.append(gated_row(emit, gate, emit.add(gates, at), emit.add(ups, at)))
            place = emit.add(emit.add(block_at, moved), line * LINE_BYTES)
            emit.store(_interleaved(emit, emit.round_to_pairs(*values)), place)
    emit.finish()


def gated_row(emit: Emitter, gate: Gate, gates: Any, ups: Any) -> Any:
    """The activations of 16 tokens, of the results of gate and up at two addresses."""
    return gated(emit, gate, *(emit.load(emit.floats, place) for place in (gates, ups)))


def _lines_of_group(layout: Layout) -> tuple[list[tuple[int, tuple[int, int]]], int]:
    """Which two of 16 columns each line of a block's first group is of; how many lines on the next are."""
    pairs = layout.order.reshape(-1, 2)
    groups: list[list[tuple[int, tuple[int, int]]]] = [[] for _ in range(layout.order.size // TILE)]
    for line, (first, second) in enumerate(pairs.tolist()):
        assert first // TILE == second // TILE, "a line is of columns of two groups"
        groups[first // TILE].append((line, (first % TILE, second % TILE)))
    shift = groups[1][0][0] - groups[0][0][0]
    for number, group in enumerate(groups):
        expected = [(line + number * shift, rows) for line, rows in groups[0]]
        assert group == expected, "groups of 16 columns are not ordered alike"
    return groups[0], shift


def _interleaved(emit: Emitter, words: Any) -> Any:
    """16-bit lanes 0, 16, 1, 17 ..."""
    halves = emit.build.bitcast(words, ir.VectorType(I16, TILE_COLUMNS))
    lanes = np.arange(TILE_COLUMNS).reshape(2, TILE).T.reshape(-1)
    mask = ir.Constant(ir.VectorType(I32, TILE_COLUMNS), lanes.tolist())
    return emit.build.bitcast(emit.build.shuffle_vector(halves, halves, mask), emit.words)


def write_add(module: ir.Module, name: str) -> None:
    """Add the function `name`, which adds weighted results to the tokens' outputs."""
    emit = Emitter(module, name, lanes=TILE)
    results, num_groups, tokens, weights, num_tokens, out, out_bytes = map(emit.argument, range(7))
    with emit.loop(0, num_groups) as turn:
        here = emit.add(results, emit.mul(turn.index, TILE * LINE_BYTES))
        rows = [emit.load(emit.floats, emit.add(here, LINE_BYTES * row)) for row in range(TILE)]
        for token, values in enumerate(transposed(emit, rows)):
            emit.store(values, emit.add(here, LINE_BYTES * token))
        with emit.loop(0, num_tokens) as inner:
            number = emit.load(I64, emit.add(tokens, emit.mul(inner.index, 8)))
            weight = emit.splat(emit.load(F32, emit.add(weights, emit.mul(inner.index, 4))))
            place = emit.add(emit.add(out, emit.mul(number, out_bytes)), emit.mul(turn.index, LINE_BYTES))
            values = emit.load(emit.floats, emit.add(here, emit.mul(inner.index, LINE_BYTES)))
            emit.store(emit.fma(values, weight, emit.load(emit.floats, place)), place)
    emit.finish()
