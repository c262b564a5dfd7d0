"""Expert kernels of one Qwen3-30B-A3B layer, against the bandwidth of a copy on the same device.

Decode reads each expert once, so what it can reach is what a copy reaches. The weights take more than a
gigabyte and every layer of the graph has experts of its own, so that no cache holds them. A kernel is
compared with its reference before it is timed.

    python -m bench.expert_kernels                  all formats
    python -m bench.expert_kernels --tune int4      times other tiles for one format, and writes nothing
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from bench.expert_records import Case, make_format, random_routing, random_slabs, relative_error, used_bytes
from bench.harness import ResultFile, Row, measure
from hetero_gpu.experts.decode import DecodeExperts
from hetero_gpu.experts.layout import ExpertFormat, Gate
from hetero_gpu.experts.prefill import GroupedExperts
from hetero_gpu.experts.reference import experts_reference

DEVICE = "cuda"

HIDDEN, INTERMEDIATE, TOP_K, EXPERTS = 2048, 768, 8, 128
LAYERS = 16
DECODE_TOKENS = (1, 2, 4, 8)
PREFILL_TOKENS = (128, 1024)
MOST_ERROR = 1e-2
FORMATS = {
    "bf16": Case("bfloat16"),
    "fp8": Case("fp8", "float32", (128, 128)),
    "int8": Case("int8", "float32", (1, None)),
    "int4": Case("int4", "float16", (1, 128)),
    "mxfp4": Case("fp4", "e8m0", (1, 32)),
}


@dataclass(frozen=True)
class Experts:
    """More than a gigabyte of experts in one format, and the kernel for them."""

    name: str
    form: ExpertFormat
    slabs: torch.Tensor
    decode: DecodeExperts

    @classmethod
    def of(cls, name: str) -> Experts:
        form = make_format(FORMATS[name], HIDDEN, INTERMEDIATE, Gate())
        some = random_slabs(form, 8).to(DEVICE)
        num_slabs = max(EXPERTS, -(-(5 << 28) // form.record_bytes))
        slabs = some.repeat(-(-num_slabs // 8), 1)
        decode = DecodeExperts(form, TOP_K, dtype=torch.bfloat16, device=slabs.device)
        return cls(name, form, slabs, decode)


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the expert kernels.")
    parser.add_argument("--tune", choices=FORMATS, metavar="FORMAT", help="time other decode tiles")
    tuned = parser.parse_args().tune
    torch.manual_seed(0)
    if tuned is not None:
        tune(Experts.of(tuned))
        return
    copy = copy_gb_s()
    rows = [Row(id="kernels.device_copy_gb_s", value=copy, unit="GB/s", note="1 GiB, read and written")]
    for name in FORMATS:
        experts = Experts.of(name)
        check(experts)
        rows += decode_rows(experts, copy)
        rows += prefill_rows(experts)
        del experts
        torch.cuda.empty_cache()
    ResultFile.write("expert_kernels", rows)


def copy_gb_s() -> float:
    """Bytes read and written by a copy on the device, in GB/s."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.numel() / seconds(lambda: target.copy_(source)) / 1e9


def seconds(function: Callable[[], object]) -> float:
    """The median of several runs."""
    return measure(function, num_runs=20, num_warmups=3, synchronize=torch.cuda.synchronize).median


def check(experts: Experts) -> None:
    """Raise AssertionError when decode or prefill is not what the reference computes."""
    hidden, weights = _tokens(12)
    slots = random_routing(12, TOP_K, EXPERTS).to(DEVICE)
    expected = experts_reference(hidden, experts.slabs, slots=slots, weights=weights, form=experts.form)
    out = torch.full_like(hidden, float("nan"))
    half = slice(0, 6)
    experts.decode(hidden[half], experts.slabs, slots=slots[half].int(), weights=weights[half], out=out[half])
    error = relative_error(expected[half], out[half])
    assert error <= MOST_ERROR, f"decode of {experts.name}: relative error {error:.1e}"
    _prefill(experts, hidden, slots, weights)(out)
    error = relative_error(expected, out)
    assert error <= MOST_ERROR, f"prefill of {experts.name}: relative error {error:.1e}"


def decode_rows(experts: Experts, copy: float) -> Iterator[Row]:
    """GB/s of the experts' bytes that a step must read, and the time of one layer, by tokens."""
    for num_tokens in DECODE_TOKENS:
        layer_s, num_bytes = time_decode(experts, num_tokens)
        tokens = "" if num_tokens == 1 else f"_t{num_tokens}"
        yield Row(
            id=f"kernels.decode_{experts.name}{tokens}_gb_s",
            value=num_bytes / layer_s / 1e9,
            unit="GB/s",
            reference=f"device copy in this run: {copy:.0f} GB/s",
            note=f"{num_tokens} tokens, {1e6 * layer_s:.1f} us a layer, {num_bytes / 1e6:.1f} MB",
        )


def time_decode(experts: Experts, num_tokens: int) -> tuple[float, float]:
    """Seconds and bytes of one layer: the mean over the layers of a CUDA graph, each with other experts."""
    hidden, weights = _tokens(num_tokens)
    out = torch.empty_like(hidden)
    layers = [random_routing(num_tokens, TOP_K, len(experts.slabs)) for _ in range(LAYERS)]
    slots = [layer.int().to(DEVICE) for layer in layers]

    def step() -> None:
        for layer in slots:
            experts.decode(hidden, experts.slabs, slots=layer, weights=weights, out=out)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    num_bytes = used_bytes(experts.form) * sum(layer.unique().numel() for layer in layers)
    return seconds(graph.replay) / LAYERS, num_bytes / LAYERS


def prefill_rows(experts: Experts) -> Iterator[Row]:
    """Milliseconds of one layer, all experts in slabs, one wave."""
    for num_tokens in PREFILL_TOKENS:
        hidden, weights = _tokens(num_tokens)
        chosen = random_routing(num_tokens, TOP_K, EXPERTS).to(DEVICE)
        run, out = _prefill(experts, hidden, chosen, weights), torch.empty_like(hidden)
        layer_s = seconds(lambda run=run, out=out: run(out))  # type: ignore[misc]
        tera = 6 * num_tokens * TOP_K * HIDDEN * INTERMEDIATE / 1e12
        note = f"{tera / layer_s:.0f} TFLOP/s, {EXPERTS * used_bytes(experts.form) / layer_s / 1e9:.0f} GB/s"
        yield Row(
            id=f"kernels.prefill{num_tokens}_{experts.name}_ms", value=1e3 * layer_s, unit="ms", note=note
        )


def _prefill(
    experts: Experts, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
) -> Callable[[torch.Tensor], None]:
    """What sorts, computes and adds up one layer."""
    grouped = GroupedExperts(
        experts.form, TOP_K, max_tokens=len(hidden), dtype=hidden.dtype, device=hidden.device
    )
    every = torch.arange(EXPERTS, dtype=torch.int32, device=hidden.device)

    def run(out: torch.Tensor) -> None:
        grouped.begin(hidden, chosen, weights, num_experts=EXPERTS)
        grouped.add(experts.slabs, every, every)
        grouped.finish(out)

    return run


def _tokens(num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states `[T, H]` and weights `[T, K]`."""
    hidden = torch.randn(num_tokens, HIDDEN, device=DEVICE, dtype=torch.bfloat16)
    return hidden, torch.rand(num_tokens, TOP_K, device=DEVICE)


def tune(experts: Experts) -> None:
    """Print microseconds of one layer at one token for other tiles, first of up, then of down."""
    for part, rows, warps in (("up_tile", (2, 4, 8, 16), (1, 2, 4)), ("down_tile", (2, 4, 8, 16), (4, 8))):
        chosen = getattr(experts.decode, part)
        times = []
        cols = (chosen.cols // 2, chosen.cols, 2 * chosen.cols)
        for tile in itertools.product(rows, cols, warps, (1, 2, 3)):
            names = ("rows", "cols", "num_warps", "num_stages")
            changed = dataclasses.replace(chosen, **dict(zip(names, tile, strict=True)))
            setattr(experts.decode, part, changed)
            times.append((1e6 * time_decode(experts, 1)[0], changed))
        times.sort(key=lambda entry: entry[0])
        setattr(experts.decode, part, times[0][1])
        print(f"{experts.name} {part}, chosen by hand: {chosen}")
        for microseconds, tile_of in times[:6]:
            print(f"  {microseconds:6.1f} us  {tile_of}")


if __name__ == "__main__":
    main()
