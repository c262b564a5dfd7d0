"""Forwards of the same arithmetic as transformers', arranged for training speed.

Sorting tokens by expert is a permutation, so its gradient is a gather too. Autograd does not know:
it differentiates `x[index]` as a scatter that sorts the index again. `_Gather` is told the inverse.

    x [tokens]  --repeat k, permute-->  rows by expert  --two grouped products-->  rows
    out[token] = sum over k of rows[inverse[token, k]]
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts, Qwen3MoeRMSNorm
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import (
    Qwen3VLMoeTextExperts,
    Qwen3VLMoeTextRMSNorm,
)

Experts = Qwen3MoeExperts | Qwen3VLMoeTextExperts


def install_fast_forward(model: PreTrainedModel) -> None:
    """Replace the forward of every expert bank and norm of `model`, in place; weights stay as they are."""
    for module in model.modules():
        if isinstance(module, Experts):
            module.forward = MethodType(_experts_forward, module)  # type: ignore[method-assign]
        elif isinstance(module, Qwen3MoeRMSNorm | Qwen3VLMoeTextRMSNorm):
            module.forward = MethodType(_norm_forward, module)  # type: ignore[method-assign]


class _Gather(torch.autograd.Function):
    """`source[order // copies]`, with the gradient gathered back through `inverse`."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, order: Tensor, inverse: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.copies = copies
        return source[order // copies]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        (gradient,) = gradients
        return gradient[inverse].unflatten(0, (-1, ctx.copies)).sum(1), None, None, None


def _gather(source: Tensor, order: Tensor, inverse: Tensor, copies: int) -> Tensor:
    """`source[order // copies]`: copies of row `i` lie at `inverse[i * copies]` and after."""
    gathered: Tensor = _Gather.apply(source, order, inverse, copies)  # type: ignore[no-untyped-call]
    return gathered


def _experts_forward(bank: Experts, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum of the chosen experts: `hidden` `[tokens, hidden]`, the others `[tokens, top_k]`."""
    tokens, top_k = chosen.shape
    by_expert, order = chosen.flatten().to(torch.int16).sort(stable=True)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    boundaries = torch.arange(1, bank.num_experts + 1, device=order.device, dtype=torch.int16)
    offsets = torch.searchsorted(by_expert, boundaries, out_int32=True)
    rows = _gather(hidden.to(torch.bfloat16), order, inverse, top_k)
    row_weights = _gather(weights.flatten().to(torch.bfloat16), order, inverse, 1)
    gate, up = _grouped(rows, bank.gate_up_proj, offsets).chunk(2, dim=-1)
    inner = F.silu(gate) * up * row_weights[:, None]
    out = _gather(_grouped(inner, bank.down_proj, offsets), inverse, order, 1)
    mixed: Tensor = out.unflatten(0, (tokens, top_k)).sum(1)
    return mixed.to(hidden.dtype)


def _grouped(rows: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Rows of each expert times its matrix, transposed; rows are sorted by expert up to `offsets`."""
    product: Tensor = F.grouped_mm(rows, weight.to(torch.bfloat16).transpose(-2, -1), offs=offsets)
    return product


def _norm_forward(norm: Any, hidden: Tensor) -> Tensor:
    """Root-mean-square norm in one kernel instead of six."""
    weight: Tensor = norm.weight.to(hidden.dtype)
    return F.rms_norm(hidden, weight.shape, weight, norm.variance_epsilon)
