"""FreeToken, the nearest peer, measured by our measure: same checkpoint, slabs, prompts and recorded routing.

    python -m bench.freetoken_peer CHECKPOINT --residency 0.45 --routing routing.safetensors

Runs where `freetoken` 0.1.3 is installed and prints its figures (`bench/figures.py`) on the last line.
`bench.against_freetoken` calls it.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import statistics
import time
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from bench.decode_case import SHORT_PROMPT, WARM_UP_TOKENS, case_parser, make_prompt, model_sizes
from bench.figures import Figures
from bench.routing import Experts, RecordedRouting
from bench.routing_replay import RecordedChoice

_ROOM = 256
"""Tokens that a sequence may have beyond what is asked for."""


def replay_in_freetoken(experts: Experts, num_layers: int, *, device: str = "cuda") -> None:
    """Let FreeToken's MoE layers, which run in order, take recorded experts with their routers' weights."""
    from freetoken.layers import moe

    stock, layers = moe.fused_topk, itertools.cycle(range(num_layers))
    choice = cache(partial(RecordedChoice, experts, device=torch.device(device), dtype=torch.int32))

    def recorded_topk(**named: Any) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids = stock(**named)
        return weights, choice().take(next(layers), len(ids))  # made now: FreeToken wants CUDA untouched

    moe.fused_topk = recorded_topk


class Peer:
    """FreeToken's offline engine over one checkpoint."""

    def __init__(self, checkpoint: Path, residency: float, *, longest: int) -> None:
        from freetoken.llm import LLM

        strategy: dict[str, Any] = {"moe_strategy": "fused"}
        if residency < 1:
            strategy = {"moe_strategy": "offload", "moe_cache_rate": residency, "moe_collect_stats": True}
        self.llm = LLM(
            str(checkpoint),
            dtype=torch.bfloat16,
            max_running_req=1,
            max_seq_len_override=longest + _ROOM,
            num_page_override=longest + 2 * _ROOM,
            cuda_graph_max_bs=1,
            attention_backend="triton",
            cache_type="naive",
            **strategy,
        )
        self.cache = self.llm.engine.moe_offload_cache

    def seconds(self, prompt: list[int], num_tokens: int) -> float:
        """What an answer of `num_tokens` takes."""
        from freetoken.core import SamplingParams

        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=num_tokens)
        torch.cuda.synchronize()
        began = time.perf_counter()
        (answer,) = self.llm.generate([prompt], params)
        torch.cuda.synchronize()
        assert len(answer["token_ids"]) >= num_tokens - 1, (
            f"{len(answer['token_ids'])} of {num_tokens} tokens"
        )
        return time.perf_counter() - began

    def ttft_ms(self, num_tokens: int, runs: int) -> float:
        """Median time to the first token after a prompt of that length."""
        prompt = make_prompt(num_tokens)
        self.seconds(prompt, 1)  # kernels of this length compile
        return 1e3 * statistics.median(self.seconds(prompt, 1) for _ in range(runs))

    def counts(self) -> tuple[float, float]:
        """Experts that decode needed so far, and those that were missing."""
        if self.cache is None:
            return 0.0, 0.0
        stats = self.cache.decode_miss_stats()
        needed = stats["active_per_layer"] * stats["layer_calls"]
        return needed, needed * stats["miss_rate"]


def measure(options: argparse.Namespace) -> Figures:
    """Load, warm up, decode `runs` times, then take each prompt `runs` times."""
    began = time.perf_counter()
    if options.routing is not None:
        sizes = model_sizes(options.checkpoint)
        replay_in_freetoken(RecordedRouting.load(options.routing).laid_over(**sizes), sizes["layers"])
    longest = max([SHORT_PROMPT, *options.prompts]) + options.tokens
    peer = Peer(options.checkpoint, options.residency, longest=longest)
    load_s = time.perf_counter() - began
    short = make_prompt(SHORT_PROMPT)
    peer.seconds(short, WARM_UP_TOKENS)
    first = statistics.median(peer.seconds(short, 1) for _ in range(options.runs))
    before = peer.counts()
    speeds = [options.tokens / (peer.seconds(short, options.tokens + 1) - first) for _ in range(options.runs)]
    needed, missing = (after - start for after, start in zip(peer.counts(), before, strict=True))
    return Figures(
        engine=f"FreeToken {importlib.metadata.version('freetoken')}",
        residency=options.residency,
        tok_s=statistics.median(speeds),
        all_tok_s=tuple(speeds),
        ttfts_ms={length: peer.ttft_ms(length, options.runs) for length in options.prompts},
        hit_rate=1 - missing / needed if needed else None,
        slots=peer.cache.cache_size if peer.cache is not None else 0,
        peak_vram_gib=torch.cuda.max_memory_allocated() / 2**30,
        load_s=load_s,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure one residency and print it as JSON."""
    measure(case_parser(__doc__).parse_args(arguments)).print()


if __name__ == "__main__":
    main()
