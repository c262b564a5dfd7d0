"""What LRU would have made of the same routing: the rival that foresight has to beat."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

MOST_STEPS = 4096
"""Steps remembered; of a longer history the end."""

Choice = npt.NDArray[np.int16]


class _Step(NamedTuple):
    choice: Choice
    """Experts of one token, ascending. `[num_layers, top_k]`"""
    is_decode: bool


class Rival:
    """Remembers who was chosen, prompts token by token, and replays it when asked.

    `pools`: the slots that each layer may use.
    """

    def __init__(self, pools: list[range], *, num_experts: int) -> None:
        self._pools, self._num_experts = pools, num_experts
        self._steps: deque[_Step] = deque(maxlen=MOST_STEPS)
        self._pass: list[Choice] = []

    def begin_pass(self) -> None:
        """What was heard of a pass that was given up is forgotten."""
        self._pass.clear()

    def hear(self, chosen: npt.NDArray[np.int64]) -> None:
        """The next layer of the pass chose `chosen` `[tokens, top_k]`."""
        self._pass.append(np.sort(chosen.astype(np.int16), axis=-1))
        if len(self._pass) == len(self._pools):
            least = min(map(len, self._pass))  # tokens that are dropped on the way are not the last ones
            steps = np.stack([chosen[-least:] for chosen in self._pass], axis=1)
            self._steps.extend(_Step(step, is_decode=len(steps) == 1) for step in steps)
            self._pass.clear()

    def hit_rate(self) -> float | None:
        """Share of the experts required in decode that LRU would have had; None where that means nothing:
        nothing was decoded, or a token's experts do not fit in the slots."""
        counted = np.array([step.is_decode for step in self._steps], dtype=np.bool_)
        if not counted.any() or min(map(len, self._pools)) < self._steps[0].choice.shape[1]:
            return None
        from hetero_scheduler.simulator.fast import replay_cache
        from hetero_scheduler.simulator.use_scores import use_scores

        needed = np.stack([step.choice for step in self._steps]).astype(np.int32)
        scores = use_scores("lru", needed, num_experts=self._num_experts)
        replay = replay_cache(needed, scores, self._pools, num_experts=self._num_experts)
        return float(replay.is_hit[counted].mean())
