"""Ways through a transformers model: a sequence, prompt in, then token by token; or whole rows at once.

transformers renamed `past_key_values` to `cache` between the releases that we support, and vision-language
models keep a position offset on the model, where two sequences would overwrite each other's. Both end here.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, Protocol, Self

import torch

from hetero_runtime.hf.visual import image_positions


class ForwardArguments(NamedTuple):
    """What a model's forward takes, which differs between models and releases of transformers."""

    cache_name: str
    has_logits_to_keep: bool
    has_image_positions: bool

    @classmethod
    def of(cls, model: Any) -> Self:
        """Read from the signature of its class, and of the part to which it hands on all that is no image."""
        parts = [model, *([model.language] if hasattr(model, "language") else [])]
        accepted = {name for part in parts for name in inspect.signature(type(part).forward).parameters}
        return cls(
            cache_name="cache" if "cache" in accepted else "past_key_values",
            has_logits_to_keep="logits_to_keep" in accepted,
            has_image_positions="image_grid_thw" in accepted,
        )

    def with_cache(self, cache: Any, num_logits: int = 1) -> dict[str, Any]:
        """Keywords for a pass that goes on from `cache` and gives the logits of its last `num_logits` tokens
        alone."""
        kept = {"logits_to_keep": num_logits} if self.has_logits_to_keep else {}
        return {"use_cache": True, self.cache_name: cache, **kept}


class Sequence(Protocol):
    """One text inside the model: its KV cache and its positions."""

    def extend(self, ids: torch.Tensor, images: dict[str, torch.Tensor] | None = None) -> torch.Tensor:
        """Append `ids` `[n]` and return the logits of the last one, `[vocab]` float32.

        `images`: the model's own image inputs, only with the first call of a sequence.
        """


class Sequences(Protocol):
    """Where sequences come from."""

    def open(self) -> AbstractContextManager[Sequence]:
        """A new, empty sequence, until the context is left."""

    def close(self) -> None:
        """Free what all sequences share. One that is still held can only be left."""


class EagerSequences:
    """Each sequence with a cache of transformers' own, which grows."""

    def __init__(self, model: Any) -> None:
        self._model = model

    @contextmanager
    def open(self) -> Iterator[Sequence]:
        yield SequenceState(self._model)

    def close(self) -> None:
        """Nothing is shared."""


class SequenceState:
    """A sequence that transformers itself keeps. `length` counts the tokens in it."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._takes = ForwardArguments.of(model)
        self._kv: Any = None
        self._position_offset = 0
        self.length = 0

    def extend(self, ids: torch.Tensor, images: dict[str, torch.Tensor] | None = None) -> torch.Tensor:
        return self._run(ids, images, num_logits=1)[0]

    @torch.inference_mode()
    def _run(
        self, ids: torch.Tensor, images: dict[str, torch.Tensor] | None, *, num_logits: int
    ) -> torch.Tensor:
        """Append `ids`; the logits of the last `num_logits` of them, `[num_logits, vocab]` float32."""
        arguments = self._takes.with_cache(self._kv, num_logits)
        arguments |= images or {}
        if images and self._takes.has_image_positions:
            arguments["position_ids"], self._position_offset = image_positions(self._model, ids, images)
        elif self._takes.has_image_positions:
            arguments["position_ids"] = self._text_positions(ids)
        output = self._model(input_ids=ids[None], **arguments)
        self._kv = output["cache"] if "cache" in output else output["past_key_values"]
        self.length += len(ids)
        logits: torch.Tensor = output.logits[0, -num_logits:].float()
        return logits

    def _text_positions(self, ids: torch.Tensor) -> torch.Tensor:
        """Three equal rows (time, height, width). `[3, 1, n]`"""
        positions = torch.arange(self.length, self.length + len(ids), device=ids.device)
        return (positions + self._position_offset).expand(3, 1, -1)


@torch.inference_mode()
def forward_rows(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Logits after every token of several texts at once, nothing kept. `[rows, n]` to `[rows, n, vocab]`

    Every row begins with the first token of its text. A shorter one is filled up at its end with any ids: the
    model is causal, so what comes before never sees them.
    """
    arguments: dict[str, Any] = {"use_cache": False}
    if ForwardArguments.of(model).has_image_positions:
        arguments["position_ids"] = torch.arange(ids.shape[1], device=ids.device).expand(3, len(ids), -1)
    logits: torch.Tensor = model(input_ids=ids, **arguments).logits
    return logits
