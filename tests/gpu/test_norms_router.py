"""RMS norm and router kernels against their references: interpreted on a CPU, real on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

pytest.importorskip("triton")
from hetero_gpu.norms import (
    NormForm,
    add_rms_norm,
    add_rms_norm_reference,
    rms_norm,
    rms_norm_reference,
)
from hetero_gpu.router import Router, route, route_reference
from hetero_gpu.weigh import WeightRule, weigh, weigh_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 64), (2, 3, 63), (5, 1), (1, 2, 2048)], ids=str)
def test_norm_of_a_sum_equals_reference(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    hidden, other = (torch.randn(shape, device=DEVICE).to(dtype) for _ in range(2))
    weight = torch.randn(shape[-1], device=DEVICE).to(dtype)
    output = add_rms_norm(hidden, other, weight, eps=1e-6, form=NormForm())
    expected = add_rms_norm_reference(hidden, other, weight, eps=1e-6, form=NormForm())
    tolerance = 2 * TOLERANCE[dtype]
    for ours, theirs in zip(output, expected, strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def test_what_cannot_be_added_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\(2, 8\).* and \(1, 8\)"):
        add_rms_norm(torch.zeros(2, 8), torch.zeros(1, 8), torch.zeros(8), eps=1e-6, form=NormForm())


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


@pytest.mark.parametrize("is_renormalised", [False, True], ids=["all", "chosen"])
@pytest.mark.parametrize(("is_sigmoid", "scale"), [(False, 1.0), (False, 1.5), (True, 2.5)], ids=str)
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k"), [(1, 128, 8), (3, 63, 6), (1, 4, 4), (2, 60, 1)], ids=lambda n: str(n)
)
def test_weights_of_a_choice_equal_reference(
    tokens: int, experts: int, top_k: int, is_sigmoid: bool, scale: float, is_renormalised: bool
) -> None:
    logits = torch.randn(tokens, experts, device=DEVICE).to(torch.bfloat16)
    chosen = torch.stack([torch.randperm(experts, device=DEVICE)[:top_k] for _ in range(tokens)])
    rule = WeightRule(is_renormalised, is_sigmoid, scale)
    expected = weigh_reference(logits, chosen, rule=rule, dtype=torch.float32)
    torch.testing.assert_close(weigh(logits, chosen, rule=rule, dtype=torch.float32), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_among_equals_the_lower_index_is_taken(dtype: torch.dtype) -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0, 2.0, 2.0], [-5.0, -0.0, -torch.inf, 0.0, -0.0, -5.5]])
    _, indices = route(
        logits.to(device=DEVICE, dtype=dtype), top_k=3, is_renormalised=True, dtype=torch.float32
    )
    assert indices.tolist() == [[1, 3, 2], [1, 3, 4]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("is_renormalised", [False, True], ids=["all", "chosen"])
def test_every_expert_in_order(is_renormalised: bool, dtype: torch.dtype) -> None:
    """Neighbouring values of the type, of both signs: none may be taken for another."""
    logits = (torch.arange(-40, 40) / 64).to(dtype)[torch.randperm(80)][None].to(DEVICE)
    arguments = {"top_k": 80, "is_renormalised": is_renormalised, "dtype": torch.float32}
    weights, indices = route(logits, **arguments)
    expected_weights, expected_indices = route_reference(logits, **arguments)
    assert torch.equal(indices, expected_indices)
    torch.testing.assert_close(weights, expected_weights)


@pytest.mark.parametrize("is_renormalised", [False, True], ids=["all", "chosen"])
def test_no_number_comes_last_and_is_no_secret(is_renormalised: bool) -> None:
    logits = torch.tensor([[torch.nan, 1.0, torch.nan, 3.0]], device=DEVICE)
    weights, indices = route(logits, top_k=3, is_renormalised=is_renormalised, dtype=torch.float32)
    assert indices.tolist() == [[3, 1, 0]]
    assert weights.isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("tokens", [1, 2, 5], ids=lambda n: f"tokens{n}")
@pytest.mark.parametrize(
    ("experts", "size", "top_k"), [(128, 2048, 8), (63, 100, 6), (4, 17, 4), (300, 30, 1)], ids=str
)
def test_router_is_a_product_and_a_choice(
    experts: int, size: int, top_k: int, tokens: int, has_bias: bool, dtype: torch.dtype
) -> None:
    hidden, weight, bias = torch.randn(tokens, size), torch.randn(experts, size), torch.randn(experts)
    hidden, weight, bias = (tensor.to(device=DEVICE, dtype=dtype) for tensor in (hidden, weight, bias))
    arguments = {"top_k": top_k, "is_renormalised": True, "dtype": torch.float32}
    router = Router(weight, bias if has_bias else None, **arguments)
    for _ in range(2):  # the second call starts from what the first left of the count
        logits, weights, indices = router(hidden)
        expected = functional.linear(hidden, weight, bias if has_bias else None)
        error = ((logits - expected).float().abs() / expected.float().abs().max()).max()
        assert logits.dtype == dtype and error <= TOLERANCE[dtype]
        expected_weights, expected_indices = route_reference(logits, **arguments)
        assert torch.equal(indices, expected_indices)
        torch.testing.assert_close(weights, expected_weights)


@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("tokens", [1, 2], ids=lambda n: f"tokens{n}")
def test_the_next_router_speaks_in_the_same_launch(tokens: int, has_bias: bool) -> None:
    arguments = {"top_k": 6, "is_renormalised": False, "dtype": torch.float32}
    router, following = (
        Router(torch.randn(63, 100, device=DEVICE), bias if has_bias else None, **arguments)
        for bias in torch.randn(2, 63, device=DEVICE)
    )
    hidden = torch.randn(tokens, 100, device=DEVICE)
    for _ in range(2):
        *own, next_logits = router.with_next(hidden, following)
        assert all(map(torch.equal, own, router(hidden)))
        torch.testing.assert_close(next_logits, following.logits(hidden))


def test_more_experts_than_there_are_is_refused() -> None:
    with pytest.raises(ValueError, match="top-5 of 4 experts"):
        route(torch.zeros(1, 4), top_k=5, is_renormalised=True, dtype=torch.float32)
