"""Recorded routing: which experts each token of real text used, and how it is laid over a larger model.

Weights drawn at random route at random, and a cache that looks good on such routing says nothing. So the
benches replay what the bundled model's trained routers chose on held-out text:

    recorded   streams of text, each [tokens, layers, top_k]
    replayed   layer l:   experts of stream A in layer l mod L   |   E + experts of stream B in that layer
               layer l+L: the same of streams C and D, and so on

Two streams of a 64-expert, top-4 model make 128 experts, top-8. Streams are independent texts, so no expert
of one says anything about the other, just as two halves of one router would not repeat each other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors import safe_open
from safetensors.numpy import save_file

from hetero_scheduler.trace import count_uses, load_entropies

Experts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class RecordedRouting:
    """`experts`: `[streams, tokens, layers, top_k]`, of `num_experts` in every layer. `source`: what text."""

    experts: Experts
    num_experts: int
    source: str

    def save(self, path: Path) -> None:
        """Write a safetensors file, one byte a choice where that is enough."""
        narrow = self.experts.astype(np.uint8 if self.num_experts <= 256 else np.uint16)
        metadata = {"num_experts": str(self.num_experts), "source": self.source}
        save_file({"experts": narrow}, path, metadata=metadata)

    @classmethod
    def load(cls, path: Path) -> RecordedRouting:
        """Read what `save` wrote."""
        with safe_open(path, "numpy") as file:
            metadata = file.metadata()
            experts = file.get_tensor("experts").astype(np.int64)
        return cls(experts, int(metadata["num_experts"]), metadata["source"])

    def laid_over(self, *, layers: int, experts: int, top_k: int) -> Experts:
        """The routing of a model of that geometry, `[tokens, layers, top_k]`; see the module docstring.

        Raises ValueError when the geometry is no multiple of the recorded one, or more streams are needed.
        """
        num_streams, _, recorded_layers, recorded_k = self.experts.shape
        parts, rest = divmod(experts, self.num_experts)
        if rest or parts * recorded_k != top_k:
            raise ValueError(
                f"{experts} experts, top-{top_k}, are no multiple of the recorded {self.num_experts}, "
                f"top-{recorded_k}"
            )
        needed = parts * math.ceil(layers / recorded_layers)
        if needed > num_streams:
            raise ValueError(
                f"{layers} layers of {experts} experts take {needed} streams, {num_streams} are recorded"
            )
        offsets = self.num_experts * np.arange(parts)[:, None, None]  # [parts, 1, 1]
        replayed = []
        for layer in range(layers):
            block, recorded_layer = divmod(layer, recorded_layers)
            chosen = self.experts[block * parts : (block + 1) * parts, :, recorded_layer] + offsets
            replayed.append(np.concatenate(list(chosen), axis=-1))
        return np.stack(replayed, axis=1)


@dataclass(frozen=True)
class RoutingFacts:
    """What says whether a hit rate means something: shares from 0 to 1, means over layers."""

    load_entropy: float
    """Entropy of the expert load over log(experts): 1 when every expert is used alike."""
    least_load_entropy: float
    """The same, of the layer where it is least."""
    persistence: float
    """Share of a token's experts that the token before it used too."""
    by_chance: float
    """What persistence would be without any."""

    @classmethod
    def of(cls, experts: Experts, num_experts: int) -> RoutingFacts:
        """Facts of a routing `[tokens, layers, top_k]` of two or more tokens."""
        entropies = load_entropies(count_uses(experts, num_experts))
        again = (experts[1:, :, :, None] == experts[:-1, :, None, :]).any(-1)
        by_chance = experts.shape[-1] / num_experts
        return cls(float(entropies.mean()), float(entropies.min()), float(again.mean()), by_chance)

    def __str__(self) -> str:
        return (
            f"load entropy {self.load_entropy:.3f} (least of a layer {self.least_load_entropy:.3f}), same "
            f"expert again {100 * self.persistence:.0f} % (by chance {100 * self.by_chance:.0f} %)"
        )


def static_hit_rate(experts: Experts, num_experts: int, residency: float) -> float:
    """Hits of a cache that never changes and knew each layer's most used experts in advance.

    A cache policy that does not beat this has learnt nothing from the order of the tokens.
    """
    kept = int(residency * num_experts)
    load = np.sort(count_uses(experts, num_experts), axis=-1)[:, ::-1]
    return float(load[:, :kept].sum() / load.sum())
