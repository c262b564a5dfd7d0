"""Forms that the kernels cannot read are refused, with the numbers."""

from __future__ import annotations

import numpy as np
import pytest

from bench.cpu_expert_records import make_form
from hetero_cpu_kernels.experts.form import ExpertForm, Gate, Matrix, Scales
from hetero_cpu_kernels.experts.packing import Packing
from hetero_cpu_kernels.experts.program import Program
from hetero_cpu_kernels.experts.reference import decode_fp8
from hetero_cpu_kernels.experts.targets import target
from hetero_gpu.packed.layout import PackedLayout


def test_matrices() -> None:
    with pytest.raises(ValueError, match="fp8 needs scales"):
        Matrix(0, "fp8", 4, 4)
    with pytest.raises(ValueError, match="bfloat16 has no scales"):
        Matrix(0, "bfloat16", 4, 4, Scales(64, "float32", 1, 4))
    with pytest.raises(ValueError, match="5 columns are odd"):
        Matrix(0, "int4", 4, 5, Scales(64, "float32", 1, 5))
    with pytest.raises(ValueError, match="scale blocks of 16 columns"):
        Matrix(0, "int4", 4, 64, Scales(256, "float32", 1, 16))


def test_forms() -> None:
    up, down = Matrix(0, "bfloat16", 8, 6), Matrix(96, "bfloat16", 6, 4)
    with pytest.raises(ValueError, match="cannot hold the 144"):
        ExpertForm(128, up, down)
    with pytest.raises(ValueError, match="are not"):
        ExpertForm(4096, up, up)
    with pytest.raises(ValueError, match="silu has none"):
        Gate(limit=1.0)


def test_packed_rows_are_whole_blocks() -> None:
    form = make_form("packed", 128, 34)
    assert Program.write(form, form.up, target=target("avx512"))
    with pytest.raises(ValueError, match=r"34 columns at byte .* must be a multiple of 64"):
        Program.write(form, form.down, target=target("avx512"))


def test_packed_records_have_no_biases() -> None:
    with pytest.raises(ValueError, match="a packed record with biases"):
        make_form("packed", 128, 64, has_bias=True)


@pytest.mark.parametrize("elements", [2048, 16384, 16384 * 3 + 2048])
def test_the_packing_is_the_banks(elements: int) -> None:
    ours, theirs = Packing(elements), PackedLayout(elements)
    assert (ours.num_chunks, ours.codes_at, ours.table_at, ours.escapes_at) == (
        theirs.num_chunks,
        theirs.codes_at,
        theirs.table_at,
        theirs.escapes_at,
    )


def test_fp8_of_the_reference() -> None:
    torch = pytest.importorskip("torch")
    codes = np.arange(256, dtype=np.uint8)
    known = torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy()
    is_number = ~np.isnan(known)
    assert np.array_equal(decode_fp8(codes)[is_number], known[is_number])
