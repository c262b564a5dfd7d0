"""Mixture-of-Experts on the device, on weights where they lie: in slabs, as the checkpoint wrote them.

    layout     where an expert's weights lie in its record, and how they are written
    decode     a few tokens: limited by memory, two launches, fit for a CUDA graph
    prefill    many tokens: grouped by expert, in waves, limited by the tensor cores
    reference  plain torch: what both must give

An expert is addressed by its slab, so that where it lies is invisible to the computation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hetero_gpu.experts.layout import Bias, ExpertFormat, Gate, Matrix, Scales

if TYPE_CHECKING:
    import torch

    from hetero_gpu.experts.decode import DecodeExperts
    from hetero_gpu.experts.prefill import GroupedExperts

__all__ = ["Bias", "ExpertFormat", "ExpertKernels", "Gate", "Matrix", "Scales", "run_experts"]


class ExpertKernels:
    """The kernels of one expert format, with their buffers: shared by all layers of a model."""

    def __init__(
        self, form: ExpertFormat, top_k: int, *, max_tokens: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        from hetero_gpu.experts.decode import DecodeExperts
        from hetero_gpu.experts.prefill import GroupedExperts

        self.form = form
        self.decode: DecodeExperts = DecodeExperts(form, top_k, dtype=dtype, device=device)
        self.grouped: GroupedExperts = GroupedExperts(
            form, top_k, max_tokens=max_tokens, dtype=dtype, device=device
        )


def run_experts(
    hidden: torch.Tensor,
    slabs: torch.Tensor,
    *,
    experts: torch.Tensor,
    weights: torch.Tensor,
    slot_of_expert: torch.Tensor,
    kernels: ExpertKernels,
) -> torch.Tensor:
    """One layer whose experts are all in slabs: `[T, H]`, in the dtype of `hidden`.

    `hidden`: `[T, H]`. `slabs`: uint8 `[num_slabs, record_bytes]`. `experts`: integers `[T, K]`. `weights`:
    `[T, K]`, any float. `slot_of_expert`: int32 `[E]`, negative for an expert that is computed elsewhere.
    """
    import torch

    from hetero_gpu.experts.decode import MOST_TOKENS

    out = torch.empty_like(hidden)
    if hidden.shape[0] <= MOST_TOKENS:
        kernels.decode(hidden, slabs, slots=slot_of_expert[experts], weights=weights, out=out)
        return out
    num_experts = slot_of_expert.numel()
    kernels.grouped.begin(hidden, experts, weights, num_experts=num_experts)
    every_expert = torch.arange(num_experts, dtype=torch.int32, device=hidden.device)
    kernels.grouped.add(slabs, every_expert, slot_of_expert)
    kernels.grouped.finish(out)
    return out
