"""Tokens of one row side by side: rows of a step that are views of one row of the cache."""

from __future__ import annotations

import pytest
import torch

from hetero_gpu.attention import AttentionForm, HeadNorms, Rotation
from hetero_gpu.attention.reference import (
    append_kv_reference,
    decode_attention_reference,
    rotate_append_reference,
)

pytest.importorskip("triton")
from hetero_gpu.attention.append import append_kv_kernel
from hetero_gpu.attention.decode import decode_attention_split
from hetero_gpu.attention.rotate import rotate_append_kernel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTH, NUM_TOKENS, MAX_LENGTH, KV_HEADS, SIZE = 21, 4, 24, 2, 16
POSITIONS = torch.arange(LENGTH, LENGTH + NUM_TOKENS, device=DEVICE)  # the last one is beyond the end
Cache = tuple[torch.Tensor, torch.Tensor]


def one_row(buffer: torch.Tensor) -> torch.Tensor:
    """Row 1 of `buffer` as every row of the step."""
    return buffer[1].expand(NUM_TOKENS, -1, -1, -1)


def caches() -> tuple[Cache, Cache]:
    """Two alike, of three rows."""
    shape = (3, KV_HEADS, MAX_LENGTH, SIZE)
    keys, values = torch.randn(shape, device=DEVICE), torch.randn(shape, device=DEVICE)
    return (keys, values), (keys.clone(), values.clone())


@pytest.mark.parametrize("window", [None, 8])
def test_each_token_sees_those_before_it_and_no_more(window: int | None) -> None:
    ours, plain = caches()
    new = (
        torch.randn(NUM_TOKENS, KV_HEADS, 1, SIZE, device=DEVICE),
        torch.randn(NUM_TOKENS, KV_HEADS, 1, SIZE, device=DEVICE),
    )
    query = torch.randn(NUM_TOKENS, 4, SIZE, device=DEVICE)
    form = AttentionForm(scaling=0.25, window=window, soft_cap=None)
    append_kv_kernel(new, (one_row(ours[0]), one_row(ours[1])), POSITIONS)
    together = decode_attention_split(
        query, one_row(ours[0]), one_row(ours[1]), positions=POSITIONS, form=form
    )
    for i in range(NUM_TOKENS - 1):  # one after another, in a row of their own
        position = POSITIONS[i : i + 1]
        row = (plain[0][1:2], plain[1][1:2])
        append_kv_reference((new[0][i : i + 1], new[1][i : i + 1]), row, position)
        alone = decode_attention_reference(query[i : i + 1], *row, positions=position, form=form)
        torch.testing.assert_close(together[i : i + 1], alone, rtol=1e-4, atol=1e-5)
    for written, expected in zip(ours, plain, strict=True):
        assert torch.equal(written, expected)  # other rows, and what lies beyond the end, as they were


def test_rotated_tokens_land_in_the_one_row() -> None:
    ours, plain = caches()
    projected = torch.randn(NUM_TOKENS, (4 + 2 * KV_HEADS) * SIZE, device=DEVICE)
    tables = torch.randn(2, NUM_TOKENS, SIZE, device=DEVICE)
    rotation = Rotation(tables[0], tables[1], SIZE)
    weights = torch.randn(2, SIZE, device=DEVICE)
    norms = HeadNorms(weights[0], weights[1], 1e-6, adds_one=False, rounds_first=False)
    query = rotate_append_kernel(
        projected, (one_row(ours[0]), one_row(ours[1])), POSITIONS, rotation=rotation, norms=norms
    )
    expected = rotate_append_reference(
        projected, (one_row(plain[0]), one_row(plain[1])), POSITIONS, rotation=rotation, norms=norms
    )
    torch.testing.assert_close(query, expected, rtol=1e-5, atol=1e-5)
    for written, wanted in zip(ours, plain, strict=True):
        torch.testing.assert_close(written, wanted, rtol=1e-5, atol=1e-5)
