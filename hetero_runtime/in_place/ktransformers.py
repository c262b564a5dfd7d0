"""kt-kernel, where it was installed by hand: fast kernels on a second copy of the weights.

It repacks every expert for itself while the engine starts, so host memory holds each one twice (int4: three
times), computes in bfloat16, and rounds the activations of int8 and int4 experts to int8. Its workers spin
for 50 ms after each call before they sleep.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from hetero_cpu_kernels.experts import ExpertForm
from hetero_cpu_kernels.ktransformers import CallMemory, KtLayer, KtPool
from hetero_runtime.errors import DeviceError
from hetero_runtime.in_place.base import Done, Floats, Integers, Work
from hetero_runtime.in_place.one_thread import OneThreadExperts
from hetero_runtime.plan.in_place import KT_ROWS, KT_TOP_K

Bytes = npt.NDArray[np.uint8]


class _Rows(NamedTuple):
    """A work as kt-kernel takes it. `tokens` `[R]`: whose activations a row has, ascending; `experts` and
    `weights` `[R, KT_TOP_K]`."""

    tokens: Integers
    experts: Integers
    weights: Floats


class KtExperts(OneThreadExperts):
    """`records(layer)`: all experts of one, plain, uint8 `[experts, bytes]`, asked for once. `pool` is closed
    with this. Sums of a token's experts are kt-kernel's."""

    def __init__(
        self, form: ExpertForm, pool: KtPool, *, records: Callable[[int], Bytes], num_layers: int
    ) -> None:
        # It waits by spinning, like kt-kernel's own: away from the workers.
        super().__init__(
            ThreadPoolExecutor(
                1, "expert-kt", initializer=os.sched_setaffinity, initargs=(0, pool.spare_cpus)
            )
        )
        self.num_workers = pool.num_workers
        self._pool = pool
        memory = CallMemory(form.hidden, top_k=KT_TOP_K, most_tokens=KT_ROWS)
        self._layers = [KtLayer(pool, form, records(layer), memory=memory) for layer in range(num_layers)]

    def wait(self) -> Done:
        try:
            return super().wait()
        except RuntimeError as error:
            raise DeviceError(f"computing experts with kt-kernel failed: {error}") from error

    def close(self) -> None:
        super().close()
        self._layers.clear()
        self._pool.close()

    def _compute(self, work: Work) -> Done:
        began = time.perf_counter()
        rows, layer = _rows_of(work), self._layers[work.layer]
        total = np.zeros_like(work.hidden)
        for part in _calls(len(rows.tokens)):
            tokens = rows.tokens[part]
            layer.submit(_to_bfloat16(work.hidden[tokens]), rows.experts[part], rows.weights[part])
            np.add.at(total, tokens, _to_float32(layer.wait()))
        return Done(total, time.perf_counter() - began)


def _rows_of(work: Work) -> _Rows:
    order = np.argsort(work.tokens, kind="stable")
    tokens = work.tokens[order]
    counts = np.bincount(tokens, minlength=len(work.hidden))
    place = np.arange(len(tokens)) - np.repeat(np.cumsum(counts) - counts, counts)  # among the token's pairs
    num_rows = -(-counts // KT_TOP_K)
    row = np.repeat(np.cumsum(num_rows) - num_rows, counts) + place // KT_TOP_K
    experts = np.full((num_rows.sum(), KT_TOP_K), -1, dtype=np.int64)
    weights = np.zeros(experts.shape, dtype=np.float32)
    of_pair = np.repeat(work.experts, np.diff(work.bounds))
    experts[row, place % KT_TOP_K], weights[row, place % KT_TOP_K] = of_pair[order], work.weights[order]
    return _Rows(np.repeat(np.arange(len(counts)), num_rows), experts, weights)


def _calls(num_rows: int) -> Iterator[slice]:
    for begin in range(0, num_rows, KT_ROWS):
        yield slice(begin, min(begin + KT_ROWS, num_rows))


def _to_bfloat16(values: Floats) -> npt.NDArray[np.uint16]:
    return torch.from_numpy(values).bfloat16().view(torch.uint16).numpy()


def _to_float32(halves: npt.NDArray[np.uint16]) -> Floats:
    floats: Floats = torch.from_numpy(halves).view(torch.bfloat16).float().numpy()
    return floats
