"""Split-K decode attention and the cache write against references: interpreted on a CPU, real on a GPU."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from hetero_gpu.attention import AttentionForm
from hetero_gpu.attention.reference import append_kv_reference, decode_attention_reference

pytest.importorskip("triton")
from hetero_gpu.attention.append import append_kv_kernel
from hetero_gpu.attention.decode import decode_attention_split, num_splits

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Case(NamedTuple):
    """One shape. `positions`: one a row."""

    positions: tuple[int, ...]
    max_length: int
    heads: int
    kv_heads: int
    key_size: int
    value_size: int
    window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False

    def __str__(self) -> str:
        heads, sizes = f"h{self.heads}/{self.kv_heads}", f"k{self.key_size}v{self.value_size}"
        parts = [f"at{','.join(map(str, self.positions))}of{self.max_length}", heads, sizes]
        parts += [f"w{self.window}"] * (self.window is not None)
        parts += ["sinks"] * self.has_sinks + ["cap"] * (self.soft_cap is not None)
        return "-".join(parts)


TINY = (
    Case((0,), 1, 1, 1, 16, 16),
    Case((0, 63), 64, 4, 2, 16, 16),
    Case((15, 16, 17), 70, 2, 1, 64, 64),
    Case((99,), 130, 8, 2, 80, 80, has_sinks=True),
    Case((40, 7), 63, 4, 4, 96, 96, window=8),
    Case((62,), 63, 3, 1, 24, 16, soft_cap=5.0),
    Case((50,), 100, 20, 1, 48, 32, has_sinks=True, window=33),
    Case((20,), 33, 4, 1, 72, 64),
    Case((70,), 75, 3, 1, 152, 144, has_sinks=True),
    Case((40,), 33, 2, 1, 16, 16),  # beyond the end: counts as the last
)
REAL = (
    Case((511,), 16384, 32, 4, 128, 128),
    Case((8191, 0, 100, 16383), 16384, 32, 4, 128, 128),
    Case((3000, 5), 4096, 64, 8, 64, 64, window=128, has_sinks=True),
    Case((1000,), 4096, 16, 16, 192, 128),
    Case((1000, 1), 4096, 16, 1, 576, 512),
    Case((700,), 1024, 16, 2, 256, 256),
    Case((700,), 1024, 10, 2, 80, 80, soft_cap=30.0),
    Case((700,), 1024, 12, 4, 96, 96),
)


def _inputs(case: Case, dtype: torch.dtype, device: str = DEVICE) -> dict[str, Any]:
    """What lies beyond a row's position is NaN: whoever reads it shows."""
    rows = len(case.positions)
    keys = torch.randn(rows, case.kv_heads, case.max_length, case.key_size)
    values = torch.randn(rows, case.kv_heads, case.max_length, case.value_size)
    for row, position in enumerate(case.positions):
        keys[row, :, position + 1 :] = values[row, :, position + 1 :] = torch.nan
    query = torch.randn(rows, case.heads, case.key_size)
    sinks = torch.randn(case.heads).to(device) if case.has_sinks else None
    query, keys, values = (tensor.to(device=device, dtype=dtype) for tensor in (query, keys, values))
    return {
        "query": query,
        "keys": keys,
        "values": values,
        "positions": torch.tensor(case.positions, device=device),
        "form": AttentionForm(case.key_size**-0.5, case.window, case.soft_cap),
        "sinks": sinks,
    }


def _poison_new_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scratch and output start as NaN: an element that is read before it is written shows."""
    new_empty = torch.Tensor.new_empty

    def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        memory = new_empty(*args, **kwargs)
        return memory.fill_(torch.nan) if memory.is_floating_point() else memory

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)


@pytest.mark.parametrize("case", TINY, ids=str)
def test_decode_equals_reference(monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    inputs = _inputs(case, torch.float32)
    expected = decode_attention_reference(**inputs)
    _poison_new_memory(monkeypatch)
    output = decode_attention_split(**inputs)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)


def test_decode_takes_strided_inputs() -> None:
    """As transformers gives them: a transposed query, and a cache whose keys and values share one buffer."""
    inputs = _inputs(Case((30, 12), 40, 4, 1, 24, 16), torch.float32)
    inputs["query"] = torch.randn(2, 1, 4, 24, device=DEVICE).transpose(1, 2)[:, :, 0]
    inputs["values"] = inputs["keys"][..., :16]
    expected = decode_attention_reference(**inputs)
    output = decode_attention_split(**inputs)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("positions", [(0, 6), (3, 3), (6, 7)], ids=str)
def test_append_equals_reference(positions: tuple[int, int]) -> None:
    new = torch.randn(2, 1, 3, 24, device=DEVICE).transpose(1, 2), torch.randn(2, 3, 1, 10, device=DEVICE)
    cache, expected = (
        (torch.zeros(2, 3, 7, 24, device=DEVICE), torch.zeros(2, 3, 7, 10, device=DEVICE)) for _ in range(2)
    )
    at = torch.tensor(positions, device=DEVICE)
    append_kv_reference(new, expected, at)
    append_kv_kernel(new, cache, at)
    assert torch.equal(cache[0], expected[0]) and torch.equal(cache[1], expected[1])


def test_splits_fill_the_processors_and_no_more() -> None:
    assert num_splits(4, 16384, 132) * 4 >= 132
    assert num_splits(4, 16, 132) == 1, "one block is one split"
    assert num_splits(1000, 16384, 132) == 1


def test_what_the_kernels_cannot_do_is_refused() -> None:
    inputs = _inputs(Case((3,), 8, 3, 1, 16, 16), torch.float32)
    wrong = {**inputs, "keys": torch.zeros(1, 2, 8, 16), "values": torch.zeros(1, 2, 8, 16)}
    with pytest.raises(ValueError, match="3 query heads"):
        decode_attention_split(**wrong)
    with pytest.raises(ValueError, match="head sizes or rows differ"):
        decode_attention_split(**{**inputs, "query": torch.zeros(1, 3, 24)})
    with pytest.raises(ValueError, match="must be contiguous"):
        decode_attention_split(**{**inputs, "query": torch.zeros(1, 16, 3).mT})
    new = torch.zeros(1, 1, 2, 16)
    with pytest.raises(ValueError, match="is no token for a cache"):
        append_kv_kernel((new, new), (inputs["keys"],) * 2, inputs["positions"])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", TINY + REAL, ids=str)
def test_device_decode_equals_reference(case: Case, dtype: torch.dtype) -> None:
    if dtype is torch.float32 and case.value_size > 256:
        pytest.skip(
            "latent attention in float32 takes more registers than there are; it runs in half precision"
        )
    inputs = _inputs(case, dtype)
    expected = decode_attention_reference(**inputs)
    output = decode_attention_split(**inputs)
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(output, expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(output, decode_attention_split(**inputs)), "the same inputs gave other bits"


@pytest.mark.gpu
def test_device_step_follows_positions_inside_a_graph() -> None:
    """Captured once at position 5; replayed while the position moves on, without host synchronisation."""
    from hetero_gpu.attention import append_kv, decode_attention

    inputs = _inputs(Case((5,), 300, 8, 2, 64, 64), torch.bfloat16)
    keys, values, positions = inputs["keys"].nan_to_num(), inputs["values"].nan_to_num(), inputs["positions"]
    new = torch.randn(1, 2, 1, 64, dtype=torch.bfloat16, device="cuda")

    def step() -> torch.Tensor:
        append_kv((new, new), (keys, values), positions)
        output = decode_attention(inputs["query"], keys, values, positions=positions, form=inputs["form"])
        positions.add_(1)
        return output

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = step()
    for position in (6, 7, 8, 200):
        positions.fill_(position)
        new.normal_()
        graph.replay()
        torch.testing.assert_close(keys[:, :, position : position + 1], new)
        at = torch.tensor([position], device="cuda")
        expected = decode_attention_reference(
            inputs["query"], keys, values, positions=at, form=inputs["form"]
        )
        torch.testing.assert_close(output, expected, rtol=2e-2, atol=2e-2)
