"""Texts that a model says greedily: what a drafter for it has to foresee.

Prompts are windows of documents, and spans of them said over and over: text that repeats itself is where
drafts are worth most.

    document    The king had three daughters. The ─► youngest of them was ...
    span        sat on the mat. The dog sat on the mat. The dog sat on ─► the mat. The dog ...
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from bench.models.mixture import Sampler
from hetero_runtime.hf.forward import ForwardArguments

SPANS = (4, 32)
"""Tokens of a span that is repeated, at least and below."""
REPEATED = 0.4
"""Share of prompts that are repeated spans."""


def draw_prompts(sampler: Sampler, count: int, length: int) -> Tensor:
    """Prompts `[count, length]` on the sampler's device; `length` at most that of its windows."""
    windows = sampler.draw(count)[:, :length]
    return repeat_spans(windows, round(REPEATED * count))


def repeat_spans(windows: Tensor, count: int) -> Tensor:
    """`windows` `[rows, length]`, of the first `count` only a span of each, repeated."""
    steps = torch.arange(windows.shape[1], device=windows.device)
    spans = torch.randint(*SPANS, (len(windows), 1), device=windows.device)
    repeated = windows.gather(1, steps % spans)
    is_repeated = torch.arange(len(windows), device=windows.device)[:, None] < count
    return torch.where(is_repeated, repeated, windows)


@torch.no_grad()
def continue_greedily(model: Any, prompts: Tensor, length: int) -> Tensor:
    """`prompts` `[rows, n]` and what `model` says after them, `[rows, length]`, ends of text or not."""
    takes = ForwardArguments.of(model)
    cache = DynamicCache(config=model.config)
    said, tokens = [prompts], prompts
    for _ in range(length - prompts.shape[1]):
        logits = model(input_ids=tokens, **takes.with_cache(cache)).logits
        tokens = logits[:, -1:].argmax(-1)
        said.append(tokens)
    return torch.cat(said, dim=1)
