"""Grouped kernels against the reference: formats, gates, waves in any order, experts nobody asked for."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from bench.expert_records import Case, make_format, random_routing, random_slabs
from hetero_gpu.experts.layout import ExpertFormat
from hetero_gpu.experts.prefill import GroupedExperts
from hetero_gpu.experts.reference import experts_reference
from tests.gpu.experts.cases import (
    COMBINATIONS,
    DEVICE,
    DOT_DTYPES,
    FORMATS,
    GATES,
    IS_INTERPRETED,
    RATIO,
    SHAPES,
    WHERE,
    assert_close,
)

pytestmark = WHERE
NUM_EXPERTS = 7
TOKENS = [1, 19] if IS_INTERPRETED else [1, 19, 500, 2000]


class Layer:
    """Random tokens and experts, and the kernels with every buffer poisoned."""

    def __init__(self, form: ExpertFormat, num_tokens: int, *, top_k: int = 3, dtype: torch.dtype) -> None:
        self.form, self.hidden = form, torch.randn(num_tokens, form.hidden).to(dtype)
        self.experts = random_routing(num_tokens, top_k, NUM_EXPERTS)
        self.weights, self.records = torch.rand(num_tokens, top_k).to(dtype), random_slabs(form, NUM_EXPERTS)
        self.kernel = GroupedExperts(form, top_k, max_tokens=num_tokens, dtype=dtype, device=DEVICE)

    def expected(self, left_out: frozenset[int] = frozenset()) -> torch.Tensor:
        slot_of = torch.tensor([-1 if e in left_out else e for e in range(NUM_EXPERTS)])
        tensors = [tensor.to(DEVICE) for tensor in (self.hidden, self.records, slot_of[self.experts])]
        weights = self.weights.to(DEVICE)
        return experts_reference(tensors[0], tensors[1], slots=tensors[2], weights=weights, form=self.form)

    def run(self, waves: list[list[int]], left_out: frozenset[int] = frozenset()) -> torch.Tensor:
        """Each wave's experts lie alone in slabs of that wave, in reverse; `left_out` have none."""
        for buffer in (self.kernel._activated, self.kernel._products):
            buffer.fill_(float("nan"))
        out = torch.full_like(self.hidden, float("nan")).to(DEVICE)
        routing = self.experts.to(DEVICE), self.weights.to(DEVICE)
        self.kernel.begin(self.hidden.to(DEVICE), *routing, num_experts=NUM_EXPERTS)
        for wave in waves:
            slabs = self.records[wave[::-1]].to(DEVICE)
            slots = [-1 if e in left_out else len(wave) - 1 - i for i, e in enumerate(wave)]
            index = [torch.tensor(ids, dtype=torch.int32, device=DEVICE) for ids in (wave, slots)]
            self.kernel.add(slabs, *index)
        self.kernel.finish(out)
        return out


ALL = [list(range(NUM_EXPERTS))]


@pytest.mark.parametrize(("hidden_size", "intermediate"), SHAPES, ids=lambda n: str(n))
@pytest.mark.parametrize(("case", "gate"), COMBINATIONS, ids=str)
def test_format_and_gate(case: Case, gate: str, hidden_size: int, intermediate: int) -> None:
    layer = Layer(make_format(case, hidden_size, intermediate, GATES[gate]), 19, dtype=torch.float32)
    assert_close("prefill", layer.expected(), layer.run(ALL), RATIO[torch.float32])


@pytest.mark.parametrize("num_tokens", TOKENS, ids=lambda n: f"T{n}")
@pytest.mark.parametrize("dtype", DOT_DTYPES, ids=str)
@pytest.mark.parametrize("case", [FORMATS[2], FORMATS[4], FORMATS[11]], ids=str)
def test_tokens_and_dtypes(case: Case, dtype: torch.dtype, num_tokens: int) -> None:
    layer = Layer(make_format(case, 50, 22, GATES["silu"]), num_tokens, dtype=dtype)
    assert_close("prefill", layer.expected(), layer.run(ALL), RATIO[dtype])


@pytest.mark.parametrize("waves", [[[0, 1], [2, 3, 4], [5, 6]], [[6], [3, 0, 5, 1], [2, 4]]], ids=str)
def test_waves_change_no_bit(waves: list[list[int]]) -> None:
    layer = Layer(make_format(Case("bfloat16"), 50, 22, GATES["silu"]), 19, dtype=torch.float16)
    assert torch.equal(layer.run(waves), layer.run(ALL))


def test_experts_computed_elsewhere_add_nothing() -> None:
    form = make_format(Case("bfloat16", has_bias=True), 50, 22, GATES["silu"])
    layer, left_out = Layer(form, 19, dtype=torch.float32), frozenset({0, 4})
    out = layer.run([[4, 1, 2], [0, 3, 5, 6]], left_out)
    assert_close("prefill", layer.expected(left_out), out, RATIO[torch.float32])


def test_an_expert_without_tokens_is_no_trouble() -> None:
    layer = Layer(make_format(Case("float32"), 50, 22, GATES["silu"]), 2, top_k=1, dtype=torch.float32)
    assert_close("prefill", layer.expected(), layer.run([[6, 5, 4], [3, 2, 1, 0]]), RATIO[torch.float32])


def test_warming_up_needs_no_experts_in_slabs() -> None:
    layer = Layer(make_format(Case("float32"), 50, 22, GATES["silu"]), 5, dtype=torch.float32)
    layer.kernel.warm_up(layer.records[:1].to(DEVICE), num_experts=NUM_EXPERTS)
    assert_close("prefill", layer.expected(), layer.run(ALL), RATIO[torch.float32])
