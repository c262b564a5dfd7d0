"""What engines that foresee, and those beside them, come to: the rows of `predicted_decode`.

predict.full_load_share_45_fp8         decode at 45 % as a share of full load, preset seqmoe
predict.full_load_share_45_fp8_layer   the same, where a horizon was asked for by name
predict.full_load_share_45_fp8_hybrid  the same, where misses are split between link and CPU
predict.bound_share_45_fp8             what the link would allow Belady's optimum
predict.engine_minus_sim_45            hits of the engine less the simulator's, fp8; `_bf16` of that format
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from bench.decode_case import Decode, Measured
from bench.harness import Row
from bench.step_time import StepTime
from hetero_runtime.config.tree import Horizon, MissHandler

SHARE_TARGETS = {("fp8", 0.45): ">=0.80"}
OVERHEAD_KINDS = ("predictor", "tables")


class Contender(NamedTuple):
    """One engine. `horizon`: what is asked for, where it foresees; None for LRU, and at 1.0 for full load.
    `misses`: who handles them."""

    residency: float
    horizon: str | None = None
    misses: MissHandler = "load"

    @property
    def percent(self) -> str:
        return f"{100 * self.residency:.0f}"

    @property
    def ending(self) -> str:
        """What its row ids end with: nothing where the product chose the horizon, and misses are loaded."""
        horizon = "" if self.horizon in (None, "auto") else f"_{self.horizon}"
        return horizon if self.misses == "load" else f"{horizon}_{self.misses}"

    def __str__(self) -> str:
        if self == FULL:
            return "full load"
        name = "lru" if self.horizon is None else f"seqmoe, horizon {self.horizon}"
        misses = "" if self.misses == "load" else f", misses {self.misses}"
        return f"{name} at {self.percent} %{misses}"


FULL = Contender(1.0)


class Outcome(NamedTuple):
    """What was measured of one engine. `horizon`: as near as it looked; None for one that does not foresee.

    `counted`: the text that the simulator reads too, `simulated`: its hit rate there. `step`: where the time
    of a captured step goes. None where nobody asked.
    """

    measured: Measured
    horizon: Horizon | None = None
    counted: Decode | None = None
    simulated: float | None = None
    step: StepTime | None = None

    @property
    def own_us(self) -> float:
        """Of a profiled step, what the policy's kernels add to it; 0 where nobody profiled."""
        return 0.0 if self.step is None else sum(self.step.us[kind] for kind in OVERHEAD_KINDS)

    @property
    def points(self) -> float | None:
        """Hits of the engine less the simulator's, on that text."""
        if self.simulated is None or self.counted is None:
            return None
        return 100 * (self.counted.hit_rate - self.simulated)


class Bound(NamedTuple):
    """What Belady's optimum moves a token, and how long the link takes for it."""

    hit_rate: float
    seconds: float


def rows_of(
    done: Mapping[Contender, Outcome], bounds: Mapping[float, Bound], *, experts_format: str, note: str
) -> list[Row]:
    """Of all that was measured so far, without what needs what was not."""
    rows: list[Row] = []
    full = done.get(FULL)
    for residency, bound in bounds.items():
        if full is not None:
            rows.append(_bound_row(residency, bound, full.measured, experts_format))
    for contender, outcome in done.items():
        if contender.horizon is not None:
            lru = done.get(contender._replace(horizon=None))
            rows += _rows_of(contender, outcome, lru=lru, full=full, experts_format=experts_format, note=note)
    return rows


def _bound_row(residency: float, bound: Bound, full: Measured, experts_format: str) -> Row:
    return Row(
        id=f"predict.bound_share_{100 * residency:.0f}_{experts_format}",
        value=min(1.0, 1 / (full.tok_s * bound.seconds)) if bound.seconds else 1.0,
        unit="share",
        note=f"Belady's optimum: hits {100 * bound.hit_rate:.1f} %, the rest over the link alone",
    )


def _rows_of(
    contender: Contender,
    outcome: Outcome,
    *,
    lru: Outcome | None,
    full: Outcome | None,
    experts_format: str,
    note: str,
) -> Iterator[Row]:
    ours, percent = outcome.measured, contender.percent
    name = f"{percent}_{experts_format}{contender.ending}"
    looks = f"horizon {outcome.horizon}"
    if full is not None:
        beside = "" if lru is None else f"LRU {lru.measured.tok_s / full.measured.tok_s:.3f}"
        yield Row(
            id=f"predict.full_load_share_{name}",
            value=ours.tok_s / full.measured.tok_s,
            unit="share",
            target=SHARE_TARGETS.get((experts_format, contender.residency)),
            reference=beside or None,
            note=f"{looks}; {_moved(ours)}; full load {full.measured.tok_s:.1f} tok/s; {note}",
        )
    yield Row(
        id=f"predict.decode_hit_{name}",
        value=100 * ours.hit_rate,
        unit="%",
        reference=None if lru is None else f"LRU {100 * lru.measured.hit_rate:.1f}, {_moved(lru.measured)}",
        note=f"{looks}; in decode, texts {', '.join(f'{100 * each.hit_rate:.1f}' for each in ours.decodes)}",
    )
    # ids without a format are of the one that has the targets
    ending = ("" if experts_format == "fp8" else f"_{experts_format}") + contender.ending
    if outcome.points is not None:
        yield _points_row(f"predict.engine_minus_sim_{percent}{ending}", outcome, lru)
    if outcome.step is not None:
        yield _overhead_row(f"predict.overhead_share{ending}", outcome, f"{looks}, {percent} %")


def _points_row(name: str, outcome: Outcome, lru: Outcome | None) -> Row:
    counted, simulated, points = outcome.counted, outcome.simulated, outcome.points
    assert counted is not None and simulated is not None and points is not None, "it was simulated"
    beside = "" if lru is None or lru.points is None else f"LRU {lru.points:+.2f}"
    return Row(
        id=name,
        value=abs(points),
        unit="points",
        target="<=1",
        reference=beside or None,
        note=(
            f"{points:+.2f}: engine {100 * counted.hit_rate:.2f} %, simulator {100 * simulated:.2f} %, one "
            "text token by token, behind the others"
        ),
    )


def _overhead_row(name: str, outcome: Outcome, where: str) -> Row:
    """Kernels as they were profiled, of a step as it is when nobody looks."""
    step, step_us = outcome.step, 1e6 / outcome.measured.tok_s
    assert step is not None, "it was profiled"
    return Row(
        id=name,
        value=outcome.own_us / step_us,
        unit="share",
        target="<=0.06",
        note=(
            ", ".join(f"{kind} {us:.0f}" for kind, us in step.us.items())
            + f" us of a profiled step of {step.total_us:.0f}; {step_us:.0f} us when not profiled; {where}"
        ),
    )


def _moved(measured: Measured) -> str:
    return f"{measured.tok_s:.1f} tok/s, {measured.bytes_token / 1e6:.0f} MB a token"
