"""The device's kernels on records that were quantised while they were loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from hetero_gpu.experts.decode import DecodeExperts
from hetero_gpu.experts.layout import ExpertFormat
from hetero_gpu.experts.reference import experts_reference
from hetero_runtime.checkpoint import Checkpoint
from hetero_runtime.experts.kernel_format import expert_format
from hetero_runtime.experts.store import ExpertStore, load_store
from hetero_runtime.hf.loading import build_skeleton
from tests.architectures import build_checkpoint
from tests.gpu.experts.cases import DEVICE, WHERE
from tests.runtime.experts.loading import split

CASES = [("Qwen3Moe", "int8"), ("GptOss", "int4"), ("Qwen3Moe", "fp8")]
TOP_K = 3

pytestmark = WHERE


def quantised(name: str, experts: str, folder: Path) -> tuple[ExpertStore, ExpertFormat]:
    build_checkpoint(name, folder, dtype=torch.bfloat16)
    skeleton = build_skeleton(Checkpoint.open(folder), dtype="bfloat16", device=torch.device("cpu"))
    store = load_store(split(folder).experts, threads=2, experts=experts)  # type: ignore[arg-type]
    return store, expert_format(store.layout, store.forms, next(iter(skeleton.experts.values())))


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize(("name", "experts"), CASES)
def test_the_fused_kernels_of_the_device(name: str, experts: str, tmp_path: Path) -> None:
    store, form = quantised(name, experts, tmp_path)
    slabs = store.records.view(-1, form.record_bytes)[:6]
    hidden, weights = torch.randn(2, form.hidden), torch.rand(2, TOP_K)
    slots = torch.tensor([[0, 5, 2], [3, 1, 4]], dtype=torch.int32)
    kernel = DecodeExperts(form, TOP_K, dtype=torch.float32, device=DEVICE)
    out = torch.full_like(hidden, float("nan")).to(DEVICE)
    kernel(hidden.to(DEVICE), slabs.to(DEVICE), slots=slots.to(DEVICE), weights=weights.to(DEVICE), out=out)
    expected = experts_reference(hidden, slabs, slots=slots, weights=weights, form=form)
    assert relative_error(out.cpu(), expected) < 2e-6
    store.close()
