"""The rows of `bench.vl_decode`: VisMMOE's Table 4, cell by cell, and what follows from it."""

from __future__ import annotations

from collections.abc import Mapping

from bench.harness import Row
from bench.vl_accelerate import Peer
from bench.vl_steps import CAPTURED_BASE, STEPS, WHOLE, Measured, Step

PUBLISHED = {"offload": (100.0, 87.7, 58.6, 37.2), "hybrid": (100.0, 95.3, 60.1, 56.8)}
"""Latency over the base's, in percent, by step; the bases are Accelerate and KTransformers on an A100."""
TARGETS = {"offload": ">=2.7", "hybrid": ">=1.8"}

Done = Mapping[Step, Measured]


def step_rows(step: Step, done: Done, *, tokens: int) -> list[Row]:
    """Both cells of a step that is done."""
    measured, base = done[step], done.get(Step(step.mode, STEPS[0]))
    told, name = [], f"vl.{CAPTURED_BASE}_{step.mode}"
    if step.name in STEPS:
        name = f"vl.table4_{step.mode}_{step.name}"
        told.append(f"VisMMOE, Table 4: {PUBLISHED[step.mode][STEPS.index(step.name)]} % of its base")
    if base is not None:
        share = measured.latency_ms(tokens) / base.latency_ms(tokens)
        told.append(f"here {share:.1%}, prompt and {tokens} tokens")
    return [
        Row(
            id=f"{name}_prefill_ms",
            value=measured.prefill_ms,
            unit="ms",
            reference="; ".join(told) or None,
            note=measured.about,
        ),
        Row(id=f"{name}_decode_ms", value=measured.decode_ms, unit="ms", note="a token"),
    ]


def speedup_rows(done: Done, peer: Peer | None, *, tokens: int, about: str) -> list[Row]:
    """The whole preset, prompt and `tokens` tokens, over each base of its mode: the eager one, which is the
    table's, and the captured one."""
    rows = []
    for mode, target in TARGETS.items():
        whole = done.get(Step(mode, WHOLE))
        if whole is None:
            continue
        for base_name, name, aim in (
            (STEPS[0], "speedup", target),
            (CAPTURED_BASE, "captured_speedup", None),
        ):
            base = done.get(Step(mode, base_name))
            if base is not None:
                rows.append(
                    Row(
                        id=f"vl.{name}_{mode}",
                        value=base.latency_ms(tokens) / whole.latency_ms(tokens),
                        unit="ratio",
                        target=aim,
                        reference=_compared(base_name, base, whole, peer, tokens=tokens),
                        note=about,
                    )
                )
    return rows


def _compared(base_name: str, base: Measured, whole: Measured, peer: Peer | None, *, tokens: int) -> str:
    kinds = {
        STEPS[0]: "base: eager passes, on demand, all image tokens",
        CAPTURED_BASE: "base: captured as the whole is, on demand, all image tokens",
    }
    latency = base.latency_ms(tokens), whole.latency_ms(tokens)
    said = f"{kinds[base_name]}: {latency[0]:.0f} ms; whole, in the captured step: {latency[1]:.0f} ms"
    return said if peer is None else f"{said}; over Accelerate {peer.latency_ms(tokens) / latency[1]:.2f}"


def cost_rows(done: Done, *, about: str) -> list[Row]:
    """What compression and prediction take of a prompt in the whole preset."""
    rows = []
    whole = next((measured for step, measured in done.items() if step.name == WHOLE), None)
    if whole is not None:
        rows.append(
            Row(
                id="vl.compress_ms",
                value=whole.compress_ms,
                unit="ms",
                target="<=15",
                reference="14.7 on average (VisMMOE, Fig. 13)",
                note=f"a prompt; {about}",
            )
        )
        rows.append(
            Row(
                id="vl.predict_ms_layer",
                value=whole.prefill.prediction.ms_a_layer,
                unit="ms",
                target="<=1",
                reference="2.72 on average (VisMMOE, Fig. 13)",
                note="a layer of a prompt, on the host's clock; those of tokens are device work",
            )
        )
    return rows


def accelerate_rows(peer: Peer, done: Done, *, tokens: int) -> list[Row]:
    """Accelerate, and how far the whole preset is from it."""
    note = f"{peer.resident} of {peer.layers} layers whole on the device, the others copied for every pass"
    rows = [
        Row(id="vl.accelerate_prefill_ms", value=peer.prefill_ms, unit="ms", note=note),
        Row(id="vl.accelerate_decode_ms", value=peer.decode_ms, unit="ms", note="a token"),
    ]
    for mode in TARGETS:
        whole = done.get(Step(mode, WHOLE))
        if whole is not None:
            rows.append(
                Row(
                    id=f"vl.accelerate_speedup_{mode}",
                    value=peer.latency_ms(tokens) / whole.latency_ms(tokens),
                    unit="ratio",
                    reference="2.68 in decode speed (VisMMOE over Accelerate, Fig. 8)",
                    note=f"whole preset, prompt and {tokens} tokens",
                )
            )
    return rows
