"""Prefill attention against the decode reference, one query at a time."""

from __future__ import annotations

import pytest
import torch

from hetero_gpu.attention import AttentionForm, prefill, prefill_attention
from hetero_gpu.attention.reference import decode_attention_reference


@pytest.mark.parametrize("num_queries", [1, 5, 17], ids=lambda n: f"queries{n}")
@pytest.mark.parametrize("num_before", [0, 4], ids=lambda n: f"before{n}")
@pytest.mark.parametrize("window", [None, 3, 100], ids=lambda w: f"window{w}")
@pytest.mark.parametrize("soft_cap", [None, 4.0], ids=lambda c: f"cap{c}")
@pytest.mark.parametrize("has_sinks", [False, True], ids=["plain", "sinks"])
def test_prefill_is_decode_of_every_token(
    monkeypatch: pytest.MonkeyPatch,
    num_queries: int,
    num_before: int,
    window: int | None,
    soft_cap: float | None,
    has_sinks: bool,
) -> None:
    monkeypatch.setattr(prefill, "_QUERIES", 8)
    num_keys = num_before + num_queries
    query, keys, values = (
        torch.randn(1, 4, num_queries, 24),
        torch.randn(1, 2, num_keys, 24),
        torch.randn(1, 2, num_keys, 16),
    )
    sinks = torch.randn(4) if has_sinks else None
    form = AttentionForm(0.2, window, soft_cap)
    output = prefill_attention(query, keys, values, form=form, sinks=sinks)
    for i in range(num_queries):
        at = torch.tensor([num_before + i])
        expected = decode_attention_reference(
            query[:, :, i], keys, values, positions=at, form=form, sinks=sinks
        )
        torch.testing.assert_close(output[:, :, i], expected, rtol=1e-5, atol=1e-5)
