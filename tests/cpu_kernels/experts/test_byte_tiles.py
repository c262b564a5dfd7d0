"""int8 in tiles of bytes: its error, shapes that are whole in one matrix only, sums as large as they get."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from bench.cpu_expert_records import layer_reference, make_form, relative_error
from hetero_cpu_kernels.experts import CpuExperts, ExpertForm, Target, target
from hetero_cpu_kernels.experts.byte_tiles import MOST_COLUMNS, multiplies_byte_tiles
from hetero_cpu_kernels.experts.form import Matrix, Scales
from hetero_cpu_kernels.experts.program import Program
from hetero_cpu_kernels.pool import WorkerPool
from tests.cpu_kernels.experts.cases import Case

DIGITS, BFLOAT16 = 2e-4, 6e-3
"""Most error of sums of either."""
COUNTS = [9, 40, 1, 33, 3, 16, 17]
SHAPES = {
    "[64,64]": (64, 64, "silu", False),
    "[192,128]+bias": (192, 128, "clamped", True),
    "[128,64]+interleaved+bias": (128, 64, "gpt_oss", True),
}


def units(form: ExpertForm, entry: Target) -> tuple[str, str]:
    """What multiplies many tokens with up and down."""
    up, down = (Program.write(form, matrix, target=entry).many.unit for matrix in (form.up, form.down))
    return up, down


@pytest.mark.parametrize("shape", SHAPES)
def test_errors_are_those_of_digits(pools: dict[int, WorkerPool], tiled: Target, shape: str) -> None:
    hidden, inner, gate, has_bias = SHAPES[shape]
    form = make_form("int8", hidden, inner, gate=gate, has_bias=has_bias)
    assert units(form, tiled) == ("digit_tiles", "digit_tiles")
    case = Case.make(form, COUNTS, 40)
    assert relative_error(case.run(CpuExperts(form, pools[2], target=tiled)), case.reference) < DIGITS


@pytest.mark.parametrize(
    ("hidden", "inner", "expected"),
    [
        (64, 48, ("digit_tiles", "tiles")),
        (96, 64, ("tiles", "digit_tiles")),
        (80, 64, ("tiles", "tiles")),
        (128, 40, ("tiles", "tiles")),
    ],
)
@pytest.mark.parametrize("gate", ["silu", "gpt_oss"])
def test_a_matrix_that_is_not_whole_goes_through_bfloat16(
    pools: dict[int, WorkerPool], tiled: Target, hidden: int, inner: int, expected: tuple[str, str], gate: str
) -> None:
    form = make_form("int8", hidden, inner, gate=gate, has_bias=True)
    assert units(form, tiled) == expected
    case = Case.make(form, COUNTS, 40)
    assert relative_error(case.run(CpuExperts(form, pools[2], target=tiled)), case.reference) < BFLOAT16


def test_bits_do_not_depend_on_the_number_of_workers(pools: dict[int, WorkerPool], tiled: Target) -> None:
    form = make_form("int8", 128, 192)
    case = Case.make(form, COUNTS, 40)
    outs = [case.run(CpuExperts(form, pool, target=tiled)) for pool in pools.values()]
    assert all(np.array_equal(out, outs[0]) for out in outs[1:])


@pytest.mark.parametrize("weight", [-128, 127], ids=str)
@pytest.mark.parametrize("x", [-0.01, 0.01], ids=str)
def test_the_largest_sums_fit(pools: dict[int, WorkerPool], tiled: Target, weight: int, x: float) -> None:
    form = make_form("int8", 8192, 64)
    case = Case.make(form, [17], 17)
    size = form.up.num_bytes
    case.bank[:size] = np.full(size, weight, dtype=np.int8).view(np.uint8)
    case.hidden[:] = x
    expected = layer_reference(case.hidden, [case.bank], form, case.routing)
    assert np.isfinite(expected).all()
    assert relative_error(case.run(CpuExperts(form, pools[2], target=tiled)), expected) < DIGITS


def test_what_no_sum_has_room_for_goes_through_bfloat16() -> None:
    def matrix(cols: int) -> Matrix:
        return Matrix(0, "int8", 32, cols, Scales(32 * cols, "float32", 1, cols))

    most = MOST_COLUMNS // 64 * 64
    assert most * 128 * 128 < 2**31 <= (most + 64) * 128 * 128
    assert multiplies_byte_tiles(matrix(most), target("amx"))
    assert not multiplies_byte_tiles(matrix(most + 64), target("amx"))


def test_scales_of_blocks_go_through_bfloat16() -> None:
    blocks = Matrix(0, "int8", 32, 128, Scales(32 * 128, "float32", 1, 64))
    assert not multiplies_byte_tiles(blocks, target("amx"))


def test_tokens_of_zeros_small_numbers_and_no_numbers(pools: dict[int, WorkerPool], tiled: Target) -> None:
    form = make_form("int8", 128, 64)
    case = Case.make(form, [20], 20)
    case.hidden[0] = 0.0
    case.hidden[1] *= 1e-20
    case.hidden[2] *= 1e-38
    case.hidden[3, 5] = np.nan
    case.hidden[17, 5] = np.inf
    with np.errstate(all="ignore"):
        expected = layer_reference(case.hidden, [case.bank], form, case.routing)
    out = case.run(CpuExperts(form, pools[2], target=tiled))
    assert not out[0].any()
    assert np.allclose(out[1:3], expected[1:3], rtol=0, atol=1e-30)
    assert np.isnan(out[[3, 17]]).all()
    others = np.delete(np.arange(20), [0, 1, 2, 3, 17])
    assert relative_error(out[others], expected[others]) < DIGITS


def test_rows_and_columns_become_the_same_digits(emulated: Target) -> None:
    columns, form = 128, make_form("int8", 128, 128)
    x = np.random.default_rng(0).standard_normal((16, columns)).astype(np.float32)
    x[3] *= 1000
    rows, across = np.arange(16) * x.strides[0] + x.ctypes.data, np.ascontiguousarray(x.T)
    outs = []
    for matrix, source in ((form.up, rows.ctypes.data), (form.down, across.ctypes.data)):
        out = np.zeros(64 + 32 * columns, dtype=np.uint8)
        code = Program.write(form, matrix, target=emulated).compile()
        arguments = np.array([source, out.ctypes.data], dtype=np.int64)
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(code.address("inputs"))(arguments.ctypes.data)
        outs.append(out)
    assert np.array_equal(outs[0], outs[1])
    scales = outs[0][:64].view(np.float32)
    assert np.allclose(scales, abs(x).max(axis=1) / 32639)
    # [blocks, digits, quads of columns, tokens, columns of a quad]
    digits = outs[0][64:].view(np.int8).reshape(-1, 2, 16, 16, 4).astype(np.int32)
    whole = (256 * digits[:, 0] + digits[:, 1]).transpose(2, 0, 1, 3).reshape(16, columns)
    assert (abs(whole * scales[:, None] - x) <= 0.51 * scales[:, None]).all()
