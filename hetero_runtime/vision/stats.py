"""What compression has done so far."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Self


@dataclass(frozen=True)
class CompressionStats:
    """Sums over prompts with images; all zero and empty where nothing is compressed."""

    prompts: int = 0
    visual_tokens: int = 0
    kept_tokens: int = 0
    """Of the visual ones, those that went on behind the pinned prefix."""
    seconds: float = 0.0
    """Saliency, choice and cut."""
    experts_before: tuple[int, ...] = ()
    """By MoE layer of the prefix: experts that the whole prompt activates."""
    experts_after: tuple[int, ...] = ()
    """By MoE layer, the prefix too: experts that the tokens which went on activate."""

    def __add__(self, other: Self) -> Self:
        return type(self)(
            self.prompts + other.prompts,
            self.visual_tokens + other.visual_tokens,
            self.kept_tokens + other.kept_tokens,
            self.seconds + other.seconds,
            _sums(self.experts_before, other.experts_before),
            _sums(self.experts_after, other.experts_after),
        )

    @property
    def compress_ms(self) -> float:
        """Milliseconds a prompt."""
        return 1e3 * self.seconds / max(self.prompts, 1)

    def to_json(self) -> dict[str, Any]:
        """Plain numbers, with `compress_ms`."""
        return asdict(self) | {"compress_ms": self.compress_ms}


def _sums(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    """Layer by layer; there are none before the first prompt."""
    if not one or not other:
        return one or other
    return tuple(a + b for a, b in zip(one, other, strict=True))
