"""The table after a run: what it gave and what the experts cost."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

if TYPE_CHECKING:
    from hetero_runtime.generation import Timings
    from hetero_runtime.stats import DraftStats, EngineStats, PhaseStats
    from hetero_runtime.tiers.reading import ReadStats
    from hetero_runtime.vision.stats import CompressionStats


def summary_table(
    stats: EngineStats,
    timings: Timings,
    *,
    lru_hit_rate: float | None = None,
    weight_errors: list[float] | None = None,
) -> Table:
    """Prefill beside decode. `lru_hit_rate`: what LRU would have hit in decode, where that is known.
    `weight_errors`: of quantised experts, by layer."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("", "prefill", "decode"):
        table.add_column(name, justify="right" if name else "left")
    phases = (stats.prefill, stats.decode)
    table.add_row("mode of decoding", "", stats.mode)
    table.add_row("tokens", *(f"{phase.tokens:,}" for phase in phases))
    table.add_row("tokens a second", *(f"{phase.tok_s:,.1f}" for phase in phases))
    table.add_row("time to first token", f"{timings.ttft_s * 1e3:,.0f} ms", "")
    table.add_row("experts required", *(f"{phase.cache.required:,}" for phase in phases))
    table.add_row("hit rate", *(_hit_rate(phase) for phase in phases))
    if lru_hit_rate is not None:
        table.add_row("hit rate of LRU, same routing", "", f"{lru_hit_rate:.1%}")
    if any(phase.cache.prefetches for phase in phases):
        table.add_row("hits: resident + prefetched", *(_split(phase) for phase in phases))
        table.add_row("prefetches", *(f"{phase.cache.prefetches:,}" for phase in phases))
        table.add_row("of all: used, late, wasted", *(_settled(phase) for phase in phases))
        table.add_row("of all: not required so far", "", f"{stats.prefetches_open:,}")
    if any(phase.prediction.layers for phase in phases):
        table.add_row("prediction, a layer", *(f"{phase.prediction.ms_a_layer:.2f} ms" for phase in phases))
    if stats.compression.prompts:
        table.add_row("image tokens kept", _kept(stats.compression), "")
        table.add_row("experts a layer of the prefix, for those kept", _fewer(stats.compression), "")
    if stats.drafts.passes:
        table.add_row("drafts: accepted of drafted", "", _accepted(stats.drafts))
        table.add_row("tokens a pass", "", f"{stats.drafts.tokens_per_pass:.2f}")
        table.add_row("time drafting", "", f"{stats.drafts.seconds * 1e3:,.0f} ms")
    if any(phase.routing.demanded for phase in phases):
        table.add_row("logical copies a token", *(_copies(phase) for phase in phases))
        table.add_row("not the router's, a token", *(_deviations(phase) for phase in phases))
    table.add_row("stalled misses, in layers", *(_stalled(phase) for phase in phases))
    in_step = "inside the step" if stats.mode == "graph" else _stall(stats.decode)  # where no host waits
    table.add_row("time stalled", _stall(stats.prefill), in_step)
    table.add_row("bytes moved", *(f"{phase.cache.bytes_moved / 1e6:,.1f} MB" for phase in phases))
    table.add_row("computed by the CPU in place", *(_in_place(phase) for phase in phases))
    table.add_row("slabs", "", f"{stats.slab_bytes / 1e6:,.1f} MB")
    if stats.disk.reads:
        table.add_row("records read, from below host memory", "", _read(stats.disk))
    else:
        table.add_row("host bank", "", f"{stats.bank_bytes / 1e6:,.1f} MB")
    if weight_errors is not None:
        table.add_row("error of the experts' weights", "", in_words(weight_errors))
    return table


def in_words(weight_errors: list[float]) -> str:
    """`0.83%, at most 0.91% (layer 3)`, counting MoE layers from 0."""
    mean, most = sum(weight_errors) / len(weight_errors), max(weight_errors)
    return f"{mean:.2%}, at most {most:.2%} (layer {weight_errors.index(most)})"


def _hit_rate(phase: PhaseStats) -> str:
    return f"{phase.cache.hit_rate:.1%}" if phase.cache.required else "-"


def _read(disk: ReadStats) -> str:
    """`1,234, 5,678.9 MB at 1.10 GB/s`, and tries anew where there were any."""
    rate = disk.num_bytes / max(disk.busy_s, 1e-9) / 1e9
    text = f"{disk.reads:,}, {disk.num_bytes / 1e6:,.1f} MB at {rate:.2f} GB/s"
    text += f", {disk.spared:,} found in host memory" if disk.spared else ""
    return f"{text}, {disk.retries:,} tried again" if disk.retries else text


def _kept(compression: CompressionStats) -> str:
    """`128 of 256 (3.1 ms)`"""
    kept, total = compression.kept_tokens, compression.visual_tokens
    return f"{kept:,} of {total:,} ({compression.compress_ms:.1f} ms)"


def _fewer(compression: CompressionStats) -> str:
    """`61.0 of 74.5`: means over the layers of the prefix, where the whole prompt is known."""
    num_layers = len(compression.experts_before)
    scale = num_layers * compression.prompts
    after = sum(compression.experts_after[:num_layers]) / scale
    return f"{after:.1f} of {sum(compression.experts_before) / scale:.1f}"


def _accepted(drafts: DraftStats) -> str:
    return f"{drafts.accepted:,} of {drafts.drafted:,}"


def _stall(phase: PhaseStats) -> str:
    share = phase.stall_s / phase.seconds if phase.seconds else 0.0
    return f"{phase.stall_s * 1e3:,.0f} ms ({share:.0%})"


def _in_place(phase: PhaseStats) -> str:
    """Share of the experts, how many, and what that took the CPU."""
    done = phase.in_place
    if not done.experts:
        return "0%"
    return f"{phase.cpu_share:.0%} ({done.experts:,}, {1e3 * done.seconds:,.0f} ms)"


def _split(phase: PhaseStats) -> str:
    cache = phase.cache
    return f"{cache.hits - cache.hits_prefetched:,} + {cache.hits_prefetched:,}"


def _settled(phase: PhaseStats) -> str:
    cache = phase.cache
    return f"{cache.hits_prefetched:,}, {cache.late:,}, {cache.prefetches_wasted:,}"


def _stalled(phase: PhaseStats) -> str:
    cache = phase.cache
    return f"{cache.misses + cache.late:,}, {cache.stalls:,}"


def _copies(phase: PhaseStats) -> str:
    means = phase.routing.per_token(phase.tokens)
    return f"{means['copies_per_token']:.2f}, on demand {means['demand_copies_per_token']:.2f}"


def _deviations(phase: PhaseStats) -> str:
    return f"{phase.routing.per_token(phase.tokens)['deviations_per_token']:.2f}"
