"""lm-eval's settings of a generation, as ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hetero_runtime.errors import RequestError
from hetero_runtime.generation import SamplingParams

DEFAULT_NEW = 256
"""Tokens generated where a task does not say how many."""
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")
_OURS = {"until", "max_gen_toks", "max_new_tokens", "do_sample", *_SAMPLING}


def sampling_params(settings: Mapping[str, Any]) -> SamplingParams:
    """Greedy unless `do_sample`, whatever temperature stands beside it.

    Raises RequestError for a setting that the engine does not know: an answer by other rules would be worth
    nothing.
    """
    unknown = sorted(set(settings) - _OURS)
    if unknown:
        raise RequestError(
            f"the task sets {', '.join(unknown)} for generation; the engine knows {', '.join(sorted(_OURS))}"
        )
    until = settings.get("until") or ()
    stop = (until,) if isinstance(until, str) else tuple(text for text in until if text)
    length = settings.get("max_gen_toks", settings.get("max_new_tokens", DEFAULT_NEW))
    if not settings.get("do_sample", False):
        return SamplingParams(max_tokens=int(length), stop=stop)
    sampling = {name: settings[name] for name in _SAMPLING if settings.get(name) is not None}
    return SamplingParams(max_tokens=int(length), stop=stop, **{"temperature": 1.0, **sampling})
