"""The kernels that an engine computes with, on records that were quantised while they were loaded."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from hetero_cpu_kernels import experts as cpu
from hetero_cpu_kernels.pool import WorkerPool
from hetero_gpu.experts.decode import DecodeExperts
from hetero_gpu.experts.layout import ExpertFormat, Matrix
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


@pytest.mark.parametrize(("name", "experts"), CASES)
def test_the_kernels_of_the_cpu(name: str, experts: str, tmp_path: Path) -> None:
    store, form = quantised(name, experts, tmp_path)
    pool = WorkerPool(sorted(os.sched_getaffinity(0))[:1], spins=100)
    try:
        kernels = cpu.CpuExperts(cpu_form(form), pool)
        hidden, weights = torch.randn(2, form.hidden), torch.rand(4)
        routing = cpu.Routing(
            offsets=np.array([0, 3]) * form.record_bytes,
            bounds=np.array([0, 2, 4]),
            tokens=np.array([0, 1, 0, 1]),
            weights=weights.numpy(),
        )
        out = np.full((2, form.hidden), np.nan, dtype=np.float32)
        kernels.run(hidden.numpy(), store.records.numpy(), routing=routing, out=out)
    finally:
        pool.close()
    expected = experts_reference(
        hidden,
        store.records.view(-1, form.record_bytes),
        slots=torch.tensor([[0, 3], [0, 3]]),
        weights=weights.view(2, 2).T,
        form=form,
    )
    assert relative_error(torch.from_numpy(out), expected) < 2e-6
    store.close()


def cpu_form(form: ExpertFormat) -> cpu.ExpertForm:
    return cpu.ExpertForm(
        form.record_bytes, _matrix(form.up), _matrix(form.down), cpu.Gate(**asdict(form.gate))
    )


def _matrix(matrix: Matrix) -> cpu.Matrix:
    assert matrix.scales is not None
    return cpu.Matrix(
        matrix.offset,
        matrix.encoding,
        matrix.rows,
        matrix.cols,
        scales=cpu.Scales(**asdict(matrix.scales)),
        bias=None if matrix.bias is None else cpu.Bias(**asdict(matrix.bias)),
    )
