"""The routing policy at work in one engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from hetero_runtime.hf.router_choice import RouterScores
from hetero_runtime.routing.eviction import LogicalEviction
from hetero_scheduler import ExpertKey
from hetero_scheduler.counters import Counters
from hetero_scheduler.routing import Calibration, Decisions, LogicalCache, RoutingPolicy, Shape


class TextPart(NamedTuple):
    """Tokens of one text that a pass appends. `cache`: the text's own; `tokens` int64 `[n]`: input tokens."""

    cache: LogicalCache
    tokens: npt.NDArray[np.int64]


@dataclass(frozen=True)
class RoutingStats(Counters):
    """Experts, counted over tokens and layers, as the logical caches have them: the same on every machine."""

    inserted: int = 0
    """Brought into a logical cache by the pre-gate."""
    demanded: int = 0
    """Executed and not in it. With `inserted`: the copies of an engine that mirrors it."""
    deviating: int = 0
    """Executed in place of the router's own choice."""

    def per_token(self, num_tokens: int) -> dict[str, float]:
        """Means for a report: logical copies, those on demand, deviations from exact routing."""
        tokens = max(num_tokens, 1)
        return {
            "copies_per_token": (self.inserted + self.demanded) / tokens,
            "demand_copies_per_token": self.demanded / tokens,
            "deviations_per_token": self.deviating / tokens,
        }


class CountsRouting(Protocol):
    """What adds up a routing's decisions."""

    def stats(self) -> RoutingStats:
        """What the host has decided since the engine was loaded."""

    def device_stats(self) -> RoutingStats:
        """What was decided where only the device counts; zeros if the host decides everything."""


class Routing:
    """One pass at a time:

        pass_of(parts)    whose tokens they are
        choose            of each MoE layer, by its router (`hf.router_choice.let_choose`)
        steer             of the layer to come, for a single token: what it inserts can be fetched meanwhile

    A pass of several tokens waits for each layer's scores of all of them and then decides them in order;
    a layer's logical cache depends on its own past alone, so that is what token by token gives.
    """

    def __init__(
        self, policy: RoutingPolicy, shape: Shape, *, capacity: int, calibration: Calibration
    ) -> None:
        self.policy, self.shape = policy, shape
        self._capacity, self._calibration = capacity, calibration
        self.eviction = LogicalEviction(shape.num_layers, shape.num_experts)
        self._parts: Sequence[TextPart] = ()
        self._followed: list[LogicalCache] = []
        self._guess: npt.NDArray[np.float32] | None = None
        self._stats = RoutingStats()
        self.on_device: Callable[[], RoutingStats] | None = None
        """How a captured step is asked what it has counted."""

    # ---- texts

    def new_cache(self) -> LogicalCache:
        """The logical cache of a text that has not begun. Any thread."""
        return LogicalCache(self.policy, self.shape, capacity=self._capacity, calibration=self._calibration)

    @contextmanager
    def pass_of(self, parts: Sequence[TextPart]) -> Iterator[None]:
        """Around a pass over `parts`, one a row; rows are as long as the longest part, and what fills up the
        others at their end is routed as the router says. The caller has the turn."""
        caches = [part.cache for part in parts]
        self._parts, self._guess = parts, None
        if caches != self._followed:
            self._followed = caches
            for layer in range(self.shape.num_layers):
                self._follow(layer)
        try:
            yield
        finally:
            self._parts, self._guess = (), None

    @property
    def single(self) -> TextPart | None:
        """The part of a pass that has one alone, otherwise None."""
        return self._parts[0] if len(self._parts) == 1 else None

    # ---- one layer

    def choose(self, layer: int, said: RouterScores, guess: torch.Tensor | None) -> torch.Tensor:
        """A `hf.router_choice.Chooser`. The pass decides in the order of its layers."""
        assert self._parts, "the router was asked in a pass that names no text"
        scores, own, guessed = on_host(said, guess)
        width = len(scores) // len(self._parts)
        experts = own[:, 0].copy()
        for row, part in enumerate(self._parts):
            rows = slice(row * width, row * width + len(part.tokens))
            guesses = None if self._guess is None else self._guess[rows, None]
            decided = part.cache.select(
                scores[rows], own[rows], part.tokens, first_layer=layer, guesses=guesses
            )
            experts[rows] = decided.experts[:, 0]
            self._stats += _count(decided)
        self._guess = guessed
        self._follow(layer)
        return torch.from_numpy(experts).to(said.own.device)

    def steer(self, layer: int) -> list[ExpertKey]:
        """Part 1 of Algorithm 1 for `layer`, the next one, now: what it inserts.

        Of a pass over one token; otherwise, and where nobody looks ahead, nothing happens until `choose`.
        """
        if self._guess is None or self.single is None or len(self.single.tokens) > 1:
            return []
        cache, (token,) = self.single
        inserted = cache.steer(layer, self._guess[0], int(token))
        self._guess = None
        self._follow(layer)
        return [ExpertKey(layer, expert) for expert in inserted.tolist()]

    def is_resident(self, key: ExpertKey) -> bool:
        """Whether a logical cache of the pass holds `key`."""
        return any(bool(part.cache.is_resident()[key]) for part in self._parts)

    def stats(self) -> RoutingStats:
        """What the host has decided since the engine was loaded."""
        return self._stats

    def device_stats(self) -> RoutingStats:
        """What a captured step has decided."""
        return RoutingStats() if self.on_device is None else self.on_device()

    def _follow(self, layer: int) -> None:
        self.eviction.follow(layer, self._followed)


def on_host(
    said: RouterScores, guess: torch.Tensor | None
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64], npt.NDArray[np.float32] | None]:
    """Scores `[T, 1, E]`, own choice `[T, 1, top_k]` and guess `[T, E]`, by one copy: each would be a wait.
    Expert numbers are exact in float32."""
    num_tokens, num_experts = said.scores.shape
    parts = (said.scores, said.own) if guess is None else (said.scores, said.own, guess)
    heard = torch.cat([part.float() for part in parts], dim=1).detach().cpu().numpy()
    end = num_experts + said.own.shape[1]
    scores = np.ascontiguousarray(heard[:, :num_experts]).reshape(num_tokens, 1, num_experts)
    own = heard[:, num_experts:end].astype(np.int64).reshape(num_tokens, 1, -1)
    return scores, own, None if guess is None else np.ascontiguousarray(heard[:, end:])


def _count(decided: Decisions) -> RoutingStats:
    return RoutingStats(
        int(decided.inserted.sum()), int(decided.demanded.sum()), int(decided.deviating.sum())
    )
