"""Greedy text by transformers' own cache and attention, for whatever release is installed."""

from __future__ import annotations

from typing import Any

import torch


@torch.inference_mode()
def greedy_logits(
    model: Any, prompt: torch.Tensor, *, num_steps: int, images: dict[str, torch.Tensor] | None = None
) -> list[torch.Tensor]:
    """Logits `[vocab]` behind `prompt` `[n]` and behind each of `num_steps` greedy tokens."""
    output = model(input_ids=prompt[None], use_cache=True, **(images or {}))
    logits = [output.logits[0, -1]]
    name = "cache" if "cache" in output else "past_key_values"
    for _ in range(num_steps):
        output = model(input_ids=logits[-1].argmax()[None, None], use_cache=True, **{name: output[name]})
        logits.append(output.logits[0, -1])
    return logits


def tokens_of(logits: list[torch.Tensor]) -> list[int]:
    """The best token of each."""
    return [int(step.argmax()) for step in logits]
