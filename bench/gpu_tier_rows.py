"""What is told of tiers on a machine with a GPU, and of unified memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from bench.harness import Row
from bench.tier_case import TierCase
from hetero_runtime.tiers.supply import NUM_READERS

DEVICE_SHARE = 0.25
"""Of all experts, in slabs of the GPU."""
HOST_SHARES = {"50": 0.5, "25": 0.25}
"""Of all experts, in host memory where the rest is on the disk."""
UNIFIED_SHARE = 0.5
"""Of all experts, in the one memory where the rest is on the disk."""
LIMIT_S = 150
"""Of one engine; then it hangs."""


class Packed(NamedTuple):
    """A model with its expert file. `routing`: what chooses its experts; None: its routers."""

    folder: Path
    num_experts: int
    """Of all layers."""
    disk_gb_s: float
    """Direct reads of its expert file, nothing done with the bytes."""
    routing: Path | None
    note: str

    @property
    def disk(self) -> str:
        """What its rates are read against."""
        return f"measured disk: {self.disk_gb_s:.2f} GB/s, direct reads, {NUM_READERS} threads"

    def run(
        self, memory: dict[str, Any], *, tokens: int, device: str = "cuda", preset: str = "lru"
    ) -> TierCase:
        """An engine in a process of its own."""
        config = {
            "preset": preset,
            "device": device,
            "memory": memory,
            "execution": {"mode": "eager", "max_rows": 1, "max_length": 512},  # as below host memory
        }
        case = TierCase.run(self.folder, config, tokens=tokens, routing=self.routing, limit_s=LIMIT_S)
        print(
            f"  {case.tok_s:.3g} tok/s, {case.slabs} slabs, hits {100 * case.hit_rate:.1f} %, of the rest "
            f"{100 * case.host_hit_rate:.1f} % in host memory, {case.disk_bytes / 1e9:.2f} GB read"
        )
        return case


def ram_rows(ram: TierCase, model: Packed) -> list[Row]:
    """Of all experts in host memory: what the disk is to be compared with."""
    note = f"{100 * DEVICE_SHARE:.0f} % of the experts in slabs, LRU; {model.note}"
    return [
        Row(id="tiers.gpu_ram_tok_s", value=ram.tok_s, unit="tok/s", note=note),
        Row(id="tiers.gpu_ram_slab_hit", value=100 * ram.hit_rate, unit="%", note=note),
        *_plan_rows("tiers.gpu_ram", ram),
    ]


def direct_rows(name: str, case: TierCase, ram: TierCase | None, model: Packed) -> list[Row]:
    """Of `name` per cent of the experts in host memory."""
    note = f"LRU, {100 * DEVICE_SHARE:.0f} % in slabs, {name} % in host memory, all on the disk; {model.note}"
    beside = None if ram is None else f"all experts in host memory: {ram.tok_s:.3g} tok/s"
    prefix = f"tiers.gpu_{name}"
    rows = [
        Row(id=f"{prefix}_tok_s", value=case.tok_s, unit="tok/s", reference=beside, note=note),
        Row(id=f"{prefix}_slab_hit", value=100 * case.hit_rate, unit="%", note=note),
        Row(
            id=f"{prefix}_host_hit",
            value=100 * case.host_hit_rate,
            unit="%",
            note="of what was not in slabs; what leaves slabs returns there",
        ),
        Row(
            id=f"{prefix}_disk_gb_s",
            value=case.disk_gb_s,
            unit="GB/s",
            reference=model.disk,
            note=f"while reads were under way in decode; {case.disk_bytes / 1e9:.2f} GB",
        ),
        Row(
            id=f"{prefix}_disk_share",
            value=case.prompt_read_gb_s / model.disk_gb_s,
            unit="ratio",
            target=">=0.8",
            reference=model.disk,
            note=f"{case.prompt_read_gb_s:.2f} GB/s of records while a long prompt loads its experts",
        ),
        *_plan_rows(prefix, case),
    ]
    return rows if ram is None else [*rows, _same(f"{prefix}_same_tokens", case, ram)]


def prefetch_rows(lru: TierCase, seqmoe: TierCase, model: Packed) -> list[Row]:
    """Of seqmoe beside LRU."""
    said = [
        f"{case.tok_s:.3g} tok/s, hits {100 * case.hit_rate:.1f} %, {case.disk_bytes / 1e9:.2f} GB read"
        for case in (lru, seqmoe)
    ]
    return [
        Row(
            id="tiers.gpu_seqmoe_vs_lru",
            value=seqmoe.tok_s / lru.tok_s,
            unit="ratio",
            target=">=1",
            reference=f"LRU {said[0]}; {model.disk}",
            note=f"{said[1]}; {100 * DEVICE_SHARE:.0f} % in slabs, 50 % in host memory; {model.note}",
        ),
        _same("tiers.gpu_seqmoe_same_tokens", seqmoe, lru),
    ]


def unified_rows(name: str, case: TierCase, discrete: TierCase | None, model: Packed) -> list[Row]:
    """Of mapped memory; `held`: the bytes of experts that are to be in it, once."""
    held = case.planned.experts if name == "ram" else int(UNIFIED_SHARE * case.planned.experts)
    where = "all experts" if name == "ram" else f"{100 * UNIFIED_SHARE:.0f} %, the rest on the disk"
    beside = None
    if discrete is not None:
        beside = (
            f"discrete, {100 * DEVICE_SHARE:.0f} % in slabs, all in host memory: {discrete.tok_s:.3g} tok/s"
        )
    prefix = f"unified.{name}"
    gpu = f"the GPU's own memory held {case.peak.device / 1e9:.2f} GB at the peak, the rest of the model"
    rows = [
        Row(
            id=f"{prefix}_tok_s",
            value=case.tok_s,
            unit="tok/s",
            reference=beside,
            note=f"mapped memory on a GPU with its own: every read crosses the link; {where}; {model.note}",
        ),
        Row(
            id=f"{prefix}_rss_over_experts",
            value=case.peak.rss / held,
            unit="ratio",
            target="<=1.1",
            reference=f"{held / 1e9:.2f} GB of experts in mapped memory",
            note=f"0 where the driver's pages are not counted as the process's; {gpu}",
        ),
        Row(
            id=f"{prefix}_memory_over_experts",
            value=case.peak.machine / held,
            unit="ratio",
            target="<=1.1",
            reference=f"{held / 1e9:.2f} GB of experts in mapped memory",
            note="what the whole machine had less at the peak, whoever took it",
        ),
    ]
    return rows if discrete is None else [*rows, _same(f"{prefix}_same_tokens", case, discrete)]


def _plan_rows(prefix: str, case: TierCase) -> list[Row]:
    """Peaks over what the plan said."""
    peaks = {"rss": (case.peak.rss, case.planned.host), "vram": (case.peak.device, case.planned.device)}
    return [
        Row(
            id=f"{prefix}_{name}_over_plan",
            value=peak / planned,
            unit="ratio",
            target="<=1.1",
            reference=f"planned: {planned / 1e9:.2f} GB",
            note=f"{peak / 1e9:.2f} GB at the peak, libraries not counted",
        )
        for name, (peak, planned) in peaks.items()
    ]


def _same(row_id: str, case: TierCase, expected: TierCase) -> Row:
    note = f"{len(expected.text)} sampled tokens"
    return Row(id=row_id, value=int(case.text == expected.text), unit="bool", target="==1", note=note)
