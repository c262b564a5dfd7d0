"""Decode kernels against the reference: every format, gate and number of tokens, on odd shapes."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from bench.expert_records import Case, make_format, random_routing, random_slabs
from hetero_gpu.experts.decode import MOST_TOKENS, DecodeExperts
from hetero_gpu.experts.layout import ExpertFormat
from hetero_gpu.experts.reference import experts_reference
from tests.gpu.experts.cases import COMBINATIONS, DEVICE, DTYPES, GATES, RATIO, SHAPES, WHERE, assert_close

pytestmark = WHERE
NUM_SLABS = 6


def decode(
    form: ExpertFormat, hidden: torch.Tensor, slabs: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Run the kernels, with every buffer poisoned."""
    kernel = DecodeExperts(form, slots.shape[1], dtype=hidden.dtype, device=DEVICE)
    kernel._activated.fill_(float("nan"))
    out = torch.full_like(hidden, float("nan")).to(DEVICE)
    inputs = [tensor.to(DEVICE) for tensor in (hidden, slabs, slots.int(), weights)]
    kernel(inputs[0], inputs[1], slots=inputs[2], weights=inputs[3], out=out)
    return out


@pytest.mark.parametrize(("hidden_size", "intermediate"), SHAPES, ids=lambda n: str(n))
@pytest.mark.parametrize(("case", "gate"), COMBINATIONS, ids=str)
def test_format_and_gate(case: Case, gate: str, hidden_size: int, intermediate: int) -> None:
    form = make_format(case, hidden_size, intermediate, GATES[gate])
    hidden, slabs = torch.randn(2, hidden_size), random_slabs(form, NUM_SLABS)
    slots, weights = random_routing(2, 3, NUM_SLABS), torch.rand(2, 3)
    expected = experts_reference(hidden, slabs, slots=slots, weights=weights, form=form)
    assert_close("decode", expected, decode(form, hidden, slabs, slots, weights), RATIO[torch.float32])


@pytest.mark.parametrize(
    ("num_tokens", "top_k"), [(1, 1), (1, 10), (3, 6), (MOST_TOKENS, 2)], ids=lambda n: str(n)
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tokens_and_dtypes(dtype: torch.dtype, num_tokens: int, top_k: int) -> None:
    form = make_format(Case("bfloat16"), 50, 22, GATES["silu"])
    hidden, slabs = torch.randn(num_tokens, 50).to(dtype), random_slabs(form, 12)
    slots, weights = random_routing(num_tokens, top_k, 12), torch.rand(num_tokens, top_k).to(dtype)
    expected = experts_reference(hidden, slabs, slots=slots, weights=weights, form=form)
    assert_close("decode", expected, decode(form, hidden, slabs, slots, weights), RATIO[dtype])


def test_a_negative_slot_adds_nothing() -> None:
    form = make_format(Case("bfloat16", has_bias=True), 50, 22, GATES["silu"])
    hidden, slabs, weights = torch.randn(3, 50), random_slabs(form, 4), torch.rand(3, 2)
    slots = torch.tensor([[-1, 2], [0, -1], [-1, -1]])
    out = decode(form, hidden, slabs, slots, weights)
    expected = experts_reference(hidden, slabs, slots=slots, weights=weights, form=form)
    assert_close("decode", expected, out, RATIO[torch.float32])
    assert (out[2] == 0).all()


def test_a_token_depends_neither_on_the_others_nor_on_its_slabs() -> None:
    form = make_format(Case("fp8", "float32", (16, 16)), 96, 36, GATES["silu"])
    hidden, slabs, weights = torch.randn(4, 96), random_slabs(form, 6), torch.rand(4, 3)
    slots = random_routing(4, 3, 6)
    together = decode(form, hidden, slabs, slots, weights)
    moved = torch.randperm(6)
    alone = decode(form, hidden[2:3], slabs[moved], moved.argsort()[slots[2:3]], weights[2:3])
    assert torch.equal(together[2:3], alone)


def test_slabs_beyond_two_gigabytes_are_reached() -> None:
    if DEVICE.type == "cpu":
        pytest.skip("takes 4 GiB, which a GPU has to spare")
    form = make_format(Case("bfloat16"), 2048, 768, GATES["silu"])
    num_slabs = (4 << 30) // form.record_bytes
    slabs = torch.empty((num_slabs, form.record_bytes), dtype=torch.uint8, device=DEVICE)
    last = random_slabs(form, 1)
    slabs[-1:] = last.to(DEVICE)
    hidden, weights = torch.randn(1, 2048), torch.ones(1, 1)
    out = decode(form, hidden, slabs, torch.tensor([[num_slabs - 1]]), weights)
    expected = experts_reference(hidden, last, slots=torch.tensor([[0]]), weights=weights, form=form)
    assert_close("decode", expected, out, RATIO[torch.float32])
