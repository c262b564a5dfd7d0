"""Which experts are worth a transfer: the likeliest of each layer at its next run (SeqMoE §6.1).

What `hetero_scheduler.prefetch.propose` makes of a forecast's first entry. Of several rows that step together
the mean counts, as in the paper: expected hits are then those of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hetero_gpu.tables import Windows


class Candidates:
    """Up to `per_layer` tasks of each layer.

    `expert`: int32 `[layers, per_layer]`, the likeliest first, -1 for none or for one that was chosen or came
    too late. `confidence`: float32, of the same shape.
    """

    def __init__(self, windows: Windows, *, per_layer: int) -> None:
        """No candidates. Raises ValueError when there are not `per_layer` experts."""
        num_layers, num_experts = windows.probabilities.shape[2:]
        if not 1 <= per_layer <= num_experts:
            raise ValueError(f"per_layer is {per_layer}; it must be 1 to {num_experts}")
        self._windows, device = windows, windows.probabilities.device
        self.expert = torch.full((num_layers, per_layer), -1, dtype=torch.int32, device=device)
        self.confidence = torch.zeros((num_layers, per_layer), device=device)

    def renew(self, layers: range) -> None:
        """After `Windows.renew` of `layers`: their candidates are those of the new forecasts. Device work."""
        probabilities = self._windows.probabilities
        rows, horizon, num_layers, num_experts = probabilities.shape
        _propose_kernel[(len(layers),)](
            probabilities,
            self._windows.window,
            self.expert,
            self.confidence,
            layers.start,
            ROWS=rows,
            HORIZON=horizon,
            NUM_LAYERS=num_layers,
            NUM_EXPERTS=num_experts,
            EXPERT_BLOCK=triton.next_power_of_2(num_experts),
            PER_LAYER=self.expert.shape[1],
            num_warps=1,
        )

    def clear(self) -> None:
        """Forget all candidates."""
        self.expert.fill_(-1)


@triton.jit(do_not_specialize=["first_layer"])  # type: ignore[untyped-decorator]
def _propose_kernel(  # type: ignore[no-untyped-def]
    probabilities,
    window,
    task_expert,
    task_confidence,
    first_layer,
    ROWS: tl.constexpr,  # noqa: N803
    HORIZON: tl.constexpr,  # noqa: N803
    NUM_LAYERS: tl.constexpr,  # noqa: N803
    NUM_EXPERTS: tl.constexpr,  # noqa: N803
    EXPERT_BLOCK: tl.constexpr,  # noqa: N803
    PER_LAYER: tl.constexpr,  # noqa: N803
):
    layer = first_layer + tl.program_id(0)
    experts = tl.arange(0, EXPERT_BLOCK)
    is_expert = experts < NUM_EXPERTS
    total = tl.zeros((EXPERT_BLOCK,), tl.float32)
    num_rows = layer * 0
    for row in range(ROWS):
        if tl.load(window + row * NUM_LAYERS + layer) == 0:  # foreseen, and not run since
            entry = probabilities + (row * HORIZON * NUM_LAYERS + layer) * NUM_EXPERTS + experts
            total += tl.load(entry, mask=is_expert, other=0.0)
            num_rows += 1
    left = tl.where(is_expert, total / tl.maximum(num_rows, 1).to(tl.float32), -1.0)
    for i in range(PER_LAYER):
        best = tl.max(left, axis=0)
        expert = tl.min(tl.where(left == best, experts, EXPERT_BLOCK), axis=0)
        left = tl.where(experts == expert, -1.0, left)
        at = layer * PER_LAYER + i
        tl.store(task_expert + at, tl.where(best > 0, expert, -1))
        tl.store(task_confidence + at, best)
