"""How much of each row's forecast is still to come, and the scores that follow: probabilistic Belady.

    run      a layer begins: of its forecasts, entry 0 lies behind the rows that step, and what they chose
             is recent use; inside `ensure`
    renew    layers were forecast anew: their windows begin with entry 0
    rescore  entry 0 of layers was made anew: nothing moves on

    window [rows, L]        0        1        2            entries behind; -1: no forecast yet
    forecast              │ p_0    │ p_1    │ p_2    …     the runs of one layer, as they were foreseen

Step for step what `hetero_scheduler.eviction`'s BeladyForecast does for one row and BeladyRows for several,
to the last bit (SeqMoE §7.1): an expert's score is the greatest among the rows. Device work alone, but for
what the host tells of a row between steps.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from hetero_gpu.tables.state import DeviceTables
from hetero_scheduler.eviction.belady_forecast import (
    DECAY,
    NUM_STEPS,
    RECENT_RATE,
    RECENT_WEIGHT,
)

RUN, _RENEW, _RESCORE = (tl.constexpr(change) for change in range(3))
_NUM_STEPS, _DECAY = tl.constexpr(NUM_STEPS), tl.constexpr(DECAY)
_RECENT_RATE, _RECENT_WEIGHT = tl.constexpr(RECENT_RATE), tl.constexpr(RECENT_WEIGHT)


class WindowTables(NamedTuple):
    """What kernels see of `Windows`."""

    probabilities: torch.Tensor
    window: torch.Tensor
    recent: torch.Tensor


class Windows:
    """See the module docstring.

    `probabilities`: float32 `[rows, horizon, layers, experts]`, contiguous, on the device of `tables`. Entry
    0 of a forecast is the next run of each layer that it covers.
    """

    def __init__(self, tables: DeviceTables, probabilities: torch.Tensor) -> None:
        """No row has a forecast. Raises ValueError for probabilities of another model or type."""
        sizes = (tables.num_layers, tables.num_experts)
        if probabilities.dim() != 4 or probabilities.shape[2:] != sizes:
            raise ValueError(
                f"probabilities {tuple(probabilities.shape)} for {sizes[0]} layers of {sizes[1]} experts"
            )
        if probabilities.dtype != torch.float32 or not probabilities.is_contiguous():
            raise ValueError(f"probabilities must be contiguous float32, not {probabilities.dtype}")
        self.probabilities, self._tables = probabilities, tables
        self.window = torch.full(
            (probabilities.shape[0], tables.num_layers), -1, dtype=torch.int32, device=tables.device
        )

        self.recent = torch.zeros((probabilities.shape[0], *sizes), dtype=torch.float64, device=tables.device)
        """Share of each layer's recent uses, by row."""
        self._nobody = torch.zeros((1, 1), dtype=torch.int64, device=tables.device)

    @property
    def for_kernels(self) -> WindowTables:
        """What kernels read and write, at addresses that never change."""
        return WindowTables(self.probabilities, self.window, self.recent)

    def renew(self, layers: range, active: torch.Tensor) -> None:
        """`probabilities` of `layers` are new for the rows in `active` (bool `[stepping rows]`)."""
        self._launch(layers, active, self._nobody, change=_RENEW)

    def rescore(self, layers: range, active: torch.Tensor) -> None:
        """`probabilities` of `layers` are others than before, and of the same runs."""
        self._launch(layers, active, self._nobody, change=_RESCORE)

    def forget(self, row: int) -> None:
        """The text of `row` has ended: nothing of it is wanted any more. Scores follow with the next run."""
        self.window[row] = -1

    def remember(self, row: int, recent: npt.NDArray[np.float64]) -> None:
        """By the host: `row` has a text whose recent uses were `recent`, shares `[layers, experts]`."""
        self.recent[row] = torch.from_numpy(recent)

    def _launch(
        self, layers: range, active: torch.Tensor, chosen: torch.Tensor, *, change: tl.constexpr
    ) -> None:
        num_layers, num_experts = self.probabilities.shape[2:]
        _score_kernel[(len(layers),)](
            self.for_kernels,
            active,
            chosen,
            self._tables.score,
            layers.start,
            **window_sizes(Running(self, active), chosen.shape[1]),
            NUM_LAYERS=num_layers,
            NUM_EXPERTS=num_experts,
            EXPERT_BLOCK=triton.next_power_of_2(num_experts),
            CHANGE=change.value,
            num_warps=1,
            enable_fp_fusion=False,  # shares round as the host's do: each product, then the sum
        )


class Running(NamedTuple):
    """A layer begins for the rows in `active`, bool `[stepping rows]`, which are foreseen by `windows`."""

    windows: Windows
    active: torch.Tensor


def window_arguments(running: Running | None) -> tuple[object, ...]:
    """What `score_layer` takes before `chosen`; nothing of it is read where nothing is foreseen."""
    return (None, None) if running is None else (running.windows.for_kernels, running.active)


def window_sizes(running: Running | None, top_k: int) -> dict[str, int]:
    """What it is compiled for, besides what all kernels of the tables are. ROWS is 0 where nothing is."""
    rows, horizon = (0, 1) if running is None else running.windows.probabilities.shape[:2]
    return {
        "ROWS": rows,
        "HORIZON": horizon,
        "NUM_STEPPING": 0 if running is None else len(running.active),
        "TOP_K": top_k,
        "CHOSEN_BLOCK": triton.next_power_of_2(top_k),
    }


@triton.jit(do_not_specialize=["first_layer"])  # type: ignore[untyped-decorator]
def _score_kernel(  # type: ignore[no-untyped-def]
    windows,
    active,
    chosen,
    score,
    first_layer,
    ROWS: tl.constexpr,  # noqa: N803
    HORIZON: tl.constexpr,  # noqa: N803
    NUM_STEPPING: tl.constexpr,  # noqa: N803
    TOP_K: tl.constexpr,  # noqa: N803
    CHOSEN_BLOCK: tl.constexpr,  # noqa: N803
    NUM_LAYERS: tl.constexpr,  # noqa: N803
    NUM_EXPERTS: tl.constexpr,  # noqa: N803
    EXPERT_BLOCK: tl.constexpr,  # noqa: N803
    CHANGE: tl.constexpr,  # noqa: N803
):
    score_layer(
        windows, active, chosen, score, first_layer + tl.program_id(0), ROWS, HORIZON, NUM_STEPPING, TOP_K,
        CHOSEN_BLOCK, NUM_LAYERS, NUM_EXPERTS, EXPERT_BLOCK, CHANGE,
    )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def score_layer(  # type: ignore[no-untyped-def]
    windows,
    active,
    chosen,
    score,
    layer,
    ROWS: tl.constexpr,  # noqa: N803
    HORIZON: tl.constexpr,  # noqa: N803
    NUM_STEPPING: tl.constexpr,  # noqa: N803
    TOP_K: tl.constexpr,  # noqa: N803
    CHOSEN_BLOCK: tl.constexpr,  # noqa: N803
    NUM_LAYERS: tl.constexpr,  # noqa: N803
    NUM_EXPERTS: tl.constexpr,  # noqa: N803
    EXPERT_BLOCK: tl.constexpr,  # noqa: N803
    CHANGE: tl.constexpr,  # noqa: N803
):
    """Scores of one layer anew, by one program of a kernel that fuses no products and sums. A barrier must
    follow before `score` is read."""
    experts = tl.arange(0, EXPERT_BLOCK)
    is_expert = experts < NUM_EXPERTS
    best = tl.full((EXPERT_BLOCK,), float("-inf"), tl.float64)
    for row in range(ROWS):
        at = windows.window + row * NUM_LAYERS + layer
        behind = tl.load(at)
        is_stepping = tl.load(active + row, mask=row < NUM_STEPPING, other=0) != 0
        tl.debug_barrier()  # all threads have read what one of them writes
        if is_stepping:
            if CHANGE == _RENEW:
                behind = behind * 0
            elif (CHANGE == RUN) & (behind >= 0):
                behind = tl.minimum(behind + 1, HORIZON)
            tl.store(at, behind)
        used = windows.recent + (row * NUM_LAYERS + layer) * NUM_EXPERTS + experts
        shares = tl.load(used, mask=is_expert, other=0.0)
        if (CHANGE == RUN) & is_stepping:
            shares = _after_uses(shares, chosen + row * TOP_K, experts, TOP_K, CHOSEN_BLOCK)
            tl.store(used, shares, mask=is_expert)
        if behind >= 0:
            first = tl.minimum(behind, HORIZON - 1)  # past the end the last score stays
            entry = windows.probabilities + ((row * HORIZON + first) * NUM_LAYERS + layer) * NUM_EXPERTS
            entry += experts
            expected = _expected_uses(entry, is_expert, first, NUM_LAYERS * NUM_EXPERTS, HORIZON)
            best = tl.maximum(best, expected + shares * tl.full((), _RECENT_WEIGHT, tl.float64))
    tl.store(score + layer * NUM_EXPERTS + experts, best, mask=is_expert & (best > float("-inf")))


@triton.jit  # type: ignore[untyped-decorator]
def _after_uses(shares, chosen, experts, TOP_K: tl.constexpr, CHOSEN_BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """A row's record of recent use after it chose the TOP_K experts at `chosen`."""
    column = tl.arange(0, CHOSEN_BLOCK)
    expert = tl.load(chosen + column, mask=column < TOP_K, other=-1)
    num_uses = tl.sum((expert >= 0).to(tl.int32), axis=0).to(tl.float64)
    uses = tl.sum((experts[:, None] == expert[None, :]).to(tl.int32), axis=1).to(tl.float64)
    one = tl.full((), 1.0, tl.float64)
    moved = tl.minimum(num_uses * tl.full((), _RECENT_RATE, tl.float64), one)
    return shares + moved * (uses / tl.maximum(num_uses, one) - shares)


@triton.jit  # type: ignore[untyped-decorator]
def _expected_uses(entry, is_expert, first, STRIDE: tl.constexpr, HORIZON: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Σ λ^j · p_j / Σ λ^j over the entries from `first` on, c at most. `entry`: pointers to the first."""
    total = tl.zeros(entry.shape, tl.float64)
    weights = tl.zeros(entry.shape, tl.float64)
    weight = tl.full(entry.shape, 1.0, tl.float64)
    for j in tl.static_range(_NUM_STEPS):
        is_inside = first + j < HORIZON
        share = tl.load(entry + j * STRIDE, mask=is_expert & is_inside, other=0.0).to(tl.float64)
        total += weight * share
        weights += tl.where(is_inside, weight, 0.0)
        weight *= _DECAY
    return total / weights
