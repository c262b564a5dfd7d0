"""A look at how a model routes held-out text while it trains: loss, evenness, cache hits, what is foreseen.

What is looked at are the documents that `record` would listen to, from their beginnings and each by itself:
how often experts come again differs more between kinds of text than what steering is to hold. The forward
takes the device a moment; replaying the routing through a cache takes a CPU core a second or two,
in a thread beside the training that goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from transformers import Qwen3MoeForCausalLM

from bench.routing import RoutingFacts
from bench.traces.documents import Tokens, side_by_side
from bench.traces.forward import hidden_states
from bench.traces.terms import Companion, RouterTap
from hetero_scheduler.simulator.fast import replay_cache
from hetero_scheduler.simulator.scenario import Scenario, pool_ranges
from hetero_scheduler.simulator.use_scores import use_scores

LOOKED_AT = (0.25, 0.45)
"""Residencies of the LRU replays."""


class Look(NamedTuple):
    """What one look found. Shares from 0 to 1, hits in percent."""

    loss: float
    """Nats a token."""
    entropy: float
    persistence: float
    lru: tuple[float, ...]
    """Hits at each of LOOKED_AT, one pool for all layers."""
    foreseen: float | None
    """Share of a token's experts among the k + 3 that the companion expected most; None without one."""

    def __str__(self) -> str:
        hits = "/".join(f"{hit:.1f}" for hit in self.lru)
        text = f"held out {self.loss:.3f}  entropy {self.entropy:.3f}  LRU {hits} %"
        text += f"  again {100 * self.persistence:.0f} %"
        return text if self.foreseen is None else f"{text}  foreseen {100 * self.foreseen:.1f} %"


def lru_hits(topk: npt.NDArray[np.integer], num_experts: int, residency: float) -> float:
    """Hits in percent of an LRU cache over `topk` `[tokens, layers, top_k]`, a tenth of it uncounted."""
    needed = np.sort(topk, axis=-1).astype(np.int32)
    scenario = Scenario(residency=residency)
    slots = scenario.layer_slots(num_layers=needed.shape[1], num_experts=num_experts, top_k=needed.shape[2])
    scores = use_scores("lru", needed, num_experts=num_experts)
    replay = replay_cache(needed, scores, pool_ranges(slots, scenario.pool), num_experts=num_experts)
    return 100 * float(replay.is_hit[int(len(needed) * scenario.uncounted) :].mean())


class Watcher:
    """Looks at one model, through held-out documents of token ids."""

    def __init__(
        self,
        model: Qwen3MoeForCausalLM,
        tap: RouterTap,
        documents: Sequence[Tokens],
        companion: Companion | None = None,
    ) -> None:
        self._model, self._tap, self._companion = model, tap, companion
        rows, is_real = side_by_side(documents)
        self._rows, self._is_real = (torch.from_numpy(part).to(model.device) for part in (rows, is_real))
        self._beside = ThreadPoolExecutor(1)
        # the replay is compiled at its first use, which would hold up a training that is under way
        lru_hits(np.zeros((4, 2, 1), dtype=np.int16), 4, 0.5)

    @torch.no_grad()
    def look(self) -> Future[Look]:
        """Run the documents through the model now; the replay goes on beside, and then the future is done."""
        device, is_real = self._rows.device.type, self._is_real
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            logits = self._model.lm_head(hidden_states(self._model, self._rows))
        has_next = is_real[:, 1:]
        loss = F.cross_entropy(logits[:, :-1][has_next].float(), self._rows[:, 1:][has_next])
        routing = self._tap.take(len(self._rows))
        foreseen = None
        if self._companion is not None:
            foreseen = float(self._companion.recall(routing, is_real))
        topk = routing.chosen.permute(1, 2, 0, 3)[is_real].to(torch.int16).cpu().numpy()
        experts = routing.logits.shape[-1]
        return self._beside.submit(_judge, topk, experts, loss=float(loss), foreseen=foreseen)

    def close(self) -> None:
        """Wait for a replay under way."""
        self._beside.shutdown()


def _judge(topk: npt.NDArray[np.int16], num_experts: int, *, loss: float, foreseen: float | None) -> Look:
    facts = RoutingFacts.of(topk.astype(np.int64), num_experts)
    hits = tuple(lru_hits(topk, num_experts, residency) for residency in LOOKED_AT)
    return Look(loss, facts.load_entropy, facts.persistence, hits, foreseen)
