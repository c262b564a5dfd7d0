"""The bundled model on this machine's CPU: offloaded decode beside plain transformers, hit rates by policy.

`python -m bench.bundled_decode`. Text is sampled at temperature 0.8 (greedy text repeats itself and flatters
every cache). On device `cpu` a slab is ordinary memory, so this shows what the bookkeeping costs and what the
policies hit, not what a link would allow.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from bench.harness import RESULTS, ResultFile, Row
from hetero_runtime import Engine
from hetero_runtime.bundled import model_path
from hetero_runtime.generation import SamplingParams, make_sampler
from hetero_runtime.hf.forward import SequenceState
from hetero_runtime.hf.reference import load_reference
from hetero_runtime.hf.tokens import load_tokenizer
from hetero_scheduler import EVICTION_POLICIES

DEVICE = "cpu"

PROMPTS = ("Once upon a time", "The city of Paris", "def main():", "What is 12 plus 30?")
RESIDENCIES = {"25": 0.25, "45": 0.45, "all": 1.0}


class Decode(NamedTuple):
    """Median speed over the prompts, and the hit rate over all of them (1 without a cache)."""

    tok_s: float
    hit_rate: float


def measure_plain(num_tokens: int) -> float:
    """Tokens a second of transformers with all experts resident, its own eager loop, the same sampling."""
    path = model_path()
    model = load_reference(path, dtype="bfloat16", device=torch.device("cpu"))
    tokenizer, speeds = load_tokenizer(path), []
    for prompt in (PROMPTS[0], *PROMPTS):  # the first one warms up
        params = SamplingParams(max_tokens=num_tokens, temperature=0.8, seed=0)
        state, history = SequenceState(model), list(tokenizer(prompt)["input_ids"])
        logits = state.extend(torch.tensor(history))
        sampler = make_sampler(params, logits.shape[-1], "cpu")
        began = time.perf_counter()
        for _ in range(num_tokens):
            history.append(sampler.sample(logits, history))
            logits = state.extend(torch.tensor(history[-1:]))
        speeds.append(num_tokens / (time.perf_counter() - began))
    return statistics.median(speeds[1:])


def measure_engine(policy: str, residency: float, num_tokens: int) -> Decode:
    """The engine with that policy and share of experts resident."""
    with Engine.load(
        device="cpu",
        memory={"residency": residency},
        eviction={"policy": policy},
        execution={"max_length": 1024},
    ) as engine:
        engine.generate(PROMPTS[0], max_tokens=num_tokens)
        speeds = [
            engine.generate(
                prompt, max_tokens=num_tokens, temperature=0.8, seed=0, ignore_eos=True
            ).timings.tok_s
            for prompt in PROMPTS
        ]
        return Decode(statistics.median(speeds), engine.stats().decode.cache.hit_rate)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write `bundled_decode.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tokens", type=int, default=160, help="decoded for each prompt")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result file")
    options = parser.parse_args(arguments)
    plain = measure_plain(options.tokens)
    note = f"sampled at 0.8, {len(PROMPTS)} prompts of {options.tokens} tokens"
    rows = []
    for percent, residency in RESIDENCIES.items():
        for policy in EVICTION_POLICIES:
            decode = measure_engine(policy, residency, options.tokens)
            if policy == "lru":
                rows.append(
                    Row(
                        id=f"bundled.over_plain_{percent}",
                        value=decode.tok_s / plain,
                        unit="ratio",
                        reference=f"transformers, all resident, same run: {plain:.3g} tok/s",
                        note=f"{decode.tok_s:.3g} tok/s; {note}",
                    )
                )
            if residency < 1:
                hits = 100 * decode.hit_rate
                rows.append(Row(id=f"bundled.{policy}_hit_{percent}", value=hits, unit="%", note=note))
    ResultFile.write("bundled_decode", rows, folder=options.results)


if __name__ == "__main__":
    main()
