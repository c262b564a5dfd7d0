"""A whole forecast of one group in one launch: phases, each of many programs, with a meeting between two.

    phase 0         a program a layer    routing taken in
    of each step    a program a head     block 0, then block 1, ...
                    a program a layer    probabilities; their best taken in for the next step

A forecast may be made in two parts: of the nearest steps, and later of those that follow, from what the rows
and the scratch memory hold in between.

Every phase needs all of the one before, and none does more than a microsecond of work, so programs stay on
the device and meet (a cooperative launch: all of them run at once). Where there is no device to meet on,
each phase is a launch of its own, with the same programs and the same sums in the same order.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"
# ruff: noqa: N803 (compile-time constants are written in capitals)

from __future__ import annotations

from typing import NamedTuple, Self

import torch
import triton
import triton.language as tl

from hetero_gpu.predict.blocks import keep_window, know_head, mix_head
from hetero_gpu.predict.layers import clear_layer, know_layer, predict_layer, read_layer
from hetero_gpu.predict.meeting import meet_all
from hetero_gpu.predict.memory import DeviceWeights, RowMemory, Scratch
from hetero_gpu.predict.sizes import ForecastSizes


class GroupForecast(NamedTuple):
    """One group's model, what its rows remember, and where it reads and writes."""

    sizes: ForecastSizes
    weights: DeviceWeights
    memory: RowMemory
    scratch: Scratch
    arrivals: torch.Tensor
    """int64 `[rows]`: programs that came to meetings ever, by the rows of the launch."""
    router_logits: torch.Tensor
    """`[n, rows, experts]`"""
    active: torch.Tensor
    """bool `[rows]`"""
    probabilities: torch.Tensor
    """`[rows, horizon, n, experts]`, a view into those of all layers."""

    @classmethod
    def of(
        cls,
        sizes: ForecastSizes,
        weights: DeviceWeights,
        *,
        memory: RowMemory,
        router_logits: torch.Tensor,
        active: torch.Tensor,
        probabilities: torch.Tensor,
    ) -> Self:
        """With scratch memory of its own."""
        rows, device = len(active), active.device
        return cls(
            sizes,
            weights,
            memory,
            Scratch.empty(sizes, rows=rows, device=device),
            torch.zeros(rows, dtype=torch.int64, device=device),
            router_logits,
            active,
            probabilities,
        )

    def launch(self, steps: range, *, rows: int, num_programs: int, error_address: int) -> None:
        """Forecast `steps` for the first `rows` rows: from 0 on what was routed is taken in before, and a row
        remembers it once the last step was forecast. Asynchronous, capturable, and nothing is allocated.

        `num_programs` must be the same whenever `rows` is, and on CUDA fit on the device together.
        """
        first_phase, last = self.sizes.phases(steps)
        is_joined = self.active.is_cuda or num_programs == 1
        for first in range(first_phase, last, last - first_phase if is_joined else 1):
            _forecast_kernel[(num_programs,)](
                self.router_logits,
                self.active,
                self.weights,
                self.memory,
                self.scratch,
                self.arrivals[rows - 1 :],
                self.probabilities,
                error_address,
                first,
                last if is_joined else first + 1,
                NUM_ROWS=rows,
                MOST_ROWS=len(self.active),
                NUM_PROGRAMS=num_programs,
                ALL_LAYERS=self.probabilities.stride(1) // self.sizes.experts,
                SIZES=self.sizes,
                num_warps=self.sizes.num_warps,
                launch_cooperative_grid=self.active.is_cuda,
            )


@triton.jit(do_not_specialize=["error_address", "first_phase", "last_phase"])
def _forecast_kernel(
    router_logits,
    active,
    weights,
    memory,
    scratch,
    arrivals,
    probabilities,
    error_address,
    first_phase,
    last_phase,
    NUM_ROWS: tl.constexpr,
    MOST_ROWS: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,
    ALL_LAYERS: tl.constexpr,
    SIZES: tl.constexpr,
):
    phase = first_phase
    while phase < last_phase:
        step = (phase - 1) // (SIZES.blocks + 1)
        block = (phase - 1) % (SIZES.blocks + 1)
        is_due = phase > first_phase  # a meeting, once the phase has asked for what is old
        if phase == 0:
            _read(router_logits, active, weights, scratch, NUM_ROWS, MOST_ROWS, SIZES)
        elif block < SIZES.blocks:
            _mix(
                block, step, active, weights, memory, scratch, is_due, arrivals, error_address,
                NUM_ROWS, MOST_ROWS, NUM_PROGRAMS, SIZES,
            )  # fmt: skip
        else:
            _predict(
                step, active, probabilities, weights, scratch, is_due, arrivals, error_address,
                NUM_ROWS, NUM_PROGRAMS, ALL_LAYERS, SIZES,
            )  # fmt: skip
            if step + 1 == SIZES.horizon:
                _keep(active, memory, NUM_ROWS, SIZES)
        phase += 1


@triton.jit
def _read(
    router_logits,
    active,
    weights,
    scratch,
    NUM_ROWS: tl.constexpr,
    MOST_ROWS: tl.constexpr,
    SIZES: tl.constexpr,
):
    share = tl.program_id(0)
    while share < NUM_ROWS * SIZES.layers:
        row, layer = share // SIZES.layers, share % SIZES.layers
        if tl.load(active + row):
            said = router_logits + (layer * MOST_ROWS + row) * SIZES.experts
            read_layer(row, layer, said, weights, scratch, SIZES)
        share += tl.num_programs(0)


@triton.jit
def _mix(
    block,
    step,
    active,
    weights,
    memory,
    scratch,
    is_due,
    arrivals,
    error_address,
    NUM_ROWS: tl.constexpr,
    MOST_ROWS: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,
    SIZES: tl.constexpr,
):
    share = tl.program_id(0)
    while share < NUM_ROWS * SIZES.heads:
        row, head = share // SIZES.heads, share % SIZES.heads
        if tl.load(active + row):
            known = know_head(row, head, block, step, weights, memory, MOST_ROWS, SIZES)
            meet_all(is_due, arrivals, error_address, NUM_PROGRAMS)
            mix_head(known, row, head, block, step, weights, memory, scratch, MOST_ROWS, SIZES)
            is_due = False
        share += tl.num_programs(0)
    meet_all(is_due, arrivals, error_address, NUM_PROGRAMS)


@triton.jit
def _predict(
    step,
    active,
    probabilities,
    weights,
    scratch,
    is_due,
    arrivals,
    error_address,
    NUM_ROWS: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,
    ALL_LAYERS: tl.constexpr,
    SIZES: tl.constexpr,
):
    share = tl.program_id(0)
    while share < NUM_ROWS * SIZES.layers:
        row, layer = share // SIZES.layers, share % SIZES.layers
        at = (row * SIZES.horizon + step) * ALL_LAYERS + layer
        if tl.load(active + row):
            known = know_layer(layer, weights, SIZES)
            meet_all(is_due, arrivals, error_address, NUM_PROGRAMS)
            predict_layer(
                known, row, layer, step, probabilities + at * SIZES.experts, weights, scratch, SIZES
            )
            is_due = False
        else:
            clear_layer(probabilities + at * SIZES.experts, SIZES)
        share += tl.num_programs(0)
    meet_all(is_due, arrivals, error_address, NUM_PROGRAMS)


@triton.jit
def _keep(active, memory, NUM_ROWS: tl.constexpr, SIZES: tl.constexpr):
    share = tl.program_id(0)
    while share < NUM_ROWS * SIZES.blocks:
        row = share // SIZES.blocks
        if tl.load(active + row):
            keep_window(row, share % SIZES.blocks, memory, SIZES)
        share += tl.num_programs(0)
