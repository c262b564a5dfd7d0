"""torch's own products over the host's records, in a thread of their own.

For experts that the kernels cannot read, and as the reference that always works. A record that is not plain
in the model's dtype is decoded anew in every call.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from hetero_runtime.experts.compute import ExpertMlp, Params
from hetero_runtime.in_place.base import Done, Work
from hetero_runtime.in_place.one_thread import OneThreadExperts
from hetero_scheduler import ExpertKey


class TorchExperts(OneThreadExperts):
    """`mlps`: one a layer, to run on the CPU. `parameters`: of one expert, on the CPU in `dtype`."""

    def __init__(
        self,
        mlps: Sequence[ExpertMlp],
        *,
        parameters: Callable[[ExpertKey], Params],
        dtype: torch.dtype,
        num_threads: int,
    ) -> None:
        super().__init__(ThreadPoolExecutor(1, thread_name_prefix="expert-torch"))
        self.num_workers = num_threads
        self._mlps, self._parameters, self._dtype = mlps, parameters, dtype
        before = torch.get_num_threads()
        self._thread.submit(torch.set_num_threads, num_threads).result()
        torch.set_num_threads(before)  # the word is for that thread, and was taken as one for all to come

    @torch.no_grad()
    def _compute(self, work: Work) -> Done:
        began = time.perf_counter()
        total = torch.zeros(work.hidden.shape)
        hidden = torch.from_numpy(work.hidden).to(self._dtype)
        tokens, weights = torch.from_numpy(work.tokens), torch.from_numpy(work.weights)
        bounds = work.bounds.tolist()
        for i, expert in enumerate(work.experts.tolist()):
            part = slice(bounds[i], bounds[i + 1])
            params = self._parameters(ExpertKey(work.layer, expert))
            y = self._mlps[work.layer](hidden[tokens[part]], params)
            total.index_add_(0, tokens[part], y.float() * weights[part, None])
        return Done(total.numpy(), time.perf_counter() - began)
