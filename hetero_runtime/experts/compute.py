"""The expert MLP, operation for operation as transformers' own eager experts compute it.

Same operations on same shapes in the same order give the same bits: that is what makes offloaded output equal
to transformers' output, not merely close to it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional as F

Params = dict[str, torch.Tensor]


@dataclass(frozen=True)
class ExpertMlp:
    """One expert: up (and gate), activation, down. The flags are those on transformers' Experts modules.

    `activate`: `[n, 2I]` (with gate) or `[n, I]` to `[n, I]`, the model's own gate function.
    `post_norm`: applied to the output where the architecture has one.
    """

    activate: Callable[[torch.Tensor], torch.Tensor]
    up_name: str
    is_transposed: bool
    post_norm: Callable[[torch.Tensor], torch.Tensor] | None = None

    def __call__(self, x: torch.Tensor, params: Params) -> torch.Tensor:
        """`x`: `[n, H]`. `params`: the Experts module's parameters without the expert axis."""
        h = self.activate(self._project(x, params, self.up_name))
        y = self._project(h, params, "down_proj")
        return y if self.post_norm is None else self.post_norm(y)

    def _project(self, x: torch.Tensor, params: Params, name: str) -> torch.Tensor:
        weight, bias = params[name], params.get(f"{name}_bias")
        y = x @ weight if self.is_transposed else F.linear(x, weight)
        return y if bias is None else y + bias


@dataclass(frozen=True)
class Dispatch:
    """Which rows of a layer's input go to which expert, on the host.

    `experts` ascending `[n]`; expert i takes the entries `bounds[i]:bounds[i+1]` of `order`, and `order[j]`
    is a position in the transposed routing `[top_k, tokens]` laid flat: transformers' own order of the rows.
    """

    experts: npt.NDArray[np.int64]
    order: npt.NDArray[np.int64]
    bounds: npt.NDArray[np.int64]
    num_tokens: int

    @classmethod
    def of(cls, top_k_index: npt.NDArray[np.int64]) -> Dispatch:
        """`top_k_index`: `[tokens, top_k]`."""
        flat = top_k_index.T.astype(np.int16).reshape(-1)  # 16 bits are sorted by counting
        counts = np.bincount(flat)
        experts = counts.nonzero()[0]
        bounds = np.concatenate([[0], counts[experts].cumsum()])
        return cls(experts, flat.argsort(kind="stable"), bounds, top_k_index.shape[0])

    def tokens_per_expert(self, num_experts: int) -> npt.NDArray[np.int64]:
        """`[num_experts]`"""
        counts = np.zeros(num_experts, dtype=np.int64)
        counts[self.experts] = np.diff(self.bounds)
        return counts


class LayerSum:
    """Adds the experts' weighted outputs of one layer, in the order in which they are given.

    `hidden`: `[T, H]`; `weights`: `[T, K]`, any float dtype. The sum has `hidden`'s dtype.
    """

    def __init__(self, hidden: torch.Tensor, weights: torch.Tensor, dispatch: Dispatch) -> None:
        self.hidden, self._weights, self.dispatch = hidden, weights, dispatch
        self.total = torch.zeros_like(hidden)
        if dispatch.num_tokens > 1:
            order = torch.from_numpy(dispatch.order).to(hidden.device)
            self._tokens = order % dispatch.num_tokens
            self._sorted_weights = weights.t().reshape(-1)[order, None]  # [T * K, 1]

    def add(self, i: int, mlp: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Run the i-th expert of the dispatch on its rows and add the result."""
        begin, end = self.dispatch.bounds[i : i + 2].tolist()
        if self.dispatch.num_tokens == 1:
            column = int(self.dispatch.order[begin])
            y = mlp(self.hidden) * self._weights[:, column, None]
            self.total += y.to(self.total.dtype)
            return
        tokens = self._tokens[begin:end]
        y = mlp(self.hidden[tokens]) * self._sorted_weights[begin:end]
        self.total.index_add_(0, tokens, y.to(self.total.dtype))

    def host_weights(self) -> npt.NDArray[np.float32]:
        """The routing weights, on the host. `[T, K]`"""
        weights: npt.NDArray[np.float32] = self._weights.detach().float().cpu().numpy()
        return weights

    def add_rows(self, rows: npt.NDArray[np.int64], values: npt.NDArray[np.float32]) -> None:
        """Add a weighted sum of experts that was made elsewhere: `values` `[n, H]` to the tokens `rows`."""
        part = torch.from_numpy(values).to(device=self.total.device, dtype=self.total.dtype)
        if self.dispatch.num_tokens == 1:
            self.total += part
        else:
            self.total.index_add_(0, torch.from_numpy(rows).to(self.total.device), part)
