"""The bottleneck MLP of the lookahead predictor, one for each layer (VisMMOE §3.3.2, Eq. 8).

    z = ψ(W2 ψ(W1 x)),  y = Wo z          ψ: batch norm, ReLU, dropout

All layers are trained at once, as batched products. Afterwards the norms are folded into the products before
them: what predicts are three products and two ReLUs a layer.
"""

from __future__ import annotations

from typing import NamedTuple, Self

import torch
from torch import Tensor, nn

from hetero_scheduler.predict.lookahead_features import LookaheadShape


class LookaheadWeights(NamedTuple):
    """Folded, for the S layers that speak; M: width of the bottleneck.

    `inner` `[S, history + H, M]`, `visual` `[S, V, M]`, `inner_bias` `[S, M]`, `middle` `[S, M, M]`,
    `middle_bias` `[S, M]`, `outer` `[S, M, W · E]`, `outer_bias` `[S, W · E]`.
    """

    inner: Tensor
    visual: Tensor
    inner_bias: Tensor
    middle: Tensor
    middle_bias: Tensor
    outer: Tensor
    outer_bias: Tensor

    def to(self, device: torch.device | str, dtype: torch.dtype) -> Self:
        """The same weights there, in that dtype."""
        return type(self)(*(tensor.to(device, dtype) for tensor in self))

    def seen(self, visual: Tensor | None) -> Tensor:
        """What the visual summary `[V]` adds at each layer; it stands for a whole text. `[S, M]`"""
        if visual is None:
            return self.inner_bias
        return self.inner_bias + torch.einsum("v,svm->sm", visual.to(self.visual), self.visual)

    def scores(self, layer: int, features: Tensor, seen: Tensor) -> Tensor:
        """y of one layer: `features` `[history + H]`, `seen` as `seen` gave it. `[W · E]`"""
        z = torch.relu(torch.addmv(seen[layer], self.inner[layer].T, features))
        z = torch.relu(torch.addmv(self.middle_bias[layer], self.middle[layer].T, z))
        return torch.addmv(self.outer_bias[layer], self.outer[layer].T, z)

    def all_scores(self, features: Tensor, visual: Tensor) -> Tensor:
        """y of all layers of many passes: `features` `[B, S, history + H]`, `visual` `[B, V]`;
        `[B, S, W · E]`"""
        z = torch.einsum("bsd,sdm->bsm", features, self.inner) + self.inner_bias
        z = torch.relu(z + torch.einsum("bv,svm->bsm", visual, self.visual))
        z = torch.relu(torch.einsum("bsm,smn->bsn", z, self.middle) + self.middle_bias)
        return torch.einsum("bsm,smo->bso", z, self.outer) + self.outer_bias


class LookaheadModel(nn.Module):
    """The same, to be trained. `width`: of the bottleneck, M."""

    def __init__(self, shape: LookaheadShape, *, width: int, dropout: float) -> None:
        super().__init__()
        self.shape, self._width = shape, width
        layers = shape.num_speaking
        num_features = shape.history_size + shape.hidden_size
        self.inner = _weights(layers, num_features, width)
        self.visual = _weights(layers, shape.visual_size, width)
        self.middle = _weights(layers, width, width)
        self.outer = _weights(layers, width, shape.window * shape.num_experts)
        self.outer_bias = nn.Parameter(torch.zeros(layers, shape.window * shape.num_experts))
        self.norms = nn.ModuleList([nn.BatchNorm1d(layers * width) for _ in range(2)])
        self.dropout = nn.Dropout(dropout)

    def forward(self, features: Tensor, visual: Tensor) -> Tensor:
        """y before the sigmoid. `features` `[B, S, history + H]`, `visual` `[B, V]`; `[B, S, W, E]`"""
        z = torch.einsum("bsd,sdm->bsm", features, self.inner)
        z = z + torch.einsum("bv,svm->bsm", visual, self.visual)
        z = self._psi(z, 0)
        z = self._psi(torch.einsum("bsm,smn->bsn", z, self.middle), 1)
        y = torch.einsum("bsm,smo->bso", z, self.outer) + self.outer_bias
        return y.reshape(*y.shape[:2], self.shape.window, self.shape.num_experts)

    @torch.no_grad()
    def fold(self) -> LookaheadWeights:
        """What predicts: norms, as they are when nothing is trained, inside the products."""
        (scale, shift), (scale2, shift2) = (self._affine(norm) for norm in self.norms)
        return LookaheadWeights(
            inner=self.inner * scale[:, None],
            visual=self.visual * scale[:, None],
            inner_bias=shift,
            middle=self.middle * scale2[:, None],
            middle_bias=shift2,
            outer=self.outer.clone(),
            outer_bias=self.outer_bias.clone(),
        )

    def _psi(self, z: Tensor, number: int) -> Tensor:
        normed = self.norms[number](z.reshape(len(z), -1)).reshape(z.shape)
        dropped: Tensor = self.dropout(torch.relu(normed))
        return dropped

    def _affine(self, norm: nn.Module) -> tuple[Tensor, Tensor]:
        """Scale and shift of each unit, `[S, M]` both."""
        assert isinstance(norm, nn.BatchNorm1d)
        assert norm.running_var is not None and norm.running_mean is not None, "it keeps running statistics"
        scale = norm.weight / torch.sqrt(norm.running_var + norm.eps)
        shift = norm.bias - scale * norm.running_mean
        return scale.reshape(-1, self._width), shift.reshape(-1, self._width)


def _weights(layers: int, num_in: int, num_out: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(layers, num_in, num_out) / max(1, num_in) ** 0.5)
