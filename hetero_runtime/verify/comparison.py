"""What two runs of one model say, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch

from hetero_runtime.config.tree import Mode

Trace = dict[str, torch.Tensor]
"""Outputs of the decoder layers in one pass, by module name. Each `[tokens, hidden]`, on the host."""


class GreedyRun(NamedTuple):
    """One greedy text: its tokens and the logits that each was chosen from, `[vocab]` float32 on the host."""

    tokens: tuple[int, ...]
    logits: tuple[torch.Tensor, ...]


class LayerError(NamedTuple):
    """Where two runs part: the largest difference of one decoder layer's output."""

    layer: str
    max_error: float


@dataclass(frozen=True)
class Verification:
    """One residency against the reference.

    `max_logit_error` covers the steps up to the first token that differs (after it the texts are different
    texts). `first_difference` is the first decoder layer whose output differs at all; None when every bit is
    equal, or for captured steps, whose layers are not compared.
    """

    slabs: int
    residency: float
    num_tokens: int
    tokens_equal: bool
    max_logit_error: float
    max_logit: float
    hit_rate: float
    first_difference: LayerError | None
    tolerance: float = 0.0
    """How far logits may typically differ, relative to the largest; 0: tokens have to be equal."""
    typical_logit_error: float = 0.0
    """Median over the steps of their largest differences."""
    mode: Mode = "eager"
    """How the engine decoded."""

    @property
    def agrees(self) -> bool:
        """Whether the runs say the same, as far as they have to (see `tolerance`)."""
        if self.tolerance == 0:
            return self.tokens_equal
        return self.typical_logit_error <= self.tolerance * self.max_logit

    @property
    def is_bit_equal(self) -> bool:
        """Whether the logits agree in every bit."""
        return self.max_logit_error == 0.0

    def to_json(self) -> dict[str, Any]:
        """Plain numbers and names."""
        result = asdict(self) | {"is_bit_equal": self.is_bit_equal, "agrees": self.agrees}
        if self.first_difference is not None:
            result["first_difference"] = self.first_difference._asdict()
        return result


def logit_errors(ours: GreedyRun, theirs: GreedyRun) -> list[float]:
    """Largest absolute difference of each step, up to and including the first whose tokens differ."""
    errors = []
    for i, (a, b) in enumerate(zip(ours.logits, theirs.logits, strict=False)):
        errors.append(float((a - b).abs().max()))
        if ours.tokens[i] != theirs.tokens[i]:
            break
    return errors


def first_difference(ours: Sequence[Trace], theirs: Sequence[Trace]) -> LayerError | None:
    """The first decoder layer, in order of execution, that differs in any prompt's trace."""
    for a, b in zip(ours, theirs, strict=True):
        for name, output in b.items():
            error = float((a[name].float() - output.float()).abs().max())
            if error > 0:
                return LayerError(name, error)
    return None
