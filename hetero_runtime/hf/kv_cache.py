"""Our KV cache behind transformers' cache classes: one buffer a layer, two ways to look at it.

    buffer [rows, kv_heads, max_length, size]
        row 0   k k k k k k . . . . .     RowLayer: one row during prefill; the host knows its length
        row 1   k k . . . . . . . . .     StepLayer: the first rows during a step; the device knows lengths
        row 2   . . . . . . . . . . .

Latent layers keep latent and rotary part side by side, [rows, 1, max_length, rank + rotary]. Layers of linear
attention keep transformers' own states, one set for all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionLayer

from hetero_gpu.attention import append_kv


class LayerBuffers:
    """Keys and values of one layer, allocated when the first ones come and never moved."""

    def __init__(self, rows: int, max_length: int, *, is_latent: bool) -> None:
        self._rows, self._max_length, self._is_latent = rows, max_length, is_latent
        self.keys: torch.Tensor | None = None
        self.values: torch.Tensor | None = None
        self.both: torch.Tensor | None = None

    @property
    def max_length(self) -> int:
        """Tokens that fit in a row."""
        return self._max_length

    def ensure(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The buffers `[rows, kv_heads, max_length, size]` for keys and values like these."""
        if self.keys is None or self.values is None:
            if self._is_latent:
                self.both = self._allocate(keys, keys.shape[-1] + values.shape[-1])
                self.keys, self.values = self.both.split([keys.shape[-1], values.shape[-1]], dim=-1)
            else:
                self.keys = self._allocate(keys, keys.shape[-1])
                self.values = self._allocate(values, values.shape[-1])
        return self.keys, self.values

    def _allocate(self, like: torch.Tensor, size: int) -> torch.Tensor:
        return like.new_zeros(self._rows, like.shape[1], self._max_length, size)


class _BufferLayer(CacheLayerMixin):
    """What transformers asks of a layer's cache, for both views."""

    is_compileable = True
    is_sliding = False

    def __init__(self, buffers: LayerBuffers) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._buffers = buffers

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self._buffers.ensure(key_states, value_states)

    def get_max_length(self) -> int:
        return self._buffers.max_length


class RowLayer(_BufferLayer):
    """Row `row`, which holds `start` tokens before this pass."""

    def __init__(self, buffers: LayerBuffers, row: int, start: int) -> None:
        super().__init__(buffers)
        self._row, self._start = row, start

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write `[1, kv_heads, n, size]` behind what the row holds; returns all of the row so far."""
        buffers = self._buffers.ensure(key_states, value_states)
        end = self._start + key_states.shape[2]
        for buffer, states in zip(buffers, (key_states, value_states), strict=True):
            buffer[self._row, :, self._start : end] = states[0]
        keys, values = (buffer[self._row : self._row + 1, :, :end] for buffer in buffers)
        return keys, values

    def get_seq_length(self) -> int:
        return self._start

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._start + query_length, 0


class StepLayer(_BufferLayer):
    """The first `len(positions)` rows, each with one new token at its place in `positions` `[rows]`.

    With `row` all of these tokens are that row's, and every row of the step is a view of it.
    """

    def __init__(self, buffers: LayerBuffers, positions: torch.Tensor, row: int | None = None) -> None:
        super().__init__(buffers)
        self.positions, self._row = positions, row

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write `[rows, kv_heads, 1, size]` at the positions; returns the rows' whole buffers, `attended`."""
        self._buffers.ensure(key_states, value_states)
        append_kv((key_states, value_states), self.buffers, self.positions)
        return self.attended

    @property
    def buffers(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the rows, once a prefill has allocated them."""
        keys, values = self._buffers.keys, self._buffers.values
        assert keys is not None and values is not None, "a step before any prefill"
        return self._rows_of(keys), self._rows_of(values)

    @property
    def attended(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What a step attends over: `buffers`, for latent layers (latent ‖ rotary, latent)."""
        keys, values = self.buffers
        both = self._buffers.both
        return (keys, values) if both is None else (self._rows_of(both), keys)

    def _rows_of(self, buffer: torch.Tensor) -> torch.Tensor:
        num_rows = len(self.positions)
        if self._row is None:
            return buffer[:num_rows]
        return buffer[self._row].expand(num_rows, -1, -1, -1)

    def get_seq_length(self) -> torch.Tensor:  # type: ignore[override]
        """`[rows]`, on the device. transformers asks only where it is given no positions."""
        return self.positions

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._buffers.max_length, 0


class KvCache:
    """The caches of all layers. `kinds`: transformers' layer type of each; `latent`: which are latent."""

    def __init__(self, kinds: list[str], *, rows: int, max_length: int, latent: frozenset[int]) -> None:
        self._layers: list[LayerBuffers | LinearStates] = [
            LinearStates(rows)
            if kind == "linear_attention"
            else LayerBuffers(rows, max_length, is_latent=layer in latent)
            for layer, kind in enumerate(kinds)
        ]

    def close(self) -> None:
        """Free all buffers."""
        self._layers.clear()

    def step_view(self, rows: int, positions_in: Callable[[int], torch.Tensor]) -> Cache:
        """For steps of the first `rows` rows. `positions_in`: of a layer, `[rows]`; the view stays valid, and
        follows them. Some row must have been filled before."""
        return Cache(
            layers=[
                layer.first_rows(rows)
                if isinstance(layer, LinearStates)
                else StepLayer(layer, positions_in(number))
                for number, layer in enumerate(self._layers)
            ]
        )

    def check_view(self, row: int, positions: torch.Tensor) -> Cache:
        """For one step over several tokens of `row`, at `positions` `[n]`. There must be no linear states."""
        layers: list[Any] = []
        for layer in self._layers:
            assert isinstance(layer, LayerBuffers), "states of linear attention go on token by token"
            layers.append(StepLayer(layer, positions, row))
        return Cache(layers=layers)

    @property
    def has_states(self) -> bool:
        """Whether some layer keeps a state of all tokens at once."""
        return any(isinstance(layer, LinearStates) for layer in self._layers)

    def row_view(self, row: int, start_in: Callable[[int], int]) -> Cache:
        """For one prefill pass of `row`; then `keep_states` of it. `start_in`: tokens that a layer has of it
        already."""
        return Cache(
            layers=[
                layer.one_row(row, is_empty=start_in(number) == 0)
                if isinstance(layer, LinearStates)
                else RowLayer(layer, row, start_in(number))
                for number, layer in enumerate(self._layers)
            ]
        )

    @contextmanager
    def hold_inactive(self, active: torch.Tensor) -> Iterator[None]:
        """Around a step of the first `len(active)` rows: states of linear attention stay as they are in rows
        that are not `active` (bool, on the device). Keys and values need nothing: what such a row writes lies
        beyond its end. A single row is always active in its own step."""
        if len(active) == 1:
            yield
            return
        states = [
            state[: len(active)]
            for layer in self._layers
            if isinstance(layer, LinearStates)
            for state in layer.tensors()
        ]
        before = [state.clone() for state in states]
        yield
        for state, old in zip(states, before, strict=True):
            state.copy_(torch.where(active.view(-1, *[1] * (state.dim() - 1)), state, old))

    def keep_states(self, view: Cache, row: int) -> None:
        """Take over the states that a prefill pass left in `view`, a view of `row`."""
        for layer, source in zip(self._layers, view.layers, strict=True):
            if isinstance(layer, LinearStates):
                layer.keep(source, row)


class LinearStates:
    """Convolution and recurrent states of one layer of linear attention, in transformers' own class.

    Those of all rows are allocated when the first row's are kept, and never moved.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._all_rows: Any = LinearAttentionLayer()

    def tensors(self) -> list[torch.Tensor]:
        """What is allocated so far, `[rows, ...]`."""
        if not self._all_rows.has_previous_state[0]:
            return []
        return [self._all_rows.conv_states[0], self._all_rows.recurrent_states[0]]

    def first_rows(self, num_rows: int) -> Any:
        """A layer over the first rows' own memory, for steps."""
        assert self.tensors(), "a step before any prefill"
        layer = copy(self._all_rows)
        layer.conv_states = {0: self._all_rows.conv_states[0][:num_rows]}
        layer.recurrent_states = {0: self._all_rows.recurrent_states[0][:num_rows]}
        return layer

    def one_row(self, row: int, *, is_empty: bool) -> Any:
        """The states of one row as a layer of its own; fresh where the row is empty."""
        layer = LinearAttentionLayer()
        if not is_empty:
            _copy_states(self._all_rows, layer, slice(row, row + 1), slice(None))
        return layer

    def keep(self, source: Any, row: int) -> None:
        """Take over what a prefill pass left in `source`, a layer that `one_row` gave."""
        if not self._all_rows.has_previous_state[0]:
            everywhere = torch.zeros(self._rows, dtype=torch.long, device=source.device)
            _copy_states(source, self._all_rows, everywhere, slice(None))
        _copy_states(source, self._all_rows, slice(None), slice(row, row + 1))


def _copy_states(source: Any, target: Any, taken: Any, put: Any) -> None:
    """`target[put] = source[taken]`, for both states; a target that has none gets room for what is taken."""
    conv, recurrent = source.conv_states[0][taken], source.recurrent_states[0][taken]
    if not target.has_previous_state[0]:
        target.lazy_initialization(conv_states=conv, recurrent_states=recurrent)
        target.has_previous_state[0] = True
    target.conv_states[0][put].copy_(conv)
    target.recurrent_states[0][put].copy_(recurrent)
