"""Small traces made for tests: scripted, random, and with the structure that real routing has."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hetero_scheduler.trace import Trace


def trace_of(topk: npt.ArrayLike, *, num_experts: int, num_documents: int = 1) -> Trace:
    """A trace that chose `topk` (`[tokens, layers, top_k]`); its logits are 4 there and 0 elsewhere."""
    chosen = np.asarray(topk, dtype=np.int16)
    logits = np.zeros((*chosen.shape[:2], num_experts), dtype=np.float16)
    np.put_along_axis(logits, chosen.astype(np.int64), np.float16(4), axis=-1)
    bounds = np.linspace(0, len(chosen), num_documents + 1).astype(np.int64)
    return Trace(logits, chosen, np.zeros(len(chosen), dtype=np.int32), bounds)


def random_trace(*shape: int, seed: int = 0) -> Trace:
    """`shape`: tokens, layers, experts, top_k; every choice alike."""
    num_tokens, num_layers, num_experts, top_k = shape
    order = np.random.default_rng(seed).random((num_tokens, num_layers, num_experts)).argsort(-1)
    return trace_of(order[..., :top_k], num_experts=num_experts, num_documents=3)


def structured_trace(*shape: int, seed: int = 0) -> Trace:
    """Some experts are preferred in each layer, and what a token used the next one tends to use again."""
    num_tokens, num_layers, num_experts, top_k = shape
    rng = np.random.default_rng(seed)
    taste = rng.normal(0, 1, (num_layers, num_experts))
    mood = np.zeros_like(taste)
    chosen = np.empty((num_tokens, num_layers, top_k), dtype=np.int64)
    for t in range(num_tokens):
        mood = 0.8 * mood + rng.normal(0, 1, taste.shape)
        chosen[t] = (taste + mood).argsort(-1)[:, -top_k:]
    return trace_of(chosen, num_experts=num_experts, num_documents=3)
