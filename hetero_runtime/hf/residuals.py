"""Residual sums together with the norms that follow them: two launches a layer less.

    stock   x ─► norm ─► attention ─► x + ─► norm ─► experts ─► + ─► next layer: norm ─► ...
    fused   x ─► norm ─► attention ─► sum, norm ───► experts ─► sum, norm of next layer, kept for it ─► ...

For decoder layers built as Llama's. Whether a layer is one is not read from its name: with probes in place of
attention and experts, its own forward and ours must give the same, and give attention the same arguments.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from hetero_gpu.norms import NormForm, Summed, add_rms_norm, rms_norm

_PARTS = ("input_layernorm", "post_attention_layernorm", "self_attn", "mlp")
_TOLERANCE = 2**-6
"""Relative to the largest value: two norms in half precision, one upon the other."""


class FusedNorm:
    """The forward of a norm module, and the norm of a sum."""

    is_small_op = True

    def __init__(self, module: Any, eps: float, form: NormForm) -> None:
        self._module, self._eps, self._form = module, eps, form
        self._prepared: Summed | None = None

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        prepared, self._prepared = self._prepared, None
        if prepared is not None and prepared.hidden is hidden_states:
            return prepared.normed
        return rms_norm(hidden_states, self._module.weight, eps=self._eps, form=self._form)

    def of_sum(self, hidden: torch.Tensor, other: torch.Tensor) -> Summed:
        """`hidden + other` and the norm of it."""
        return add_rms_norm(hidden, other, self._module.weight, eps=self._eps, form=self._form)

    def prepare(self, hidden: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """The sum alone; its norm is kept for the next call, which takes it if it is given this very tensor.
        Nobody may write into the sum before that."""
        self._prepared = self.of_sum(hidden, other)
        return self._prepared.hidden


def fuse_residuals(model: Any) -> int:
    """Fuse the layers of `model` whose norms are fused already; returns how many. Others stay as they are."""
    num_layers = 0
    for owner in model.modules():
        layers = getattr(owner, "layers", None)
        if not isinstance(layers, torch.nn.ModuleList) or not hasattr(owner, "norm"):
            continue
        following = [getattr(layer, "input_layernorm", None) for layer in layers[1:]]
        for layer, norm in zip(layers, [*following, owner.norm], strict=True):
            forward = _layer_forward(layer, norm)
            if forward is not None and _is_same(layer, forward, model.dtype):
                layer.forward = forward
                num_layers += 1
    return num_layers


def _layer_forward(layer: Any, next_norm: Any) -> Callable[..., Any] | None:
    """The fused forward; None for a layer of other parts."""
    if not all(hasattr(layer, part) for part in _PARTS):
        return None
    stock, first, second = type(layer).forward, layer.input_layernorm, layer.post_attention_layernorm
    norms = [getattr(norm, "forward", None) for norm in (first, second, next_norm)]
    fused = [norm for norm in norms if isinstance(norm, FusedNorm)]
    if len(fused) != len(norms):
        return None
    _, after_attention, after_experts = fused

    def forward(hidden_states: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        if arguments:
            return stock(layer, hidden_states, *arguments, **named)
        attended, _ = layer.self_attn(hidden_states=first(hidden_states), **named)
        hidden, normed = after_attention.of_sum(hidden_states, attended)
        output = layer.mlp(normed)
        if isinstance(output, tuple):  # logits of the router besides
            output = output[0]
        if hidden.shape[1] > 1:  # images are added to the sums of a prompt, between the layers
            return hidden + output
        return after_experts.prepare(hidden, output)

    forward.is_small_op = True  # type: ignore[attr-defined]
    return forward


def _is_same(layer: Any, forward: Callable[..., Any], dtype: torch.dtype) -> bool:
    """Whether `forward` agrees with the layer's own around any attention and experts: here, probes."""
    weight = layer.input_layernorm.weight
    accepted = inspect.signature(type(layer).forward).parameters.values()
    named = {p.name: object() for p in accepted if p.kind is p.POSITIONAL_OR_KEYWORD}
    named = {name: value for name, value in named.items() if name not in ("self", "hidden_states")}
    for gives_pair in (False, True):
        with _probes(layer, gives_pair=gives_pair) as seen:
            outputs = []
            for length in (1, 3):
                hidden = torch.randn(5, length, weight.shape[0], device=weight.device, dtype=dtype)
                try:
                    outputs += [(type(layer).forward(layer, hidden, **named), forward(hidden, **named))]
                except (TypeError, ValueError, AttributeError):  # its parts return or take something else
                    break
            are_same = len(seen) == 4 and all(arguments == seen[0] for arguments in seen)
            if are_same and len(outputs) == 2 and all(_is_close(ours, own) for own, ours in outputs):
                return True
    return False


@contextmanager
def _probes(layer: Any, *, gives_pair: bool) -> Iterator[list[dict[str, Any]]]:
    """Attention and experts replaced by functions that mix elements; yields the arguments of attention.

    `gives_pair`: whether experts return something besides.
    """
    seen: list[dict[str, Any]] = []

    def attention(hidden_states: torch.Tensor, **named: Any) -> tuple[torch.Tensor, None]:
        seen.append(named)
        return 3 * hidden_states.flip(-1), None

    def experts(hidden_states: torch.Tensor) -> Any:
        output = 2 * hidden_states.roll(1, -1)
        return (output, None) if gives_pair else output

    with ExitStack() as replaced:
        for module, probe in ((layer.self_attn, attention), (layer.mlp, experts)):
            own = module.__dict__.get("forward")
            module.forward = probe
            if own is None:
                replaced.callback(module.__dict__.pop, "forward")
            else:
                replaced.callback(setattr, module, "forward", own)
        yield seen


def _is_close(output: Any, expected: Any) -> bool:
    if not isinstance(expected, torch.Tensor) or (output.shape, output.dtype) != (
        expected.shape,
        expected.dtype,
    ):
        return False
    scale = expected.float().abs().max().clamp_min(1e-30)
    return bool(((output.float() - expected.float()).abs() / scale).max() <= _TOLERANCE)
