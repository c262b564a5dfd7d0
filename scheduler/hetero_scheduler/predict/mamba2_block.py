"""One Mamba2 mixer in plain torch: a chunked scan to train and to prefill, a recurrence to decode.

Each head carries a state `h` `[head_dim, N]` and forgets at a rate that the input sets:

    h_t = exp(dt_t · A) · h_{t-1} + dt_t · x_t ⊗ B_t        y_t = h_t · C_t + D · x_t

Unrolled over a chunk this is a masked product, `y = (C Bᵀ ∘ decay) (dt · x)`, plus what the state at the
chunk's start still contributes; so the scan runs as matrix products inside chunks and passes one state from
chunk to chunk (Dao and Gu 2024, "Transformers are SSMs"). Names, order and shapes of the parameters are those
of `mamba_ssm.Mamba2` with one group and its gated norm, so weights can be exchanged.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NORM_EPS = 1e-5
STEP_SIZE_RANGE = (1e-3, 0.1)
"""Range of dt at initialisation: how much of one input a head takes in."""
DECAY_RANGE = (1.0, 16.0)
"""Range of -A at initialisation."""


@dataclass(frozen=True)
class Mamba2Sizes:
    """Sizes of one mixer."""

    d_model: int = 128
    state_size: int = 64
    head_dim: int = 64
    expand: int = 2
    conv_kernel: int = 4
    chunk: int = 64

    def __post_init__(self) -> None:
        """Raise ValueError when the inner width does not divide into heads."""
        if self.inner % self.head_dim:
            raise ValueError(f"{self.expand} × {self.d_model} does not divide into heads of {self.head_dim}")

    @property
    def inner(self) -> int:
        """Width between the projections."""
        return self.expand * self.d_model

    @property
    def num_heads(self) -> int:
        """Heads, each with a state of its own."""
        return self.inner // self.head_dim

    @property
    def conv_channels(self) -> int:
        """Channels of x, B and C together: what the convolution sees."""
        return self.inner + 2 * self.state_size


class BlockState(NamedTuple):
    """What a mixer remembers. Never written in place: who keeps a state can return to it."""

    conv: Tensor  # [batch, conv_channels, conv_kernel - 1]
    ssm: Tensor  # [batch, num_heads, head_dim, state_size]


class GatedNorm(nn.Module):
    """RMS norm of `x · silu(z)`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """`x`, `gate` `[..., width]`."""
        return F.rms_norm(x * F.silu(gate), (x.shape[-1],), self.weight, NORM_EPS)


class Mamba2Block(nn.Module):
    """The mixer: `forward` for a sequence, `step` for one input; both give the state to go on from."""

    def __init__(self, sizes: Mamba2Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        channels = sizes.conv_channels
        self.in_proj = nn.Linear(sizes.d_model, sizes.inner + channels + sizes.num_heads, bias=False)
        self.conv1d = nn.Conv1d(channels, channels, sizes.conv_kernel, groups=channels)
        low, high = (math.log(bound) for bound in STEP_SIZE_RANGE)
        step = torch.exp(torch.rand(sizes.num_heads) * (high - low) + low)
        self.dt_bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))  # softplus gives `step` back
        self.A_log = nn.Parameter(torch.empty(sizes.num_heads).uniform_(*DECAY_RANGE).log())
        self.D = nn.Parameter(torch.ones(sizes.num_heads))
        self.norm = GatedNorm(sizes.inner)
        self.out_proj = nn.Linear(sizes.inner, sizes.d_model, bias=False)

    def initial_state(self, batch: int) -> BlockState:
        """The state before the first input."""
        sizes, weight = self.sizes, self.in_proj.weight
        return BlockState(
            weight.new_zeros(batch, sizes.conv_channels, sizes.conv_kernel - 1),
            weight.new_zeros(batch, sizes.num_heads, sizes.head_dim, sizes.state_size),
        )

    def forward(self, inputs: Tensor, state: BlockState) -> tuple[Tensor, BlockState]:
        """`inputs` `[batch, steps, d_model]`, one step or more; outputs of the same shape."""
        gate, mixed, dt = self._project(inputs)
        channels = torch.cat(
            [state.conv, mixed.transpose(1, 2)], dim=-1
        )  # [batch, channels, kernel - 1 + steps]
        x, b, c = self._split(F.silu(self.conv1d(channels)).transpose(1, 2))
        outputs, ssm = [], state.ssm
        for part in range(0, inputs.shape[1], self.sizes.chunk):
            span = slice(part, part + self.sizes.chunk)
            output, ssm = self._scan_chunk(x[:, span], dt[:, span], b[:, span], c[:, span], ssm)
            outputs.append(output)
        y = torch.cat(outputs, dim=1).flatten(2)
        kept = channels[..., channels.shape[-1] - self.sizes.conv_kernel + 1 :]
        return self.out_proj(self.norm(y, gate)), BlockState(kept, ssm)

    def step(self, inputs: Tensor, state: BlockState) -> tuple[Tensor, BlockState]:
        """`inputs` `[batch, d_model]`: the recurrence itself, one input."""
        gate, mixed, dt = self._project(inputs)
        window = torch.cat([state.conv, mixed[..., None]], dim=-1)  # [batch, channels, kernel]
        x, b, c = self._split(F.silu(self.conv1d(window)[..., 0]))
        decay = torch.exp(-dt * self.A_log.exp())[..., None, None]
        ssm = state.ssm * decay + (dt[..., None] * x)[..., None] * b[:, None, None]
        y = (ssm @ c[:, None, :, None])[..., 0] + self.D[:, None] * x  # [batch, heads, head_dim]
        return self.out_proj(self.norm(y.flatten(1), gate)), BlockState(window[..., 1:], ssm)

    def _project(self, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gate `[..., inner]`, what goes into the convolution `[..., channels]`, dt `[..., heads]`."""
        sizes = self.sizes
        gate, mixed, dt = self.in_proj(inputs).split([sizes.inner, sizes.conv_channels, sizes.num_heads], -1)
        return gate, mixed, F.softplus(dt + self.dt_bias)

    def _split(self, convolved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x `[..., heads, head_dim]`, B and C `[..., N]`."""
        sizes = self.sizes
        x, b, c = convolved.split([sizes.inner, sizes.state_size, sizes.state_size], dim=-1)
        return x.unflatten(-1, (sizes.num_heads, sizes.head_dim)), b, c

    def _scan_chunk(self, x: Tensor, dt: Tensor, b: Tensor, c: Tensor, ssm: Tensor) -> tuple[Tensor, Tensor]:
        """One chunk from its start state: outputs `[batch, chunk, heads, head_dim]` and its end state."""
        log_decay = torch.cumsum(-dt * self.A_log.exp(), dim=1).transpose(1, 2)  # [batch, heads, chunk]
        gap = log_decay[..., :, None] - log_decay[..., None, :]
        later = torch.ones(gap.shape[-2:], dtype=torch.bool, device=gap.device).triu(1)
        decay = gap.masked_fill(later, -torch.inf).exp()  # [batch, heads, to, from]
        taken = (x * dt[..., None]).transpose(1, 2)  # [batch, heads, chunk, head_dim]
        within = (decay * (c @ b.transpose(1, 2))[:, None]) @ taken
        before = log_decay.exp()[..., None] * (c[:, None] @ ssm.transpose(2, 3))
        to_end = (log_decay[..., -1:] - log_decay).exp()[..., None]
        ssm = ssm * log_decay[..., -1, None, None].exp() + (taken * to_end).transpose(2, 3) @ b[:, None]
        return (within + before).transpose(1, 2) + self.D[:, None] * x, ssm
