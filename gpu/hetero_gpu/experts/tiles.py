"""How much one program does: chosen by hand for each shape, so that nothing is tuned while serving.

A decode tile is `pairs` experts × `rows` outputs × `cols` inputs. A warp reads whole cache lines of a row, 16
bytes a thread, and asks for several rows at once. A prefill tile is `rows` outputs × `tokens`, and takes
`cols` inputs a step; the weights are the left operand of the dot product, because the tensor cores take that
one from registers, where quantised weights become floats.
"""

from __future__ import annotations

from dataclasses import dataclass

from hetero_gpu.experts.layout import ExpertFormat, Matrix

_LANE = {"float32": 4, "float16": 8, "bfloat16": 8, "fp8": 16, "int8": 16, "int4": 32, "fp4": 32}
"""Columns that one thread reads with one load of 16 bytes."""

_UP_SHARE = {
    "float32": (2, 512, 1),
    "float16": (2, 1024, 1),
    "bfloat16": (2, 1024, 1),
    "fp8": (4, 512, 2),
    "int8": (4, 512, 2),
}
"""Rows, cols and warps where launches overlap: few steps each, so that the programs of the down projection,
which come early, find the memory free. Packed values are bound by their decoding."""

_MOST_DOWN_WARPS = 8

PREFILL_TOKENS = (16, 32, 64, 128)
"""Tokens of a prefill tile."""


@dataclass(frozen=True)
class DecodeTile:
    """`lane`: columns that one thread adds up by itself, all of one scale. `num_stages`: steps of the loop
    over the inputs that are read ahead through shared memory; 1 reads straight into registers."""

    pairs: int
    rows: int
    cols: int
    lane: int
    num_warps: int
    num_stages: int = 1


@dataclass(frozen=True)
class PrefillTile:
    """`lane`: columns of one scale. `num_stages`: steps of the loop over the inputs in flight."""

    rows: int
    tokens: int
    cols: int
    lane: int
    num_warps: int
    num_stages: int


def up_tile(form: ExpertFormat) -> DecodeTile:
    """For the up projection of one (token, k): `rows` counts gates and ups."""
    if form.up.is_transposed:
        return DecodeTile(pairs=1, rows=64, cols=32, lane=1, num_warps=4)
    rows, cols, num_warps = _UP_SHARE.get(form.up.encoding, (8, _decode_cols(form.up), 1))
    return DecodeTile(pairs=1, rows=rows, cols=cols, lane=_lane(form.up), num_warps=num_warps)


def down_tile(form: ExpertFormat, top_k: int) -> DecodeTile:
    """For the down projection of one token, a warp for each of its experts, as far as warps go."""
    pairs = power_of_two_above(top_k)
    num_warps = min(max(pairs, 4), _MOST_DOWN_WARPS)
    if form.down.is_transposed:
        return DecodeTile(pairs=pairs, rows=16, cols=32, lane=1, num_warps=num_warps)
    cols, lane = _decode_cols(form.down), _lane(form.down)
    return DecodeTile(pairs=pairs, rows=4, cols=cols, lane=lane, num_warps=num_warps)


def prefill_tile(matrix: Matrix, tokens_per_expert: int, *, itemsize: int) -> PrefillTile:
    """For either projection. `tokens_per_expert`: the mean, which says what a tile can share. `itemsize`: of
    the activations. With two bytes, less than 99 KiB of shared memory, which every GPU since 2020 has."""
    least, most = PREFILL_TOKENS[0], PREFILL_TOKENS[-1]
    tokens = min(max(power_of_two_above(tokens_per_expert), least), most)
    cols = (64 if matrix.scales is None or tokens == 128 else 128) * 2 // itemsize
    lane = _shared_cols(matrix, cols)
    num_warps = 8 if tokens == 128 else 4
    return PrefillTile(128, tokens, cols, lane, num_warps, num_stages=3)


def _decode_cols(matrix: Matrix) -> int:
    """One cache line a row and load of a warp where values are packed, four of them where they are not."""
    return 512 if matrix.is_packed else 256


def _lane(matrix: Matrix) -> int:
    return _shared_cols(matrix, _LANE[matrix.encoding])


def _shared_cols(matrix: Matrix, most: int) -> int:
    """The largest power of two up to `most` whose columns, from any multiple of it, share a scale."""
    if matrix.scales is None or matrix.is_row_scaled:
        return most
    block = matrix.scales.block_cols
    return min(most, block & -block)


def power_of_two_above(number: int) -> int:
    """The least power of two that is no less than `number`."""
    return 1 << (number - 1).bit_length() if number > 1 else 1
