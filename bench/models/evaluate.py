"""Held-out loss a kind, and how evenly the routers load the experts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen3MoeForCausalLM

from bench.models.streams import Stream
from hetero_scheduler.trace import load_entropies

_WINDOWS_AT_ONCE = 64


@dataclass(frozen=True)
class Report:
    """What the held-out split says about a model."""

    loss: dict[str, float]
    """Nats a token, by kind; every held-out token is predicted once, in windows of the training length."""
    tokens: dict[str, int]
    """Held-out tokens predicted, by kind."""
    load_entropy: list[float]
    """Entropy of the expert load over `log(experts)`, by layer: 1 when every expert is used alike."""
    worst_load: float
    """Largest load of an expert over the mean load, the worst over layers."""

    @property
    def mean_loss(self) -> float:
        """Mean over the kinds of the corpus, `chat` (the same documents recast) left out."""
        return float(np.mean([value for kind, value in self.loss.items() if kind != "chat"]))


@torch.no_grad()
def evaluate(model: Qwen3MoeForCausalLM, streams: Sequence[Stream], *, length: int) -> Report:
    """Run the whole held-out split through `model`, which is put into evaluation mode."""
    model.eval()
    config = model.config
    load = torch.zeros(config.num_hidden_layers, config.num_experts, dtype=torch.float64)
    losses: dict[str, float] = {}
    tokens: dict[str, int] = {}
    for kind in sorted({stream.kind for stream in streams}):
        held = [stream.tokens for stream in streams if stream.kind == kind and stream.is_held_out]
        if not held:
            continue
        total, count = 0.0, 0
        for windows in _windows(np.concatenate(held), length).split(_WINDOWS_AT_ONCE):
            loss, chosen = _score(model, windows.to(model.device))
            total += loss
            count += int((windows[:, 1:] >= 0).sum())
            load += chosen.cpu()
        losses[kind], tokens[kind] = total / count, count
    shares = load / load.sum(-1, keepdim=True)
    entropies = load_entropies(load.numpy()).tolist()
    return Report(losses, tokens, entropies, float(shares.max() * config.num_experts))


def _windows(tokens: np.ndarray, length: int) -> Tensor:
    """Windows `[count, length + 1]` that overlap by one token; the last one is filled up with -1."""
    count = max(1, math.ceil((len(tokens) - 1) / length))
    padded = np.full(count * length + 1, -1, dtype=np.int64)
    padded[: len(tokens)] = tokens
    return torch.from_numpy(padded).unfold(0, length + 1, length)


def _score(model: Qwen3MoeForCausalLM, windows: Tensor) -> tuple[float, Tensor]:
    """Summed cross-entropy of the windows, and how often each expert was chosen, `[layers, experts]`."""
    inputs = windows[:, :-1].clamp_min(0)
    outputs = model.model(input_ids=inputs, use_cache=False, output_router_logits=True)
    logits = model.lm_head(outputs.last_hidden_state).float().flatten(0, 1)
    loss = F.cross_entropy(logits, windows[:, 1:].flatten(), ignore_index=-1, reduction="sum")
    router = torch.stack(outputs.router_logits)  # [layers, tokens, experts]
    chosen = router.topk(model.config.num_experts_per_tok, dim=-1).indices
    counts = F.one_hot(chosen, router.shape[-1]).sum((1, 2)).double()
    return float(loss), counts
