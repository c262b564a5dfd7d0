"""FreeToken, the nearest peer, measured by our measure: same checkpoint, slabs, prompts and recorded routing.

    python -m bench.freetoken_peer CHECKPOINT --residency 0.45 --routing routing.safetensors

Runs where `freetoken` 0.1.3 is installed and prints one JSON object on its last line. One process measures
one residency, because FreeToken wants a CUDA context of its own. `bench.against_freetoken` calls it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from bench.decode_case import SHORT_PROMPT, WARM_UP_TOKENS, make_prompt
from bench.routing import Experts, RecordedRouting
from bench.routing_replay import RecordedChoice

DEVICE = "cuda"
_ROOM = 256
"""Tokens that a sequence may have beyond what is asked for."""


@dataclass(frozen=True)
class PeerMeasured:
    """What one residency gave. `ttfts_ms`: medians by prompt length."""

    residency: float
    tok_s: float
    all_tok_s: tuple[float, ...]
    ttfts_ms: dict[int, float]
    hit_rate: float | None
    slots: int
    peak_vram_gib: float
    load_s: float


def replay_in_freetoken(experts: Experts, num_layers: int) -> None:
    """Let FreeToken's MoE layers, which run in order, take recorded experts with their routers' weights."""
    from freetoken.layers import moe

    stock, layers = moe.fused_topk, itertools.cycle(range(num_layers))
    choice = cache(partial(RecordedChoice, experts, device=torch.device(DEVICE), dtype=torch.int32))

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

    def counts(self) -> tuple[float, float]:
        """Experts that decode needed so far, and those that were missing."""
        if self.cache is None:
            return 0.0, 0.0
        stats = self.cache.decode_miss_stats()
        needed = stats["active_per_layer"] * stats["layer_calls"]
        return needed, needed * stats["miss_rate"]


def measure(options: argparse.Namespace) -> PeerMeasured:
    """Load, warm up, decode `runs` times, then take each prompt `runs` times."""
    began = time.perf_counter()
    num_layers = json.loads((options.checkpoint / "config.json").read_text())["num_hidden_layers"]
    longest = max(*options.prompts, SHORT_PROMPT) + options.tokens
    if options.routing is not None:
        geometry = json.loads((options.checkpoint / "config.json").read_text())
        routing = RecordedRouting.load(options.routing).laid_over(
            layers=num_layers, experts=geometry["num_experts"], top_k=geometry["num_experts_per_tok"]
        )
        replay_in_freetoken(routing, num_layers)
    peer = Peer(options.checkpoint, options.residency, longest=longest)
    load_s = time.perf_counter() - began
    short = make_prompt(SHORT_PROMPT)
    peer.seconds(short, WARM_UP_TOKENS)
    first = statistics.median(peer.seconds(short, 1) for _ in range(options.runs))
    before = peer.counts()
    speeds = [options.tokens / (peer.seconds(short, options.tokens + 1) - first) for _ in range(options.runs)]
    needed, missing = (after - start for after, start in zip(peer.counts(), before, strict=True))
    ttfts = {}
    for length in options.prompts:
        peer.seconds(make_prompt(length), 1)  # kernels of this length compile
        ttfts[length] = 1e3 * statistics.median(
            peer.seconds(make_prompt(length), 1) for _ in range(options.runs)
        )
    return PeerMeasured(
        residency=options.residency,
        tok_s=statistics.median(speeds),
        all_tok_s=tuple(speeds),
        ttfts_ms=ttfts,
        hit_rate=1 - missing / needed if needed else None,
        slots=peer.cache.cache_size if peer.cache is not None else 0,
        peak_vram_gib=torch.cuda.max_memory_allocated() / 2**30,
        load_s=load_s,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure one residency and print it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--residency", type=float, default=0.45, help="1: all experts resident")
    parser.add_argument("--routing", type=Path, help="what bench.routing_replay recorded; default: its own")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--prompts", type=int, nargs="+", default=[128, 1024])
    parser.add_argument("--runs", type=int, default=3)
    print(json.dumps(asdict(measure(parser.parse_args(arguments)))))


if __name__ == "__main__":
    main()
