"""How to choose the next token, and when to stop: the settings of one request."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any

from hetero_runtime.errors import RequestError

MIN_TEMPERATURE = 1e-3
"""Smallest temperature above 0: below it, dividing logits leaves the range of float32."""

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1


@dataclass(frozen=True)
class SamplingParams:
    """Sampling and stopping of one request, checked when it is built.

    The transforms are transformers' own, in its order: repetition penalty, temperature, top-k,
    top-p, min-p. Raises RequestError with the field, the value and what is allowed.
    """

    max_tokens: int = 256
    """Most tokens to generate, 1 or more; the end-of-sequence token counts."""
    temperature: float = 0.0
    """0 is greedy (argmax, lowest id on ties); otherwise 0.001 or more."""
    top_p: float = 1.0
    """Keep the smallest set of tokens with this much probability, in (0, 1]; 1 keeps all."""
    top_k: int = 0
    """Keep this many most likely tokens; 0 keeps all."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the most likely one, in [0, 1]."""
    repetition_penalty: float = 1.0
    """Divides (multiplies, when negative) the logits of tokens already seen; above 0, 1 is off."""
    seed: int | None = None
    """Same seed, same prompt, same text; None draws a fresh one. Any signed 64-bit integer."""
    stop: tuple[str, ...] = ()
    """Texts that end the generation; they are not part of the result."""
    ignore_eos: bool = False
    """Go on past the end-of-sequence token, for benchmarks."""

    def __post_init__(self) -> None:
        """Check every field; a list of stop strings becomes a tuple, integers become floats."""
        _check_int("max_tokens", self.max_tokens, 1, INT64_MAX, allowed="an integer of 1 or more")
        _check_int("top_k", self.top_k, 0, INT64_MAX, allowed="0 (all tokens) or a positive integer")
        if self.seed is not None:
            _check_int("seed", self.seed, INT64_MIN, INT64_MAX, allowed="a signed 64-bit integer or None")
        if not isinstance(self.ignore_eos, bool):
            raise _error("ignore_eos", self.ignore_eos, "True or False")
        for field, (is_allowed, allowed) in _FLOAT_RANGES.items():
            object.__setattr__(
                self, field, _as_float(field, getattr(self, field), is_allowed, allowed=allowed)
            )
        object.__setattr__(self, "stop", _stop_strings(self.stop))

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken instead of a random one."""
        return self.temperature == 0


_FLOAT_RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    "temperature": (
        lambda value: value == 0 or value >= MIN_TEMPERATURE,
        f"0 (greedy), or {MIN_TEMPERATURE} and more",
    ),
    "top_p": (lambda value: 0 < value <= 1, "above 0, at most 1 (off)"),
    "min_p": (lambda value: 0 <= value <= 1, "0 (off) to 1"),
    "repetition_penalty": (lambda value: value > 0, "above 0; 1 is off"),
}


def _as_float(field: str, value: object, is_allowed: Callable[[float], bool], *, allowed: str) -> float:
    """`value` as a finite float in range: transformers refuses the integer 1 as a temperature."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise _error(field, value, allowed)
    number = float(value)
    if not math.isfinite(number) or not is_allowed(number):
        raise _error(field, value, allowed)
    return number


def _check_int(field: str, value: object, low: int, high: int, *, allowed: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise _error(field, value, allowed)


def _stop_strings(stop: Any) -> tuple[str, ...]:
    """`stop` as a tuple; a lone string is refused, since it would be taken letter by letter."""
    if isinstance(stop, str):
        raise _error("stop", stop, f"a tuple of texts, here ({stop!r},)")
    if not isinstance(stop, list | tuple) or not all(isinstance(text, str) and text for text in stop):
        raise _error("stop", stop, "a tuple of texts, none of them empty")
    return tuple(stop)


def _error(field: str, value: object, allowed: str) -> RequestError:
    return RequestError(f"sampling parameter {field} is {value!r}; allowed: {allowed}")
