"""What a model asks of memory before a single slab: row by row, phase by phase.

load      weights arrive: host bank filled, backbone copied to the device
prefill   one prompt of max_length tokens runs: the largest activations
decode    max_rows rows run one token each: small activations, full caches
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hetero_gpu.packed.layout import RING_BUFFERS
from hetero_runtime.config.forecasts import TRAINED
from hetero_runtime.config.tree import (
    Backing,
    Config,
    CpuBackend,
    Device,
    Dtype,
    MissHandler,
    Mode,
    ResolvedConfig,
    slabs_are_bank,
)
from hetero_runtime.experts.encodings import WORKERS_A_THREAD
from hetero_runtime.experts.reads import EXTENT_BYTES
from hetero_runtime.plan.geometry import ITEMSIZE, Geometry
from hetero_runtime.plan.in_place import in_place_bytes
from hetero_scheduler.eviction.belady_forecast import NUM_STEPS

Tier = Literal["device", "host", "disk"]
TIERS: tuple[Tier, ...] = ("device", "host", "disk")
Phase = Literal["load", "prefill", "decode"]
PHASES: tuple[Phase, ...] = ("load", "prefill", "decode")

STAGING_RECORDS = 4
"""Records of the pinned staging ring, used where the driver refuses to register the bank."""
GROUPED_TOKENS = 4096
"""In graph mode the experts' workspace has room for that many tokens of a prompt at once; longer prompts run
each layer in chunks."""
RETURNING_RECORDS = 8
"""Records on their way back from a device to host memory above a disk: a layer's experts of one token."""
_SORT_BYTES = 40
"""What the sort of a prompt's (token, k) pairs by expert takes for each."""
_STREAMS = 6
"""Copies of the hidden states alive at once in one layer: residual, normed, attention in and out, MoE in
and out."""
_F32, _HALF = 4, 2
PREDICTOR_TOKENS = 512
"""Tokens at the end of a prompt that a predictor reads: more than it was trained to look back."""
_CHECK_COPIES = 4
"""Arrays of a draft's logits alive at once while it is checked: the model's, in float32, the drafter's
probabilities, and those before they are one array."""
_PREDICTOR_COPIES = 4
"""Arrays of a prompt's logits alive at once while the predictor reads them."""


@dataclass(frozen=True)
class Row:
    """One line of the plan: bytes of one thing on one tier, in each phase."""

    name: str
    tier: Tier
    load: int
    prefill: int
    decode: int
    note: str = ""

    @classmethod
    def constant(cls, name: str, tier: Tier, num_bytes: int, note: str = "") -> Row:
        """The same in every phase."""
        return cls(name, tier, num_bytes, num_bytes, num_bytes, note)

    def at(self, phase: Phase) -> int:
        """Bytes in `phase`."""
        return {"load": self.load, "prefill": self.prefill, "decode": self.decode}[phase]

    @property
    def peak(self) -> int:
        """Bytes in the phase that takes most."""
        return max(self.load, self.prefill, self.decode)


@dataclass(frozen=True)
class Demand:
    """The settings that fix everything but the slabs."""

    device: Device
    dtype: Dtype
    max_rows: int
    max_length: int
    pinned_prefix: int
    """First MoE layers whose experts all stay on the device."""
    mode: Mode = "eager"
    """graph: the KV cache is ours, of a fixed size."""
    is_packed: bool = False
    """The host bank is packed once it is loaded; only where the geometry has `packed_record_bytes`."""
    threads: int = 1
    """Of loading and of computation on the CPU."""
    is_prefetched_in_graph: bool = False
    """The captured step prefetches, and packed experts come in a second way."""
    num_drafted: int = 0
    """Most tokens of a draft: one pass of a row checks them all, and the token before them."""
    backing: Backing = "ram"
    """Where routed experts live."""
    host_slabs: int = 0
    """Experts that host memory holds, where they live below it."""
    misses: MissHandler = "load"
    backend: CpuBackend = "native"
    workers: int = 1
    """Threads that compute experts, where misses are not all loaded."""

    @property
    def slabs_are_bank(self) -> bool:
        """See `config.tree.slabs_are_bank`."""
        return slabs_are_bank(self.device, self.backing)

    @property
    def needs_slabs(self) -> bool:
        """Whether a layer's experts must come to the device to be computed."""
        return self.misses != "cpu"

    @classmethod
    def of(cls, config: ResolvedConfig) -> Demand:
        """The demand of a resolved configuration."""
        return cls(
            device=config.device,
            dtype=config.model.dtype,
            max_rows=config.execution.max_rows,
            max_length=config.execution.max_length,
            pinned_prefix=config.memory.pinned_prefix,
            mode=config.execution.mode,
            is_packed=config.memory.packed,
            threads=config.cpu.threads,
            is_prefetched_in_graph=prefetches_in_graph(config),
            num_drafted=drafted_tokens(config),
            backing=config.memory.backing,
            host_slabs=config.memory.host_slabs,
            misses=config.misses.handler,
            backend=config.cpu.backend,
            workers=config.cpu.workers,
        )


def prefetches_in_graph(config: Config | ResolvedConfig) -> bool:
    """Whether a captured step would prefetch."""
    if config.prediction.predictor in TRAINED:
        return config.execution.mode == "graph"
    return config.prediction.predictor == "pregate" or config.prefetch.schedule == "bounded"


def drafted_tokens(config: Config | ResolvedConfig) -> int:
    """Most tokens of a draft; 0 where nothing drafts."""
    return 0 if config.speculation.drafter == "none" else config.speculation.k


def fixed_rows(geometry: Geometry, demand: Demand) -> list[Row]:
    """Every row of the plan but the slabs'. On device cpu and unified both tiers are host memory."""
    itemsize = ITEMSIZE[demand.dtype]
    device = [
        Row.constant("backbone", "device", geometry.backbone.num_bytes(itemsize), demand.dtype),
        Row.constant("shared experts", "device", geometry.shared.num_bytes(itemsize), demand.dtype),
        Row.constant("vision", "device", geometry.vision.num_bytes(itemsize), demand.dtype),
        _kv_row(geometry, demand),
        _workspace_row(geometry, demand),
        _prefix_row(geometry, demand.pinned_prefix),
        _unpacking_row(geometry, demand),
        _drafter_row(geometry, demand),
        _lookahead_row(geometry, demand),
        *([_calibration_row(geometry, "device")] if demand.mode == "graph" else []),
        *([_captured_predictor_row(geometry, demand)] if demand.mode == "graph" else []),
    ]
    host = [
        _bank_row(geometry, demand),
        _quantizing_row(geometry, demand),
        _host_slab_row(geometry, demand),
        _staging_row(geometry, demand),
        _predictor_row(geometry),
        _calibration_row(geometry, "host"),
        _in_place_row(geometry, demand),
    ]
    return [row for row in (*device, *host) if row.peak > 0]


def _kv_row(geometry: Geometry, demand: Demand) -> Row:
    row_bytes = geometry.kv.row_bytes(
        demand.max_length, ITEMSIZE[demand.dtype], is_fixed=demand.mode == "graph"
    )
    total = demand.max_rows * row_bytes
    note = f"{demand.max_rows} rows of {demand.max_length} tokens"
    return Row("KV cache", "device", 0, total, total, note)


def _workspace_row(geometry: Geometry, demand: Demand) -> Row:
    prefill = _workspace_bytes(geometry, demand, tokens=demand.max_length, rows=1)
    widest = max(demand.max_rows, demand.num_drafted + 1)
    decode = _workspace_bytes(geometry, demand, tokens=widest, rows=demand.max_rows)
    decode += _CHECK_COPIES * demand.num_drafted * geometry.vocab_size * _F32
    if demand.mode == "graph":
        grouped = _grouped_bytes(geometry, demand)
        prefill, decode = prefill + grouped, decode + grouped
    return Row("workspace", "device", 0, prefill, decode, f"prefill of {demand.max_length} tokens")


def _grouped_bytes(geometry: Geometry, demand: Demand) -> int:
    """What grouped prefill keeps for each (token, k): the activation, the product, its place in the sort."""
    pairs = min(demand.max_length, GROUPED_TOKENS) * geometry.top_k
    widths = geometry.moe_intermediate_size + geometry.hidden_size
    return pairs * (widths * ITEMSIZE[demand.dtype] + _SORT_BYTES)


def _workspace_bytes(geometry: Geometry, demand: Demand, *, tokens: int, rows: int) -> int:
    """Activations of one layer for `tokens` tokens of `rows` rows, logits, one expert dequantised."""
    itemsize = ITEMSIZE[demand.dtype]
    attention = geometry.attention
    width = max(geometry.moe_intermediate_size, geometry.dense_intermediate_size)
    hidden = tokens * geometry.hidden_size * (_STREAMS * itemsize + _F32)
    inner = tokens * max(attention.token_elements, 3 * width) * itemsize
    scores = 0
    if attention.is_eager:
        pairs = tokens * demand.max_length
        scores = attention.num_heads * pairs * (itemsize + _F32)
    logits = 2 * demand.max_rows * geometry.vocab_size * _F32
    expert = 3 * geometry.hidden_size * geometry.moe_intermediate_size * itemsize
    # A cache that grows by concatenation holds one layer twice for a moment.
    growth = rows * geometry.kv.largest_layer_bytes(demand.max_length, itemsize)
    return hidden + inner + scores + logits + expert + growth


def _prefix_row(geometry: Geometry, pinned_prefix: int) -> Row:
    num_bytes = pinned_prefix * geometry.num_experts * geometry.record_bytes
    return Row.constant("pinned prefix", "device", num_bytes, f"all experts of {pinned_prefix} layers")


def stored_record_bytes(geometry: Geometry, *, is_packed: bool) -> int:
    """Bytes of one expert in the host bank, once that is loaded."""
    if not is_packed:
        return geometry.record_bytes
    assert geometry.packed_record_bytes is not None, "resolve packs only what can be packed"
    return geometry.packed_record_bytes


def _unpacking_row(geometry: Geometry, demand: Demand) -> Row:
    """Where packed records arrive to be decoded."""
    record = stored_record_bytes(geometry, is_packed=demand.is_packed)
    count = RING_BUFFERS * (2 if demand.is_prefetched_in_graph else 1)
    num_bytes = count * record if demand.is_packed else 0
    return Row.constant("unpacking", "device", num_bytes, f"{count} packed experts on their way")


def _drafter_row(geometry: Geometry, demand: Demand) -> Row:
    """All of its weights, and a cache for each row."""
    if geometry.drafter is None:
        return Row.constant("drafter", "device", 0)
    itemsize = ITEMSIZE[demand.dtype]
    weights = geometry.drafter.weights.num_bytes(itemsize)
    total = geometry.drafter.num_bytes(itemsize, rows=demand.max_rows, length=demand.max_length)
    return Row("drafter", "device", weights, total, total, f"with the cache of {demand.max_rows} rows")


def _lookahead_row(geometry: Geometry, demand: Demand) -> Row:
    """A GPU computes with weights of two bytes, a CPU with float32."""
    num_bytes = 0 if geometry.lookahead is None else geometry.lookahead.num_bytes
    each = 2 if demand.device == "cpu" else 1
    return Row.constant("lookahead predictor", "device", each * num_bytes, "speaks at every MoE layer")


def _bank_row(geometry: Geometry, demand: Demand) -> Row:
    """A packed bank is loaded plain, then packed in place. Experts below host memory take none of it, nor do
    those that are counted as slabs."""
    if demand.backing != "ram":
        name = "swapped experts" if demand.backing == "swap" else "expert file"
        note = f"{geometry.num_routed_experts} experts, {geometry.expert_dtype}"
        return Row.constant(name, "disk", geometry.bank_bytes, note)
    if demand.slabs_are_bank:
        return Row.constant("host bank", "host", 0)
    kept = geometry.num_routed_experts * stored_record_bytes(geometry, is_packed=demand.is_packed)
    note = f"{geometry.num_routed_experts} experts, {geometry.expert_dtype}"
    note += ", packed once they are loaded" if demand.is_packed else ""
    return Row("host bank", "host", geometry.bank_bytes, kept, kept, note)


def _quantizing_row(geometry: Geometry, demand: Demand) -> Row:
    """Plain records in the making of others: as read, as arranged, and an extent on its way."""
    each = 2 * geometry.source_record_bytes + EXTENT_BYTES
    workers = WORKERS_A_THREAD * demand.threads
    is_made_here = geometry.source_record_bytes and demand.backing in ("ram", "swap")
    num_bytes = workers * each if is_made_here else 0
    return Row("quantising", "host", num_bytes, 0, 0, f"{workers} experts in the making")


def _host_slab_row(geometry: Geometry, demand: Demand) -> Row:
    num_bytes = demand.host_slabs * geometry.record_bytes
    note = f"{demand.host_slabs} of {geometry.num_routed_experts} experts"
    return Row.constant("host slabs", "host", num_bytes, note)


def returning_records(backing: Backing, host_slabs: int) -> int:
    """How many records may be on their way back from a device at once; 0: none returns. They hold no more
    than a quarter of the host slabs."""
    return min(RETURNING_RECORDS, host_slabs // 4) if backing == "direct" else 0


def _staging_row(geometry: Geometry, demand: Demand) -> Row:
    """While loading, one tensor of the rest is on its way; a GPU may need the ring all the time."""
    count = STAGING_RECORDS + returning_records(demand.backing, demand.host_slabs)
    ring = count * geometry.record_bytes if demand.device == "cuda" else 0
    groups = (geometry.backbone, geometry.shared, geometry.vision)
    largest = max(group.largest_bytes for group in groups)
    return Row("staging", "host", ring + largest, ring, ring, "largest tensor on its way")


def _calibration_row(geometry: Geometry, tier: Tier) -> Row:
    """Token priors, most of it; the logical caches of rows are small beside them. On the device for captured
    steps, on the host always."""
    return Row.constant("calibration", tier, geometry.calibration_bytes)


def _predictor_row(geometry: Geometry) -> Row:
    """Weights, for prompts and once more for single steps; while a prompt is read its routing: logits as they
    came, and what the predictor makes of them. The states of rows are small beside that."""
    if not geometry.predictor_bytes:
        return Row.constant("predictor", "host", 0)
    logits = PREDICTOR_TOKENS * geometry.num_moe_layers * geometry.num_experts
    weights = 2 * geometry.predictor_bytes
    read = weights + logits * (_HALF + _PREDICTOR_COPIES * _F32)
    return Row("predictor", "host", weights, read, weights, f"reads the last {PREDICTOR_TOKENS} of a prompt")


def _captured_predictor_row(geometry: Geometry, demand: Demand) -> Row:
    """What a captured step forecasts with: weights, the forecasts and router logits of all rows; a prompt's
    logits until the host reads them."""
    if not geometry.predictor_bytes:
        return Row.constant("captured predictor", "device", 0)
    layer_experts = geometry.num_moe_layers * geometry.num_experts
    kept = geometry.predictor_bytes + demand.max_rows * (NUM_STEPS + 1) * layer_experts * _F32
    read = kept + PREDICTOR_TOKENS * layer_experts * _HALF
    return Row("captured predictor", "device", kept, read, kept, f"forecasts {NUM_STEPS} steps in the graph")


def _in_place_row(geometry: Geometry, demand: Demand) -> Row:
    """Experts on the CPU. Rows decode one after another, a token or a draft a pass."""
    if demand.misses == "load":
        return Row.constant("experts on the CPU", "host", 0)
    prefill, decode = (
        in_place_bytes(
            geometry,
            backend=demand.backend,
            workers=demand.workers,
            tokens=tokens,
            itemsize=ITEMSIZE[demand.dtype],
        )
        for tokens in (demand.max_length, 1 + demand.num_drafted)
    )
    plural = "worker" if demand.workers == 1 else "workers"
    note = f"{demand.workers} {plural} ({demand.backend}), one core left for the engine"
    return Row("experts on the CPU", "host", 0, prefill, decode, note)
