"""Where kernels may start early, and that they give the same bits when they do."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from hetero_gpu import overlap
from hetero_gpu.linear import linear_kernel
from hetero_gpu.norms import NormForm, add_rms_norm
from hetero_gpu.router import Router


def test_launches_are_ordinary_without_a_gpu() -> None:
    assert overlap.overlap_options(torch.device("cpu")) == {"OVERLAPS": False}


@pytest.mark.gpu
def test_a_chain_in_a_graph_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kernel reads what the one before wrote, many times over: a missing wait shows."""
    size, layers = 512, 20
    options = {"device": "cuda", "dtype": torch.bfloat16}
    weights = torch.randn(layers, size, size, **options) / size**0.5
    scale, start = torch.ones(size, **options), torch.randn(1, size, **options)
    router = Router(weights[0, :64].contiguous(), None, top_k=4, is_renormalised=True, dtype=torch.float32)

    def chain() -> torch.Tensor:
        hidden = start
        for weight in weights:
            product = linear_kernel(hidden, weight)
            hidden = add_rms_norm(hidden, product, scale, eps=1e-6, form=NormForm()).normed
            hidden = hidden * router(hidden)[1].sum().to(hidden.dtype)
        return hidden

    with monkeypatch.context() as patched:
        patched.setattr(overlap, "_can_overlap", lambda device: False)
        expected = chain()
    graph = torch.cuda.CUDAGraph()
    chain()
    with torch.cuda.graph(graph):
        output = chain()
    for _ in range(50):
        graph.replay()
        assert torch.equal(output, expected)
