"""A Transformer that predicts routing: what is there to be learned, whatever it costs (SeqMoE Fig. 1c)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hetero_scheduler.predict.mamba2_block import Mamba2Sizes
from hetero_scheduler.predict.mamba2_model import GroupModel, GroupShape, State

_HEADS = 4


class TransformerProbe(GroupModel):
    """Same inputs and outputs as a group's model, causal attention over all steps so far in between.

    It has no recurrence: `step` and `rollout` are not for it, and a sequence has at most `longest` steps.
    """

    def __init__(self, shape: GroupShape, *, num_layers: int = 3, longest: int = 1024) -> None:
        """`shape.num_blocks` must be 0: the blocks are the Transformer's."""
        assert shape.num_blocks == 0, f"a probe has no Mamba2 blocks, not {shape.num_blocks}"
        super().__init__(shape)
        width = shape.sizes.d_model
        layer = nn.TransformerEncoderLayer(
            width, _HEADS, 4 * width, dropout=shape.dropout, batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)
        self.positions = nn.Parameter(0.02 * torch.randn(longest, width))

    @classmethod
    def of(cls, num_layers: int, num_experts: int, top_k: int, *, width: int) -> TransformerProbe:
        """A probe of hidden `width`, a multiple of 32, for a group of `num_layers` layers."""
        sizes = Mamba2Sizes(d_model=width, head_dim=32)
        return cls(GroupShape(num_layers, num_experts, top_k, 0, sizes, dropout=0.05))

    def forward(self, activations: Tensor, state: State) -> tuple[Tensor, State]:
        """`activations` `[batch, steps, n, E]`; logits of that shape, each for the step after."""
        steps = activations.shape[1]
        hidden = self.dropout(self.project(activations.flatten(-2))) + self.positions[:steps]
        mask = nn.Transformer.generate_square_subsequent_mask(steps, device=hidden.device, dtype=hidden.dtype)
        return self._logits(self.encoder(hidden, mask=mask, is_causal=True)), state
