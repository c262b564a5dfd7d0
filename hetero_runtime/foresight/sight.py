"""What the images of a prompt look like, in one vector: the visual summary of VisMMOE's Eq. 6.

At first it is of all image tokens; once some are dropped behind the pinned prefix, of those that go on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hetero_runtime.errors import ConfigError
from hetero_runtime.hf.embeddings import listen_to_embeddings
from hetero_runtime.hf.visual import Images, VisualPart, visual_part
from hetero_runtime.vision import Compressor


class Sight:
    """Of the prompt that runs. `kept`: places of the tokens that went on, None while all do."""

    def __init__(self, part: VisualPart, kept: Callable[[], torch.Tensor | None]) -> None:
        self._part, self._kept = part, kept
        self._is_image: torch.Tensor | None = None
        self._embeddings: torch.Tensor | None = None
        self._is_told = self._is_cut = False

    @contextmanager
    def during(self, ids: torch.Tensor, images: Images) -> Iterator[None]:
        """Around the pass over the prompt `ids` `[T]` with `images`."""
        self._is_image = torch.zeros_like(ids, dtype=torch.bool)
        for positions in self._part.positions(ids, images):
            self._is_image[positions] = True
        self._is_told = self._is_cut = False
        try:
            yield
        finally:
            self._is_image = self._embeddings = None

    def hear(self, embeddings: torch.Tensor) -> None:
        """As in `listen_to_embeddings`."""
        if self._is_image is not None:
            self._embeddings = embeddings.detach()

    def news(self) -> torch.Tensor | None:
        """The summary, float32 `[hidden_size]`, where it is another than last time; else None."""
        if self._embeddings is None or self._is_image is None or self._is_cut:
            return None
        kept = self._kept()
        if kept is None:
            is_news, self._is_told = not self._is_told, True
            return _mean(self._embeddings, self._is_image) if is_news else None
        self._is_cut = True
        return _mean(self._embeddings[kept], self._is_image[kept])


def make_sight(model: Any, compressor: Compressor | None) -> Sight:
    """For a model that sees. From now on its embeddings are listened to. Raises ConfigError for a model that
    reads text alone."""
    part = visual_part(model)
    if part is None:
        raise ConfigError(
            f"this lookahead predictor was taught with images, and {type(model).__name__} reads text alone; "
            "calibrate one with `hetero-runtime calibrate lookahead`"
        )
    sight = Sight(part, (lambda: None) if compressor is None else (lambda: compressor.kept))
    listen_to_embeddings(model, sight.hear)
    return sight


def _mean(embeddings: torch.Tensor, is_image: torch.Tensor) -> torch.Tensor:
    """Of the `embeddings` `[n, hidden_size]` that are an image's, `[hidden_size]`; zeros of nothing. Which
    they are, the host does not ask."""
    weights = is_image.float()
    return weights @ embeddings.float() / weights.sum().clamp_min(1)
