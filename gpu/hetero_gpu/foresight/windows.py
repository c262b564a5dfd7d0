"""How much of each row's forecast is still to come, and the scores that follow: probabilistic Belady.

    run      a layer begins: of its forecasts, entry 0 lies behind the rows that step
    renew    layers were forecast anew: their windows begin with entry 0
    rescore  entry 0 of layers was made anew: nothing moves on

    window [rows, L]        0        1        2            entries behind; -1: no forecast yet
    forecast              │ p_0    │ p_1    │ p_2    …     the runs of one layer, as they were foreseen

Step for step what `hetero_scheduler.eviction`'s BeladyForecast does for one row and BeladyRows for several,
to the last bit (SeqMoE §7.1): an expert's score is the greatest among the rows. Device work alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hetero_gpu.tables.state import DeviceTables
from hetero_scheduler.eviction.belady_forecast import DECAY, NUM_STEPS

_RUN, _RENEW, _RESCORE = (tl.constexpr(change) for change in range(3))
_NUM_STEPS, _DECAY = tl.constexpr(NUM_STEPS), tl.constexpr(DECAY)


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

    def run(self, layer: int, active: torch.Tensor) -> None:
        """`layer` begins, before its `ensure`. `active`: bool `[stepping rows]`, those that pass it."""
        self._launch(range(layer, layer + 1), active, change=_RUN)

    def renew(self, layers: range, active: torch.Tensor) -> None:
        """`probabilities` of `layers` are new for the rows in `active` (bool `[stepping rows]`)."""
        self._launch(layers, active, change=_RENEW)

    def rescore(self, layers: range, active: torch.Tensor) -> None:
        """`probabilities` of `layers` are others than before, and of the same runs."""
        self._launch(layers, active, change=_RESCORE)

    def forget(self, row: int) -> None:
        """The text of `row` has ended: nothing of it is wanted any more. Scores follow with the next run."""
        self.window[row] = -1

    def _launch(self, layers: range, active: torch.Tensor, *, change: tl.constexpr) -> None:
        rows, horizon, num_layers, num_experts = self.probabilities.shape
        _score_kernel[(len(layers),)](
            self.probabilities,
            self.window,
            active,
            self._tables.score,
            layers.start,
            NUM_STEPPING=len(active),
            ROWS=rows,
            HORIZON=horizon,
            NUM_LAYERS=num_layers,
            NUM_EXPERTS=num_experts,
            EXPERT_BLOCK=triton.next_power_of_2(num_experts),
            CHANGE=change.value,
            num_warps=1,
        )


@triton.jit(do_not_specialize=["first_layer"])  # type: ignore[untyped-decorator]
def _score_kernel(  # type: ignore[no-untyped-def]
    probabilities,
    window,
    active,
    score,
    first_layer,
    NUM_STEPPING: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    HORIZON: tl.constexpr,  # noqa: N803
    NUM_LAYERS: tl.constexpr,  # noqa: N803
    NUM_EXPERTS: tl.constexpr,  # noqa: N803
    EXPERT_BLOCK: tl.constexpr,  # noqa: N803
    CHANGE: tl.constexpr,  # noqa: N803
):
    layer = first_layer + tl.program_id(0)
    experts = tl.arange(0, EXPERT_BLOCK)
    is_expert = experts < NUM_EXPERTS
    best = tl.full((EXPERT_BLOCK,), float("-inf"), tl.float64)
    for row in range(ROWS):
        at = window + row * NUM_LAYERS + layer
        behind = tl.load(at)
        is_stepping = tl.load(active + row, mask=row < NUM_STEPPING, other=0) != 0
        tl.debug_barrier()  # all threads have read what one of them writes
        if is_stepping:
            if CHANGE == _RENEW:
                behind = behind * 0
            elif (CHANGE == _RUN) & (behind >= 0):
                behind = tl.minimum(behind + 1, HORIZON)
            tl.store(at, behind)
        if behind >= 0:
            first = tl.minimum(behind, HORIZON - 1)  # past the end the last score stays
            entry = probabilities + ((row * HORIZON + first) * NUM_LAYERS + layer) * NUM_EXPERTS + experts
            best = tl.maximum(
                best, _expected_uses(entry, is_expert, first, NUM_LAYERS * NUM_EXPERTS, HORIZON)
            )
    tl.store(score + layer * NUM_EXPERTS + experts, best, mask=is_expert & (best > float("-inf")))


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
