"""An order of experts in which those that are chosen together lie next to each other.

On a disk, neighbours are read together faster than strangers. A layer's experts are laid in a chain: the most
used one first, then always the one that was chosen most often together with the latest of the chain.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hetero_scheduler.trace import Trace

_TOKENS_AT_ONCE = 8192


def order_by_company(trace: Trace) -> npt.NDArray[np.int64]:
    """Experts of each layer in their order, int64 `[layers, experts]`: rows are permutations.

    Ties go to the expert that was used more, then to the lower one.
    """
    return np.stack(
        [
            _chain(_company(trace.topk[:, layer], trace.num_experts), window=max(1, trace.top_k - 1))
            for layer in range(trace.num_layers)
        ]
    )


def _company(topk: npt.NDArray[np.integer], num_experts: int) -> npt.NDArray[np.float64]:
    """How many tokens chose both, float64 `[experts, experts]`; its diagonal is each one's own use."""
    company = np.zeros((num_experts, num_experts))
    for begin in range(0, len(topk), _TOKENS_AT_ONCE):
        chosen = topk[begin : begin + _TOKENS_AT_ONCE]
        is_chosen = np.zeros((len(chosen), num_experts), dtype=np.float32)
        np.put_along_axis(is_chosen, chosen.astype(np.int64), 1.0, axis=1)
        company += is_chosen.T @ is_chosen
    return company


def _chain(company: npt.NDArray[np.float64], *, window: int) -> npt.NDArray[np.int64]:
    """Greedy: each next expert has been most together with the `window` latest."""
    by_use = np.argsort(-company.diagonal(), kind="stable")
    chain, left = [int(by_use[0])], by_use[1:]
    while len(left):
        together = company[left][:, chain[-window:]].sum(axis=1)
        best = int(np.argmax(together))
        chain.append(int(left[best]))
        left = np.delete(left, best)
    return np.array(chain, dtype=np.int64)
