"""RMS norm and router kernels against their references: interpreted on a CPU, real on a GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from hetero_gpu.norms import NormForm, rms_norm, rms_norm_reference
from hetero_gpu.router import route, route_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-6}  # interpreted, bf16 is cut where a GPU rounds


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("adds_one", [False, True], ids=["plain", "one"])
@pytest.mark.parametrize("rounds_first", [False, True], ids=["after", "first"])
@pytest.mark.parametrize("shape", [(1, 1, 64), (2, 3, 63), (5, 1), (1, 2, 4, 2048)], ids=str)
def test_norm_equals_reference(
    shape: tuple[int, ...], rounds_first: bool, adds_one: bool, dtype: torch.dtype
) -> None:
    hidden = torch.randn(shape, device=DEVICE).to(dtype)
    weight = torch.randn(shape[-1], device=DEVICE).to(dtype)
    form = NormForm(adds_one, rounds_first)
    output = rms_norm(hidden, weight, eps=1e-6, form=form)
    expected = rms_norm_reference(hidden, weight, eps=1e-6, form=form)
    assert output.dtype == dtype
    torch.testing.assert_close(output, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_norm_takes_what_is_not_contiguous() -> None:
    hidden = torch.randn(4, 8, 2, device=DEVICE).transpose(1, 2)
    weight = torch.randn(8, device=DEVICE)
    output = rms_norm(hidden, weight, eps=1e-6, form=NormForm())
    torch.testing.assert_close(output, rms_norm_reference(hidden, weight, eps=1e-6, form=NormForm()))


def test_weight_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="a weight of"):
        rms_norm(torch.zeros(2, 8), torch.zeros(7), eps=1e-6, form=NormForm())


@pytest.mark.parametrize("is_renormalised", [False, True], ids=["all", "chosen"])
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k"),
    [(1, 128, 8), (3, 63, 6), (2, 8, 2), (1, 4, 4), (2, 60, 1)],
    ids=lambda n: str(n),
)
def test_route_equals_reference(tokens: int, experts: int, top_k: int, is_renormalised: bool) -> None:
    logits = torch.randn(tokens, experts, device=DEVICE).to(torch.bfloat16)
    arguments = {"top_k": top_k, "is_renormalised": is_renormalised, "dtype": torch.float32}
    weights, indices = route(logits, **arguments)
    expected_weights, expected_indices = route_reference(logits, **arguments)
    assert torch.equal(indices, expected_indices)
    torch.testing.assert_close(weights, expected_weights)


def test_among_equals_the_lower_index_is_taken() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0, 2.0, 2.0]], device=DEVICE)
    _, indices = route(logits, top_k=3, is_renormalised=True, dtype=torch.float32)
    assert indices.tolist() == [[1, 3, 2]]


def test_more_experts_than_there_are_is_refused() -> None:
    with pytest.raises(ValueError, match="top-5 of 4 experts"):
        route(torch.zeros(1, 4), top_k=5, is_renormalised=True, dtype=torch.float32)
