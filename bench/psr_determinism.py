"""How many different answers prefetch-steered routing gives to one prompt: it must be one.

The bundled model on the CPU, 20 runs. What a run may not depend on differs: slabs, in one pool or one a
layer, who is evicted, copies in flight, and whether others are served meanwhile. An answer is its sampled
tokens and the copies that its logical cache asks for. (Links that hesitate: tests/runtime/engine.)

    python -m bench.psr_determinism
"""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from bench.harness import ResultFile, Row
from hetero_runtime import Engine

DEVICE = "cpu"

NUM_RUNS, CAPACITY, NUM_TOKENS = 20, 16, 64
PROMPT, OTHER = "Once upon a time there was a small house", "What is 12 plus 30?"
MEMORY: tuple[dict[str, Any], ...] = (
    {"residency": 0.25, "pool": "per_layer"},
    {"slabs": 40, "pool": "global"},
    {"residency": 0.6, "pool": "global"},
    {"slabs": "all"},
)
IN_FLIGHT = (1, 2, 4)
EVICTION = ("logical", "lru")

Answer = tuple[tuple[int, ...], int, int, int]
"""Tokens; experts inserted, demanded and deviating, if nobody else was served."""


def main() -> None:
    settings = itertools.cycle(itertools.product(IN_FLIGHT, EVICTION, MEMORY))
    runs = [
        answer(memory, in_flight=in_flight, eviction=eviction, is_alone=number % 2 == 0)
        for number, (in_flight, eviction, memory) in zip(range(NUM_RUNS), settings, strict=False)
    ]
    texts, counts = {run[0] for run in runs}, {run[1:] for run in runs[::2]}
    rows = [
        Row(
            id="psr.distinct_outputs",
            value=len(texts),
            unit="answers",
            target="==1",
            note=f"{NUM_RUNS} runs of {NUM_TOKENS} tokens sampled at temperature 0.8, capacity {CAPACITY}",
        ),
        Row(
            id="psr.distinct_copy_counts",
            value=len(counts),
            unit="counts",
            target="==1",
            note="logical insertions, demands and deviations of the runs that served nobody else",
        ),
    ]
    ResultFile.write("psr_determinism", rows)


def answer(memory: dict[str, Any], *, in_flight: int, eviction: str, is_alone: bool) -> Answer:
    """One run; unless `is_alone`, a second request takes turns with it."""
    with (
        Engine.load(
            device="cpu",
            preset="psr",
            memory=memory,
            routing={"capacity": CAPACITY},
            prefetch={"in_flight": in_flight},
            eviction={"policy": eviction},
            execution={"max_rows": 2, "max_length": 256},
        ) as engine,
        ThreadPoolExecutor(1) as pool,
    ):
        other = None if is_alone else pool.submit(engine.generate, OTHER, max_tokens=NUM_TOKENS, seed=1)
        said = engine.generate(PROMPT, max_tokens=NUM_TOKENS, temperature=0.8, seed=7, ignore_eos=True)
        if other is not None:
            other.result()
        stats = engine.stats()
    routed = stats.prefill.routing + stats.decode.routing
    return said.token_ids, routed.inserted, routed.demanded, routed.deviating


if __name__ == "__main__":
    main()
