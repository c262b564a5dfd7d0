"""The logical caches of all rows, as tensors at addresses that never change.

    [rows, L, E]   who is resident, the priorities of the step, the averages, the last use, marks of the step
    [rows, L]      the clock, the sum of ranges, whether a step is under way
    [rows, L, K]   the pre-gate's best of the step under way

The fields are those of `hetero_scheduler.routing.state.State`, which says what they mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
import torch
import triton

from hetero_scheduler.routing import LogicalCache

MOST_EXPERTS = 512
"""One thread block holds a layer's experts in registers; the largest layer that was tried."""

COUNTERS = ("inserted", "demanded", "deviating")


class DeviceState(NamedTuple):
    """As `hetero_scheduler.routing.state.State`, a row in front of everything; bool is int8."""

    is_resident: torch.Tensor
    priority: torch.Tensor
    fast: torch.Tensor
    slow: torch.Tensor
    last_use: torch.Tensor
    clock: torch.Tensor
    range_sum: torch.Tensor
    is_begun: torch.Tensor
    is_guarded: torch.Tensor
    is_inserted: torch.Tensor
    guess: torch.Tensor


class DeviceTables(NamedTuple):
    """What does not change during a request, and what steps count."""

    bonus: torch.Tensor
    """`[L]`"""
    prior: torch.Tensor
    """`[N + 1, L, E]`"""
    prior_row: torch.Tensor
    """By token, int32."""
    counters: torch.Tensor
    """Experts of COUNTERS, int64 `[rows, L, 3]`."""


@dataclass(frozen=True)
class StepForm:
    """What kernels are compiled for: the model's numbers and the policy's, as in `Shape` and `Rules`."""

    layers: int
    experts: int
    top_k: int
    bonus: float
    protected: int
    insertions: int
    window: int
    is_running: bool
    is_lru: bool
    executes_guess: bool
    expert_block: int
    """The power of two that holds all experts."""

    @classmethod
    def of(cls, cache: LogicalCache) -> Self:
        """The form of steps of `cache`."""
        layers, experts, top_k = cache.shape
        block = triton.next_power_of_2(experts)
        return cls(layers, experts, top_k, **cache.policy.rules._asdict(), expert_block=block)


class DeviceCaches:
    """See the module docstring. `like`: a logical cache of the policy and model that all rows follow; its
    tables are copied to `device`. `vocab_size`: tokens are below it. Raises ValueError for a layer with more
    experts than one thread block serves."""

    def __init__(self, like: LogicalCache, *, rows: int, vocab_size: int, device: torch.device) -> None:
        if like.shape.num_experts > MOST_EXPERTS:
            raise ValueError(
                f"{like.shape.num_experts} experts a layer: the kernels serve up to {MOST_EXPERTS}"
            )
        self.shape, self.rules, self.device = like.shape, like.policy.rules, device
        self.form = StepForm.of(like)
        self.state = DeviceState(
            **{
                name: torch.zeros((rows, *array.shape), dtype=_dtype(array), device=device)
                for name, array in like.state._asdict().items()
            }
        )
        prior_rows = like.prior.rows(np.arange(vocab_size)).astype(np.int32)
        counters = torch.zeros((rows, like.shape.num_layers, len(COUNTERS)), dtype=torch.int64, device=device)
        self.tables = DeviceTables(
            torch.from_numpy(like.tables.bonus).to(device),
            torch.from_numpy(like.tables.prior).to(device),
            torch.from_numpy(prior_rows).to(device),
            counters,
        )

    @property
    def counters(self) -> torch.Tensor:
        """Experts of COUNTERS, by row and layer."""
        return self.tables.counters

    def adopt(self, row: int, cache: LogicalCache) -> None:
        """`row` goes on from `cache`. Waits for the device."""
        assert (cache.shape, cache.policy.rules) == (self.shape, self.rules), "a cache of another policy"
        for name, array in cache.state._asdict().items():
            getattr(self.state, name)[row].copy_(torch.from_numpy(array))

    def to_host(self, row: int, cache: LogicalCache) -> None:
        """`cache` goes on from `row`. Waits for the device."""
        for name, array in cache.state._asdict().items():
            array[:] = getattr(self.state, name)[row].cpu().numpy()


def _dtype(array: np.ndarray) -> torch.dtype:
    """bool becomes int8, which kernels read and write as it is."""
    return torch.int8 if array.dtype == np.bool_ else torch.from_numpy(array[:0]).dtype
