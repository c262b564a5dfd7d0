"""What chosen decoder layers of a model put out, while somebody listens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hetero_runtime.errors import CheckpointError


class Heard:
    """Outputs of one pass."""

    def __init__(self) -> None:
        self._outputs: dict[int, torch.Tensor] = {}

    def put(self, place: int, output: torch.Tensor) -> None:
        """The output of the layer at `place` of those that are listened to."""
        self._outputs[place] = output

    def side_by_side(self) -> torch.Tensor:
        """`[rows, n, layers · hidden]`, layers in the order in which they were named."""
        return torch.cat([self._outputs[place] for place in sorted(self._outputs)], dim=-1)


class HiddenStates:
    """Listens to `layers` of `model`, numbered from 0, for as long as the model lives. A captured graph calls
    no module and is not heard. Raises CheckpointError for a model without such layers."""

    def __init__(self, model: Any, layers: Sequence[int]) -> None:
        decoder_layers = _decoder_layers(model)
        beyond = [layer for layer in layers if layer >= len(decoder_layers)]
        if beyond:
            raise CheckpointError(
                f"layer {beyond[0]} of the model is to be listened to, and it has {len(decoder_layers)}"
            )
        self._heard: Heard | None = None
        for place, layer in enumerate(layers):
            decoder_layers[layer].register_forward_hook(self._telling(place))

    @contextmanager
    def listening(self) -> Iterator[Heard]:
        """Around one pass of the model; what was heard is complete after it."""
        self._heard = heard = Heard()
        try:
            yield heard
        finally:
            self._heard = None

    def _telling(self, place: int) -> Any:
        def tell(_module: nn.Module, _arguments: tuple[Any, ...], output: Any) -> None:
            if self._heard is not None:
                self._heard.put(place, output[0] if isinstance(output, tuple) else output)

        return tell


def _decoder_layers(model: Any) -> nn.ModuleList:
    """The layers of the language model, in order."""
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    for module in model.modules():
        layers = getattr(module, "layers", None)
        if isinstance(layers, nn.ModuleList) and len(layers) == count:
            return layers
    raise CheckpointError(f"{type(model).__name__}: its {count} decoder layers are not found; not covered")
