"""The logits transforms of transformers, in the order in which its `generate` applies them."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from hetero_runtime.generation.base import LogitsTransform
    from hetero_runtime.generation.params import SamplingParams


def logits_transform(params: SamplingParams) -> LogitsTransform | None:
    """Build the chain of `params`: repetition penalty, temperature, top-k, top-p, min-p.

    Greedy requests keep only the repetition penalty: the others never change which token is first.
    Returns None when nothing is switched on. The chain has no state and never writes to its inputs.
    """
    from transformers.generation import logits_process as library

    chain = library.LogitsProcessorList()
    if params.repetition_penalty != 1:
        chain.append(library.RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if not params.is_greedy:
        if params.temperature != 1:
            chain.append(library.TemperatureLogitsWarper(params.temperature))
        if params.top_k:
            chain.append(library.TopKLogitsWarper(params.top_k))
        if params.top_p < 1:
            chain.append(library.TopPLogitsWarper(params.top_p))
        if params.min_p:
            chain.append(library.MinPLogitsWarper(params.min_p))
    return cast("LogitsTransform", chain) if chain else None
