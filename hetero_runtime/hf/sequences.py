"""A fixed number of rows through a transformers model: a prompt into one row, then one token for each.

    prefill(row, ids)   eager, one row
    step(tokens)        the first rows at once, device work alone: capture it once, replay it for every token
    advance(row)        what the host must know of a step; before it runs

`lengths` lives on the device and is counted up there. The host keeps its own count, so that neither ever asks
the other. Where a prompt goes on with fewer tokens from some layer on, that layer's cache and those behind it
are shorter by what was dropped, which never changes; positions go on as if nothing had been.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from transformers.cache_utils import Cache

from hetero_runtime.errors import RequestError
from hetero_runtime.hf.attention import install, latent_layers, why_not_capturable
from hetero_runtime.hf.forward import ForwardArguments
from hetero_runtime.hf.kv_cache import KvCache
from hetero_runtime.hf.visual import image_positions


class PromptCut(Protocol):
    """Somebody who lets tokens of prompts with images go, from a decoder layer on."""

    @property
    def first_layer(self) -> int:
        """The first decoder layer that sees fewer."""

    @property
    def kept(self) -> torch.Tensor | None:
        """In a pass, once it is cut: places of the tokens that went on."""

    def pass_of(self, ids: torch.Tensor, images: Mapping[str, torch.Tensor]) -> AbstractContextManager[None]:
        """Around the pass over the prompt `ids` `[T]` with `images`."""


class StaticSequences:
    """`rows` sequences of up to `max_length` tokens each. One for a model: it installs its attention there.

    `lengths` `[rows]` int64, on the device: tokens in each row. A row without a sequence (never filled, or
    `reset`) takes part in steps with a token of no meaning that is forgotten again; its logits mean nothing.
    So does a row that `active` (bool `[rows]`, on the device; all of them by default) leaves out of a step.
    `cut`: of prompts with images; None keeps all their tokens. Raises ValueError for a model that
    `why_not_capturable` names.
    """

    def __init__(
        self,
        model: Any,
        *,
        rows: int,
        max_length: int,
        active: torch.Tensor | None = None,
        cut: PromptCut | None = None,
    ) -> None:
        if reason := why_not_capturable(model.config):
            raise ValueError(f"{type(model).__name__} has no fixed cache: {reason}")
        self._model, self._max_length = model, max_length
        self._pass = install(model)
        self._takes = ForwardArguments.of(model)
        self.lengths = torch.zeros(rows, dtype=torch.long, device=model.device)
        self._growth = torch.zeros_like(self.lengths)  # tokens a step adds to a row: 0 or 1
        self._active = torch.ones_like(self.lengths, dtype=torch.bool) if active is None else active
        self._offsets = torch.zeros_like(self.lengths)  # of the positions of a prompt with images
        self._host_lengths: list[int | None] = [None] * rows
        self._cut, self._host_dropped = cut, [0] * rows
        self._dropped = torch.zeros_like(self.lengths)  # tokens that layers behind the cut do not have
        self._behind = torch.zeros_like(self.lengths)  # during a step: lengths less what was dropped
        if cut is not None:
            self._pass.first_behind = cut.first_layer
        text = model.config.get_text_config(decoder=True)
        kinds = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
        self._cache = KvCache(list(kinds), rows=rows, max_length=max_length, latent=latent_layers(model))
        self._step_views: dict[int, Cache] = {}

    @property
    def rows(self) -> int:
        """Rows of a step."""
        return len(self._host_lengths)

    @property
    def max_length(self) -> int:
        """Tokens that fit in a row."""
        return self._max_length

    @property
    def has_states(self) -> bool:
        """Whether some layer keeps a state of all tokens at once, which cannot forget one."""
        return self._cache.has_states

    def length(self, row: int) -> int:
        """Tokens in `row`, as the host counts them; 0 for a row without a sequence."""
        return self._host_lengths[row] or 0

    @torch.inference_mode()
    def prefill(
        self, row: int, ids: torch.Tensor, images: dict[str, torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Append `ids` `[n]` to `row` and return the logits of the last one, `[vocab]` float32.

        `images`: the model's own image inputs, only for an empty row. Raises RequestError over max_length.
        """
        start = self.length(row)
        self._go_on_or_raise(start + len(ids))
        assert images is None or start == 0, "images come with the beginning of a row"
        view = self._cache.row_view(row, partial(self._start_in, row))
        arguments: dict[str, Any] = dict(images or {})
        if images and self._takes.has_image_positions:
            arguments["position_ids"], self._offsets[row] = image_positions(self._model, ids, images)
        elif not images:
            positions = torch.arange(start, start + len(ids), device=ids.device)[None]
            arguments["position_ids"] = self._position_ids(positions, self._offsets[row])
        with self._cutting(row, ids, images):
            logits = self._forward(ids[None], view, arguments)[0]
        self._cache.keep_states(view, row)
        self._set_length(row, start + len(ids))
        return logits

    @torch.inference_mode()
    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Append one token to each of the first `len(tokens)` rows; logits `[len(tokens), vocab]` float32.

        Device work alone, on buffers that never move. The first prefill allocates them, so it comes first.
        """
        rows = len(tokens)
        lengths, active = self.lengths[:rows], self._active[:rows]
        self._pass.positions = lengths
        if self._cut is not None:
            self._pass.behind = torch.sub(lengths, self._dropped[:rows], out=self._behind[:rows])
        try:
            position_ids = self._position_ids(lengths[:, None], self._offsets[:rows, None])
            with self._cache.hold_inactive(active):
                logits = self._forward(tokens[:, None], self._step_view(rows), {"position_ids": position_ids})
        finally:
            self._pass.positions = self._pass.behind = None
        lengths.add_(self._growth[:rows] * active)
        return logits

    @torch.inference_mode()
    def check(self, row: int, tokens: torch.Tensor) -> torch.Tensor:
        """Read `tokens` `[n]` behind what `row` holds, all in one step; logits `[n, vocab]` float32.

        The row does not grow before `keep`. Device work alone, on buffers that never move; the first prefill
        allocates them. Layers of linear attention cannot (`has_states`).
        """
        positions = self.lengths[row] + torch.arange(len(tokens), device=tokens.device)
        self._pass.positions = positions
        try:
            position_ids = self._position_ids(positions[:, None], self._offsets[row])
            view = self._cache.check_view(row, positions)
            return self._forward(tokens[:, None], view, {"position_ids": position_ids})
        finally:
            self._pass.positions = None

    def keep(self, row: int, count: int) -> None:
        """The first `count` tokens of the last check belong to `row`. Raises RequestError over max_length."""
        self._go_on_or_raise(self.length(row) + count)
        self._set_length(row, self.length(row) + count)

    def advance(self, row: int, num_steps: int = 1) -> None:
        """Count steps that are about to run with `row` active. Raises RequestError, and counts none, when it
        has no room."""
        if num_steps:
            self._go_on_or_raise(self.length(row) + num_steps)
            self._host_lengths[row] = self.length(row) + num_steps

    def decode(self, tokens: torch.Tensor) -> torch.Tensor:
        """`advance` and `step` of all rows that hold a sequence, for callers that do not capture."""
        for length in self._host_lengths:
            self._go_on_or_raise((length or 0) + 1)
        for row, length in enumerate(self._host_lengths):
            if length is not None:
                self.advance(row)
        return self.step(tokens)

    def truncate(self, row: int, length: int) -> None:
        """Forget all but the first `length` tokens of `row`. Layers of linear attention cannot go back."""
        assert 0 < length <= self.length(row), f"row {row} holds {self.length(row)} tokens, not {length}"
        self._set_length(row, length)

    def reset(self, row: int) -> None:
        """Empty `row`; steps then pass it by."""
        self._host_lengths[row], self._host_dropped[row] = None, 0
        for tensor in (self.lengths, self._growth, self._offsets, self._dropped):
            tensor[row] = 0

    def close(self) -> None:
        """Free the KV cache; no pass may follow."""
        self._cache.close()
        self._step_views.clear()

    def _step_view(self, rows: int) -> Cache:
        if rows not in self._step_views:
            self._step_views[rows] = self._cache.step_view(rows, self._pass.positions_in)
        return self._step_views[rows]

    def _start_in(self, row: int, layer: int) -> int:
        """Tokens of `row` in the cache of decoder layer `layer`."""
        is_behind = self._cut is not None and layer >= self._cut.first_layer
        return self.length(row) - (self._host_dropped[row] if is_behind else 0)

    @contextmanager
    def _cutting(self, row: int, ids: torch.Tensor, images: dict[str, torch.Tensor] | None) -> Iterator[None]:
        """Around a pass over `ids`: layers behind the cut may see fewer of them."""
        if self._cut is None or not images:
            yield
            return
        with self._cut.pass_of(ids, images):
            yield
            kept = self._cut.kept
            self._host_dropped[row] = 0 if kept is None else len(ids) - len(kept)
        self._dropped[row] = self._host_dropped[row]

    def _set_length(self, row: int, length: int) -> None:
        self._host_lengths[row] = length
        self.lengths[row] = length
        self._growth[row] = 1

    def _position_ids(self, positions: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
        """`[rows, n]`; where images have positions, three equal sets of them (time, height, width)."""
        if not self._takes.has_image_positions:
            return positions
        return (positions + offset).expand(3, *positions.shape)

    def _forward(self, ids: torch.Tensor, cache: Any, arguments: dict[str, Any]) -> torch.Tensor:
        """Logits of the last token of each row, `[rows, vocab]` float32."""
        output = self._model(input_ids=ids, **self._takes.with_cache(cache), **arguments)
        logits: torch.Tensor = output.logits[:, -1].float()
        return logits

    def _go_on_or_raise(self, length: int) -> None:
        if length > self._max_length:
            raise RequestError(
                f"{length} tokens do not fit in a row of {self._max_length}; shorten the prompt or the "
                "answer, or raise execution.max_length"
            )
