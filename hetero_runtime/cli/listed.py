"""Options that name several things, with commas between."""

from __future__ import annotations

import math


def words(text: str) -> tuple[str, ...]:
    """`lru, lfu` gives two words."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def numbers(text: str, option: str) -> tuple[float, ...]:
    """`0.25,0.5` gives two numbers. Raises ConfigError that names `option`."""
    from hetero_runtime.errors import ConfigError

    try:
        found = tuple(float(word) for word in words(text))
        if not all(math.isfinite(number) for number in found):
            raise ValueError("it is not finite")
    except ValueError as error:
        raise ConfigError(
            f"{option} {text!r} holds what is no number ({error}); write such as 0.25,0.5"
        ) from error
    return found


def whole_numbers(text: str, option: str) -> tuple[int, ...]:
    """`1,2` gives two. Raises ConfigError that names `option`."""
    from hetero_runtime.errors import ConfigError

    try:
        return tuple(int(word) for word in words(text))
    except ValueError as error:
        raise ConfigError(f"{option} {text!r} holds what is no whole number; write such as 1,2") from error
