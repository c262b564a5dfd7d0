"""`run_experts`: the same answer on both sides of the number of tokens where it changes kernels."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from bench.expert_records import Case, make_format, random_routing, random_slabs
from hetero_gpu.experts import ExpertKernels, run_experts
from hetero_gpu.experts.decode import MOST_TOKENS
from hetero_gpu.experts.reference import experts_reference
from tests.gpu.experts.cases import DEVICE, GATES, RATIO, WHERE, assert_close

pytestmark = WHERE
NUM_EXPERTS = 5


@pytest.mark.parametrize("num_tokens", [1, MOST_TOKENS, MOST_TOKENS + 1], ids=lambda n: f"T{n}")
def test_experts_anywhere_in_the_slabs(num_tokens: int) -> None:
    form = make_format(Case("fp4", "e8m0", (1, 32), has_bias=True), 64, 32, GATES["gpt_oss"])
    kernels = ExpertKernels(form, 2, max_tokens=16, dtype=torch.float32, device=DEVICE)
    hidden, slabs = torch.randn(num_tokens, 64), random_slabs(form, 9)
    experts, weights = random_routing(num_tokens, 2, NUM_EXPERTS), torch.rand(num_tokens, 2)
    slot_of_expert = torch.tensor([7, 3, -1, 0, 8], dtype=torch.int32)
    expected = experts_reference(hidden, slabs, slots=slot_of_expert[experts], weights=weights, form=form)
    out = run_experts(
        hidden.to(DEVICE),
        slabs.to(DEVICE),
        experts=experts.to(DEVICE),
        weights=weights.to(DEVICE),
        slot_of_expert=slot_of_expert.to(DEVICE),
        kernels=kernels,
    )
    assert_close("run_experts", expected, out, RATIO[torch.float32])
