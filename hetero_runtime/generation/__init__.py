"""Generation: how the next token is chosen, when a text ends, and how it comes out.

    messages --render_messages--> prompt ids --check_prompt--> Request
    logits   --Sampler----------> token id   --TextStream----> Delta ... Delta -> Completion

Importing this face is light; torch is imported by `make_sampler`, pictures by `collect_images`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hetero_runtime.generation.async_bridge import iterate_in_thread
from hetero_runtime.generation.base import FinishReason, Message, Tokenizer
from hetero_runtime.generation.chat import render_messages
from hetero_runtime.generation.images import collect_images
from hetero_runtime.generation.params import SamplingParams
from hetero_runtime.generation.request import (
    CancelToken,
    Completion,
    Delta,
    Request,
    Timings,
    check_prompt,
)
from hetero_runtime.generation.text_stream import TextStream

if TYPE_CHECKING:
    import torch

    from hetero_runtime.generation.sampling import Sampler

__all__ = [
    "CancelToken",
    "Completion",
    "Delta",
    "FinishReason",
    "Message",
    "Request",
    "SamplingParams",
    "TextStream",
    "Timings",
    "Tokenizer",
    "check_prompt",
    "collect_images",
    "iterate_in_thread",
    "make_sampler",
    "render_messages",
]


def make_sampler(params: SamplingParams, vocab_size: int, device: torch.device | str) -> Sampler:
    """The sampler of one request, for logits [vocab_size] on `device`."""
    from hetero_runtime.generation.sampling import Sampler

    return Sampler(params, vocab_size, device)
