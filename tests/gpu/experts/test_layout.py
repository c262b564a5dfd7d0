"""What the descriptions refuse, and the reference against the formats that the runtime reads."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bench.expert_records import Case, make_format, random_slabs
from hetero_gpu.experts.layout import ExpertFormat, Gate, Matrix, Scales
from hetero_gpu.experts.reference import apply_gate, dequantize
from hetero_runtime.experts.formats import dequantize_blocks, dequantize_mxfp4

ROW_SCALES = Scales(4096, "float32", 1, 32)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"offset": 8}, "byte 8: must be a multiple of 16"),
        ({"encoding": "fp8"}, "fp8 needs scales"),
        ({"scales": ROW_SCALES}, "bfloat16 has no scales"),
        ({"encoding": "int8", "scales": ROW_SCALES, "is_transposed": True}, "only floats may be transposed"),
        ({"encoding": "int4", "scales": ROW_SCALES, "cols": 33}, "33 columns are odd"),
        ({"encoding": "fp8", "scales": Scales(4096, "float32", 1, 32, parts=3)}, "not 3 equal parts"),
    ],
)
def test_a_matrix_that_no_kernel_reads(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Matrix(**{"offset": 0, "encoding": "bfloat16", "rows": 64, "cols": 32, **arguments})


def test_a_record_too_small_and_projections_that_do_not_fit() -> None:
    up, down = Matrix(0, "bfloat16", 64, 48), Matrix(8192, "bfloat16", 48, 32)
    with pytest.raises(ValueError, match="hold 11264"):
        ExpertFormat(11248, up, down)
    with pytest.raises(ValueError, match=r"are not \[2I, H\] and \[H, I\]"):
        ExpertFormat(16384, down, up)


@pytest.mark.parametrize(("function", "limit"), [("silu", 1.0), ("gpt_oss", 0.0), ("clamped_silu", -1.0)])
def test_a_gate_with_the_wrong_limit(function: Any, limit: float) -> None:
    with pytest.raises(ValueError, match=f"gate '{function}' with limit {limit}"):
        Gate(function, limit=limit)


@pytest.mark.parametrize("block", [(16, 24), (128, 128), (7, 10)], ids=str)
def test_reference_of_block_fp8(block: tuple[int, int]) -> None:
    form = make_format(Case("fp8", "float32", block), 50, 22, Gate())
    record, matrix = random_slabs(form, 1)[0], form.up
    assert matrix.scales is not None
    values = record[matrix.offset :][: matrix.num_bytes].view(torch.float8_e4m3fn).view(44, 50)
    shape = matrix.scale_shape
    scales = record[matrix.scales.offset :].view(torch.float32)[: shape[0] * shape[1] * shape[2]].view(shape)
    expected = dequantize_blocks(values, scales, block=block, dtype=torch.float32)
    assert torch.equal(dequantize(record, matrix), expected)


def test_reference_of_mxfp4() -> None:
    gate = Gate("gpt_oss", is_interleaved=True, limit=7.0, alpha=1.702)
    form = make_format(Case("fp4", "e8m0", (1, 32)), 64, 32, gate)
    record, matrix = random_slabs(form, 1)[0], form.up
    assert matrix.scales is not None
    blocks = record[matrix.offset :][: matrix.num_bytes].view(64, 2, 16)
    scales = record[matrix.scales.offset :][: 64 * 2].view(64, 2)
    expected = dequantize_mxfp4(blocks, scales, dtype=torch.float32).T
    assert torch.equal(dequantize(record, matrix), expected)


def test_reference_of_int4_by_hand() -> None:
    matrix = Matrix(0, "int4", 1, 4, scales=Scales(16, "float32", 1, 2))
    record = torch.zeros(32, dtype=torch.uint8)
    record[:2] = torch.tensor([0x80, 0xF9], dtype=torch.uint8)  # 0 8 | 9 15
    record[16:24] = torch.tensor([1.0, 0.5]).view(torch.uint8)
    assert dequantize(record, matrix).tolist() == [[-8.0, 0.0, 0.5, 3.5]]


def test_gates_of_transformers() -> None:
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    y = 3 * torch.randn(5, 12)
    gpt_oss, deepseek = object.__new__(GptOssExperts), object.__new__(DeepseekV4Experts)
    gpt_oss.__dict__.update(limit=2.0, alpha=1.702)
    deepseek.__dict__.update(limit=2.0, act_fn=torch.nn.functional.silu)
    gate = Gate("gpt_oss", is_interleaved=True, limit=2.0, alpha=1.702)
    torch.testing.assert_close(apply_gate(y, gate), gpt_oss._apply_gate(y))
    torch.testing.assert_close(apply_gate(y, Gate("clamped_silu", limit=2.0)), deepseek._apply_gate(y))
