"""The link between host memory and the device: what one missed expert costs."""

from __future__ import annotations

from pathlib import Path

from hetero_gpu.link import LinkFacts, measure_link
from hetero_runtime.doctor.base import BANK_GB, EXPERT, EXPERT_BYTES, Finding, Status, expert_ms

_NARROW_GB_S = 6.0  # below PCIe 3 × 8: a miss costs more than most layers compute


def check(folder: Path) -> list[Finding]:
    """Measure the link of the first device."""
    return judge(measure_link(record_bytes=EXPERT_BYTES))


def judge(facts: LinkFacts) -> list[Finding]:
    """Turn measured rates into findings; what was refused is a finding too."""
    findings = [
        *_pinned(facts.pinned),
        *_pageable(facts),
        *_zero_copy(facts),
        *_device_copy(facts.device_copy),
        *_registration(facts.registration),
    ]
    if not findings:
        reason = "; ".join(facts.refusals)
        return [Finding("link", None, "", "absent", f"{reason}: experts are computed where they lie")]
    # A device is there and refused one of the ways: the runtime works, with less.
    return findings + [Finding("link refusal", None, "", "warn", reason) for reason in facts.refusals]


def _pinned(gb_s: float | None) -> list[Finding]:
    if gb_s is None:
        return []
    meaning = f"{EXPERT} takes {expert_ms(gb_s):.2f} ms over this link"
    if gb_s < _NARROW_GB_S:
        meaning += "; a narrow link (check the slot and its lanes): give the slabs as much memory as you can"
    return [_rate("link, pinned", gb_s, "warn" if gb_s < _NARROW_GB_S else "ok", meaning)]


def _pageable(facts: LinkFacts) -> list[Finding]:
    if facts.pageable is None:
        return []
    meaning = f"{EXPERT} takes {expert_ms(facts.pageable):.2f} ms from memory that CUDA does not register"
    if facts.pinned is None:
        return [_rate("link, pageable", facts.pageable, "warn", f"{meaning}; registering was refused")]
    meaning += f", {facts.pinned / facts.pageable:.1f} times as long: why the bank is registered"
    return [_rate("link, pageable", facts.pageable, "ok", meaning)]


def _zero_copy(facts: LinkFacts) -> list[Finding]:
    if facts.zero_copy is None:
        return []
    meaning = (
        f"a kernel fetches {EXPERT} by itself in {expert_ms(facts.zero_copy):.2f} ms, with 8 thread blocks"
    )
    return [_rate("link, zero-copy", facts.zero_copy, "ok", meaning)]


def _device_copy(gb_s: float | None) -> list[Finding]:
    if gb_s is None:
        return []
    meaning = f"reading {EXPERT} that is resident takes {expert_ms(gb_s) * 1e3:.1f} µs: the roof of decode"
    return [_rate("device memory", gb_s, "ok", meaning)]


def _registration(gb_s: float | None) -> list[Finding]:
    if gb_s is None:
        return []
    meaning = f"registering a bank of {BANK_GB} GB with CUDA adds {BANK_GB / gb_s:.1f} s to loading"
    return [_rate("registration", gb_s, "ok", meaning)]


def _rate(name: str, gb_s: float, status: Status, meaning: str) -> Finding:
    return Finding(name, round(gb_s, 1), "GB/s", status, meaning)
