"""Decode attention by tokens present, against SDPA over the whole padded cache.

Qwen3-30B-A3B's shape: one row, 32 heads over 4 KV heads of 128, 48 layers with a cache of 16384 each, all in
one graph. Layers have buffers of their own, so that nothing is found in the L2 cache that a model would not
find there. Run: `python -m bench.decode_attention`, half a minute.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from bench.harness import ResultFile, Row, measure
from hetero_gpu.attention import AttentionForm, append_kv, decode_attention
from hetero_gpu.attention.reference import decode_attention_reference

DEVICE = "cuda"

LAYERS, HEADS, KV_HEADS, SIZE, MAX_LENGTH = 48, 32, 4, 128, 16384
PRESENT = (512, 8192)
HBM_BYTES_PER_S = 4.3e12
"""Measured copy rate of an H200."""


class Step:
    """The attention of one decode step, all layers, in two ways."""

    def __init__(self) -> None:
        self.positions = torch.zeros(1, dtype=torch.long, device="cuda")
        self._form = AttentionForm(SIZE**-0.5)
        self._query = _random(1, HEADS, SIZE)
        self._new = _random(1, KV_HEADS, 1, SIZE)
        self._caches = [
            (_random(1, KV_HEADS, MAX_LENGTH, SIZE), _random(1, KV_HEADS, MAX_LENGTH, SIZE))
            for _ in range(LAYERS)
        ]

    def ours(self) -> torch.Tensor:
        for cache in self._caches:
            append_kv((self._new, self._new), cache, self.positions)
            output = decode_attention(self._query, *cache, positions=self.positions, form=self._form)
        return output

    def padded_sdpa(self) -> torch.Tensor:
        mask = (torch.arange(MAX_LENGTH, device="cuda") <= self.positions)[None, None, None]
        for cache in self._caches:
            for cached in cache:
                cached.index_copy_(2, self.positions, self._new)
            output = functional.scaled_dot_product_attention(
                self._query[:, :, None], *cache, attn_mask=mask, scale=self._form.scaling, enable_gqa=True
            )
        return output[:, :, 0]

    def expected(self) -> torch.Tensor:
        return decode_attention_reference(
            self._query, *self._caches[-1], positions=self.positions, form=self._form
        )


def main() -> None:
    torch.manual_seed(0)
    step = Step()
    ways = {"decode": _capture(step.ours), "sdpa": _capture(step.padded_sdpa)}
    us: dict[tuple[str, int], float] = {}
    for present in PRESENT:
        step.positions.fill_(present - 1)
        for name, (replay, output) in ways.items():
            replay()
            torch.testing.assert_close(output, step.expected(), rtol=2e-2, atol=2e-2)
            us[name, present] = _us_per_layer(replay)
    ResultFile.write("decode_attention", [row for present in PRESENT for row in _rows(us, present)])


def _rows(us: dict[tuple[str, int], float], present: int) -> list[Row]:
    roof_us = 2 * KV_HEADS * present * SIZE * 2 / HBM_BYTES_PER_S * 1e6
    ours, sdpa = us["decode", present], us["sdpa", present]
    grown_ms = (ours - us["decode", PRESENT[0]]) * LAYERS / 1000
    return [
        Row(
            id=f"attention.decode{present}_us",
            value=ours,
            unit="us/layer",
            reference=f"{roof_us:.2f} (bytes of {present} tokens at 4.3 TB/s)",
            note=f"cache write, split-K, reduction; {grown_ms:.2f} ms/token over {PRESENT[0]} tokens",
        ),
        Row(
            id=f"attention.sdpa{present}_us",
            value=sdpa,
            unit="us/layer",
            note=f"cache write and SDPA over all {MAX_LENGTH} places",
        ),
        Row(id=f"attention.decode{present}_vs_sdpa", value=sdpa / ours, unit="ratio", target=">=1"),
    ]


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda")


def _capture(function: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
    """A replay of `function`, and the tensor that it fills."""
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = function()
    return graph.replay, output


def _us_per_layer(replay: Callable[[], None]) -> float:
    timing = measure(replay, num_runs=50, num_warmups=5, synchronize=torch.cuda.synchronize)
    return timing.median * 1e6 / LAYERS


if __name__ == "__main__":
    main()
