"""The logical caches of all rows, as tensors at addresses that never change.

    [rows, L, E]   who is resident, the priorities of the step, the averages, the last use, marks of the step
    [rows, L]      the clock, the sum of ranges, whether a step is under way
    [rows, L, K]   the pre-gate's best of the step under way

The fields are those of `hetero_scheduler.routing.state.State`, which says what they mean.
"""

from __future__ import annotations

import numpy as np
import torch

from hetero_scheduler.routing import LogicalCache

MOST_EXPERTS = 512
"""One thread block holds a layer's experts in registers; the largest layer that was tried."""

COUNTERS = ("inserted", "demanded", "deviating")


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
        self.state = {
            name: torch.zeros((rows, *array.shape), dtype=_dtype(array), device=device)
            for name, array in like.state._asdict().items()
        }
        self.counters = torch.zeros(
            (rows, like.shape.num_layers, len(COUNTERS)), dtype=torch.int64, device=device
        )
        """Experts of COUNTERS."""
        self.bonus = torch.from_numpy(like.tables.bonus).to(device)
        self.prior = torch.from_numpy(like.tables.prior).to(device)
        rows_of_tokens = like.prior.rows(np.arange(vocab_size)).astype(np.int32)
        self.prior_row = torch.from_numpy(rows_of_tokens).to(device)
        """By token."""

    def adopt(self, row: int, cache: LogicalCache) -> None:
        """`row` goes on from `cache`. Waits for the device."""
        assert (cache.shape, cache.policy.rules) == (self.shape, self.rules), "a cache of another policy"
        for name, array in cache.state._asdict().items():
            self.state[name][row].copy_(torch.from_numpy(array))

    def to_host(self, row: int, cache: LogicalCache) -> None:
        """`cache` goes on from `row`. Waits for the device."""
        for name, array in cache.state._asdict().items():
            array[:] = self.state[name][row].cpu().numpy()


def _dtype(array: np.ndarray) -> torch.dtype:
    """bool becomes int8, which kernels read and write as it is."""
    return torch.int8 if array.dtype == np.bool_ else torch.from_numpy(array[:0]).dtype
