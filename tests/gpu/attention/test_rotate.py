"""Head norms, rotary embedding and cache write in one launch, against the steps one by one."""

from __future__ import annotations

import pytest
import torch

from hetero_gpu.attention import HeadNorms, Rotation
from hetero_gpu.attention.reference import rotate_append_reference

pytest.importorskip("triton")
from hetero_gpu.attention.rotate import rotate_append_kernel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("has_norms", [False, True], ids=["plain", "norms"])
@pytest.mark.parametrize("table", ["full", "half"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "rotated"),
    [(4, 2, 16, 16), (1, 1, 24, 8), (3, 3, 80, 80), (8, 1, 128, 64)],
    ids=lambda n: str(n),
)
def test_kernel_equals_reference(
    heads: int, kv_heads: int, size: int, rotated: int, table: str, has_norms: bool
) -> None:
    rows = 3
    projected = torch.randn(rows, (heads + 2 * kv_heads) * size, device=DEVICE)
    width = rotated if table == "full" else rotated // 2
    rotation = Rotation(
        torch.randn(rows, width, device=DEVICE), torch.randn(rows, width, device=DEVICE), rotated
    )
    weights = torch.randn(2, size, device=DEVICE)
    norms = HeadNorms(weights[0], weights[1], 1e-6, adds_one=True, rounds_first=True) if has_norms else None
    positions = torch.tensor([0, 6, 7], device=DEVICE)  # the last is beyond the end: not written
    cache, expected_cache = (
        (
            torch.zeros(rows, kv_heads, 7, size, device=DEVICE),
            torch.zeros(rows, kv_heads, 7, size, device=DEVICE),
        )
        for _ in range(2)
    )
    expected = rotate_append_reference(projected, expected_cache, positions, rotation=rotation, norms=norms)
    query = rotate_append_kernel(projected, cache, positions, rotation=rotation, norms=norms)
    torch.testing.assert_close(query, expected, rtol=1e-5, atol=1e-5)
    for written, expected_written in zip(cache, expected_cache, strict=True):
        torch.testing.assert_close(written, expected_written, rtol=1e-5, atol=1e-5)


def test_projections_of_another_width_are_refused() -> None:
    cache = torch.zeros(1, 2, 4, 16), torch.zeros(1, 2, 4, 16)
    rotation = Rotation(torch.zeros(1, 16), torch.zeros(1, 16), 16)
    with pytest.raises(ValueError, match=r"projections \(1, 70\)"):
        rotate_append_kernel(
            torch.zeros(1, 70), cache, torch.zeros(1, dtype=torch.long), rotation=rotation, norms=None
        )
