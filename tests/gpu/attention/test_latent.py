"""Latent attention's launches before and behind attention against the steps one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from hetero_gpu.attention import LatentNorm, PairRotation
from hetero_gpu.attention.reference import expand_latent_reference, fold_append_reference
from tests.gpu.absent_gpu import assert_compiles

pytest.importorskip("triton")
from hetero_gpu.attention.expand import expand_latent_kernel
from hetero_gpu.attention.fold import fold_append_kernel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-6}
LENGTH = 7
PAIRS = {"halves": (False, False), "pairs_to_halves": (True, False), "pairs": (True, True)}


class Sizes(NamedTuple):
    """Of one layer."""

    heads: int
    nope: int
    rope: int
    value: int
    rank: int

    def __str__(self) -> str:
        return f"h{self.heads}n{self.nope}r{self.rope}v{self.value}k{self.rank}"


TINY = (Sizes(4, 16, 8, 16, 16), Sizes(1, 24, 6, 20, 100), Sizes(3, 1, 2, 1, 1), Sizes(2, 20, 8, 33, 130))
REAL = (Sizes(16, 128, 64, 128, 512), Sizes(128, 128, 64, 128, 512))


def inputs(sizes: Sizes, dtype: torch.dtype, *, rows: int = 3, pairs: str = "pairs") -> dict[str, Any]:
    """For the fold; query and latent are parts of one product, as a layer has them."""
    heads, nope, rope, value, rank = sizes
    options: dict[str, Any] = {"device": DEVICE, "dtype": dtype}
    products = torch.randn(rows, heads * (nope + rope) + rank + rope, **options)
    expansion = torch.randn(heads, nope + value, rank, **options) / rank**0.5
    tables = torch.randn(2, rows, rope, **options)
    if pairs == "pairs":  # complex numbers, as DeepSeek-V2 has them
        tables = torch.randn(rows, rope // 2, 2, device=DEVICE).movedim(-1, 0)
    return {
        "new": tuple(products.split([heads * (nope + rope), rank + rope], dim=1)),
        "positions": torch.tensor([0, LENGTH - 1, LENGTH], device=DEVICE)[
            :rows
        ],  # the last is beyond the end
        "weight": expansion[:, :nope],
        "rotation": PairRotation(tables[0], tables[1], *PAIRS[pairs]),
        "norm": LatentNorm(torch.randn(rank, **options), 1e-6, adds_one=False, rounds_first=True),
    }


def empty_cache(sizes: Sizes, dtype: torch.dtype, rows: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Latents and rotated keys in one buffer."""
    both = torch.zeros(rows, 1, LENGTH, sizes.rank + sizes.rope, device=DEVICE, dtype=dtype)
    return both[..., : sizes.rank], both[..., sizes.rank :]


def assert_fold_equals_reference(sizes: Sizes, dtype: torch.dtype, **options: Any) -> None:
    given = inputs(sizes, dtype, **options)
    rows = len(given["positions"])
    cache, expected_cache = empty_cache(sizes, dtype, rows), empty_cache(sizes, dtype, rows)
    expected = fold_append_reference(cache=expected_cache, **given)
    folded = fold_append_kernel(cache=cache, **given)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(folded, expected, rtol=tolerance, atol=tolerance)
    for written, wanted in zip(cache, expected_cache, strict=True):
        torch.testing.assert_close(written, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("pairs", PAIRS)
@pytest.mark.parametrize("sizes", TINY, ids=str)
def test_fold_equals_reference(sizes: Sizes, pairs: str, dtype: torch.dtype) -> None:
    assert_fold_equals_reference(sizes, dtype, pairs=pairs)


@pytest.mark.parametrize(("adds_one", "rounds_first"), [(True, True), (True, False), (False, False)])
def test_other_norms(adds_one: bool, rounds_first: bool) -> None:
    sizes = TINY[0]
    given = inputs(sizes, torch.bfloat16)
    given["norm"] = given["norm"]._replace(adds_one=adds_one, rounds_first=rounds_first)
    cache, expected = empty_cache(sizes, torch.bfloat16), empty_cache(sizes, torch.bfloat16)
    fold_append_reference(cache=expected, **given)
    fold_append_kernel(cache=cache, **given)
    torch.testing.assert_close(cache[0], expected[0], rtol=2**-6, atol=2**-6)


def test_one_table_for_all_rows() -> None:
    sizes = TINY[0]
    given = inputs(sizes, torch.float32, pairs="halves")
    rotation = given["rotation"]
    given["rotation"] = rotation._replace(cos=rotation.cos[:1], sin=rotation.sin[:1])
    expected = fold_append_reference(cache=empty_cache(sizes, torch.float32), **given)
    folded = fold_append_kernel(cache=empty_cache(sizes, torch.float32), **given)
    torch.testing.assert_close(folded, expected, rtol=1e-5, atol=1e-5)


def test_tokens_of_one_row_land_there() -> None:
    """Rows of the step that are views of one row of the cache, as in a draft's check."""
    sizes, start = TINY[1], LENGTH - 3
    given = inputs(sizes, torch.float32, pairs="halves")
    given["positions"] = torch.arange(start, LENGTH, device=DEVICE)
    caches = [empty_cache(sizes, torch.float32) for _ in range(2)]
    for fold, cache in zip((fold_append_kernel, fold_append_reference), caches, strict=True):
        fold(cache=tuple(part[1].expand(3, -1, -1, -1) for part in cache), **given)
    for written, wanted in zip(*caches, strict=True):
        torch.testing.assert_close(written, wanted, rtol=1e-5, atol=1e-5)
        assert written[1, 0, start:].any(-1).all() and not written[::2].any()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("sizes", TINY, ids=str)
def test_expand_equals_reference(sizes: Sizes, dtype: torch.dtype) -> None:
    assert_expand_equals_reference(sizes, dtype)


def assert_expand_equals_reference(sizes: Sizes, dtype: torch.dtype) -> None:
    heads, nope, _, value, rank = sizes
    options: dict[str, Any] = {"device": DEVICE, "dtype": dtype}
    weight = torch.randn(heads, nope + value, rank, **options)[:, nope:] / rank**0.5
    latent = torch.randn(3, heads, rank, **options)
    expected, tolerance = expand_latent_reference(latent, weight), TOLERANCE[dtype]
    torch.testing.assert_close(expand_latent_kernel(latent, weight), expected, rtol=tolerance, atol=tolerance)


def test_what_does_not_fit_is_refused() -> None:
    sizes = TINY[0]
    given, cache = inputs(sizes, torch.float32), empty_cache(sizes, torch.float32)
    with pytest.raises(ValueError, match=r"\(3, 95\).* for a weight"):
        fold_append_kernel(cache=cache, **{**given, "new": (given["new"][0][:, :-1], given["new"][1])})
    with pytest.raises(ValueError, match="must be contiguous"):
        fold_append_kernel(cache=cache, **{**given, "weight": torch.zeros(4, 16, 16).mT})
    with pytest.raises(ValueError, match=r"latents \(3, 4, 16\)"):
        expand_latent_kernel(torch.zeros(3, 4, 16), torch.zeros(4, 16, 17))
    with pytest.raises(ValueError, match="must be contiguous"):
        expand_latent_kernel(torch.zeros(3, 4, 16), torch.zeros(4, 16, 16).mT)


STEP = """
from hetero_gpu import overlap
from hetero_gpu.attention import LatentNorm, PairRotation
from hetero_gpu.attention.expand import expand_latent_kernel
from hetero_gpu.attention.fold import fold_append_kernel

overlap._can_overlap = lambda device: {overlaps}
heads, nope, rope, value, rank = 16, 128, 64, 128, 512
half = dict(dtype=torch.bfloat16)
weight, both = torch.zeros(heads, nope + value, rank, **half), torch.zeros(2, 1, 64, rank + rope, **half)
products = torch.zeros(2, heads * (nope + rope) + rank + rope, **half).split(
    [heads * (nope + rope), rank + rope], dim=1)
norm = LatentNorm(torch.zeros(rank, **half), 1e-6, adds_one=False, rounds_first=True)
at = torch.zeros(2, dtype=torch.int64)
for tables, pairs in ((torch.zeros(2, 2, rope, **half), False), (torch.zeros(2, 2, rope // 2), True)):
    rotation = PairRotation(*tables, True, pairs)
    fold_append_kernel(products, (both[..., :rank], both[..., rank:]), at, weight=weight[:, :nope],
                       rotation=rotation, norm=norm)
expand_latent_kernel(torch.zeros(2, heads, rank, **half), weight[:, nope:])
assert all(("griddepcontrol.wait" in each.asm["ptx"]) == {overlaps} for each in compiled)
"""


@pytest.mark.parametrize(("capability", "overlaps"), [(90, True), (87, False)], ids=["h200", "orin"])
def test_the_kernels_compile(capability: int, overlaps: bool, tmp_path: Path) -> None:
    assert_compiles(STEP.format(overlaps=overlaps), capability, tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("pairs", PAIRS)
@pytest.mark.parametrize("sizes", REAL, ids=str)
def test_device_fold_equals_reference(sizes: Sizes, pairs: str, dtype: torch.dtype) -> None:
    for rows in (1, 3):
        assert_fold_equals_reference(sizes, dtype, rows=rows, pairs=pairs)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("sizes", REAL, ids=str)
def test_device_expand_equals_reference(sizes: Sizes, dtype: torch.dtype) -> None:
    assert_expand_equals_reference(sizes, dtype)
