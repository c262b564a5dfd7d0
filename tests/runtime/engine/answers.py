"""What plain transformers answers, and how an engine's answer is held against it.

On the CPU every logit of every step is equal in every bit: the engine runs transformers' own modules, and its
experts do the same operations on the same shapes in the same order. One thing must be alike for that: MKL
sums a product of a matrix and a vector in an order that depends on where the matrix begins in a cache line.
The engine's weights begin at one; transformers leaves its own in the mapped file, so `aligned` copies them.
On CUDA a library may choose another kernel for another address too, so logits are compared within
`CUDA_TOLERANCE`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import transformers

CUDA_TOLERANCE = 1e-5
"""Largest difference of logits on CUDA in float32, relative to the largest logit."""


class Answer(NamedTuple):
    """Greedy tokens and the logits that they were taken from, `[tokens, vocab]` float32 on the CPU."""

    token_ids: list[int]
    logits: torch.Tensor


def transformers_answer(
    model: transformers.PreTrainedModel, inputs: dict[str, torch.Tensor], *, num_tokens: int
) -> Answer:
    """`num_tokens` greedy tokens by transformers' own `generate`. `inputs`: with `input_ids` `[1, n]`."""
    output = model.generate(
        **{name: tensor.to(model.device) for name, tensor in inputs.items()},
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    prompt_length = inputs["input_ids"].shape[1]
    return Answer(output.sequences[0, prompt_length:].tolist(), torch.cat(output.logits).float().cpu())


def aligned(model: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    """`model` with its weights in memory of torch, each beginning at a cache line."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model


def assert_same_answer(
    token_ids: Sequence[int], logits: Sequence[torch.Tensor], expected: Answer, *, device: str
) -> None:
    """The same tokens, and logits `[vocab]` of every pass equal (see the module docstring)."""
    ours = torch.stack(list(logits)).cpu()
    assert ours.shape == expected.logits.shape, f"{ours.shape[0]} passes for {len(expected.token_ids)} tokens"
    assert list(token_ids) == expected.token_ids
    if device == "cpu":
        assert torch.equal(ours, expected.logits), f"off by {_error(ours, expected.logits):.1e}"
    else:
        assert _error(ours, expected.logits) <= CUDA_TOLERANCE


def _error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())
