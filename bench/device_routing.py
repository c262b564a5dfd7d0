"""What a routing policy costs the captured step for one token and layer, in a graph: one launch, which
decides the layer and steers the next one.

256 experts, top-8, prefetch-steered. Decisions are compared with the host's first.

    python -m bench.device_routing
"""

from __future__ import annotations

import numpy as np
import torch

from bench.harness import ResultFile, Row, measure
from bench.routing_step import CAPACITY, LAYER, POLICY, SHAPE, Said, routers_say
from bench.routing_step import decide as decide_on_host
from hetero_gpu.routing import DeviceCaches, decide
from hetero_gpu.routing import Said as Heard
from hetero_scheduler.routing import LogicalCache, uncalibrated

DEVICE = "cuda"

MOST_US = 5
COMPARED = 64
STEPS = 64
"""In a graph, one after the other."""


def main() -> None:
    cache = LogicalCache(POLICY, SHAPE, capacity=CAPACITY, calibration=uncalibrated(SHAPE))
    said = routers_say(np.random.default_rng(0))
    device = _OnDevice(cache)
    expected = decide_on_host(cache, said)
    for t in range(COMPARED):
        experts = device.step(said, t)[0].tolist()
        assert experts == expected[t].tolist(), f"token {t}: {experts} != {expected[t].tolist()}"
    row = Row(
        id="psr.policy_us_device",
        value=device.microseconds(said),
        unit="us",
        target=f"<={MOST_US}",
        note=f"a layer, and what the next inserts; {SHAPE.num_experts} experts, top-{SHAPE.top_k}, one row",
    )
    ResultFile.write("device_routing", [row])


class _OnDevice:
    """One row, from the warm set on."""

    def __init__(self, cache: LogicalCache) -> None:
        device = torch.device(DEVICE)
        self._caches = DeviceCaches(cache, rows=1, vocab_size=1, device=device)
        self._caches.adopt(0, cache)
        self._tokens = torch.zeros(1, dtype=torch.long, device=device)
        self._active = torch.ones(1, dtype=torch.bool, device=device)

    def step(self, said: Said, t: int) -> torch.Tensor:
        """Token `t`: its experts `[1, top_k]`, after the layer before has guessed them."""
        heard = _heard(said, t)
        self._decide(LAYER - 1, heard)
        return self._decide(LAYER, heard._replace(guess=None))

    def microseconds(self, said: Said) -> float:
        """Of one launch: the median of several replays."""
        heard = _heard(said, 0)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(STEPS):
                self._decide(LAYER - 1, heard)
        replays = measure(graph.replay, num_runs=20, num_warmups=3, synchronize=torch.cuda.synchronize)
        return 1e6 * replays.median / STEPS

    def _decide(self, layer: int, heard: Heard) -> torch.Tensor:
        return decide(self._caches, layer, heard, tokens=self._tokens, active=self._active).experts


def _heard(said: Said, t: int) -> Heard:
    scores, guesses, own = (torch.from_numpy(part[t]).to(DEVICE) for part in said)
    return Heard(scores, own, guesses)


if __name__ == "__main__":
    main()
