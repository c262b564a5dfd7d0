"""Record the routing of the bundled model on held-out text, and replay it in an engine.

`python -m bench.routing_replay --corpus DIR --out routing.safetensors`, DIR as in `bench/models/corpus.py`.
"""

from __future__ import annotations

import argparse
import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.models.corpus import SEPARATOR, is_held_out, read_sources
from bench.routing import Experts, RecordedRouting, RoutingFacts
from hetero_runtime.bundled import model_path
from hetero_runtime.hf.hooks import RunLayer

WINDOW = 512
"""Tokens that the bundled model was trained on at a time."""

WINDOWS_AT_ONCE = 8

DOCUMENT_TOKENS = 256
"""A longer document is cut, so that a stream of a thousand tokens sees several kinds of text."""


class RecordedChoice:
    """What one pass after another chose, layer by layer, from a recording that begins anew at its end.

    The place is kept on the device, so that a captured step moves on with every replay; a pass costs one
    small gather, in its first layer.
    """

    def __init__(
        self, recorded: npt.NDArray[Any], *, device: torch.device, dtype: torch.dtype = torch.long
    ) -> None:
        """`recorded`: experts `[tokens, layers, top_k]`, or anything else of a token and layer; kept on
        `device` as `dtype`."""
        self._recorded = torch.from_numpy(recorded).to(device, dtype)
        self._next = torch.zeros(1, dtype=torch.long, device=device)
        self._pass = self._recorded[:0]

    @property
    def position(self) -> int:
        """The next token of the recording; waits for the device."""
        return int(self._next)

    def seek(self, token: int) -> None:
        """The next pass begins with this token of the recording."""
        self._next.fill_(token)

    def upcoming(self) -> torch.Tensor:
        """The token of the recording that the next pass begins with, `[1]`, on the device."""
        return self._next % len(self._recorded)

    def begin(self, num_tokens: int) -> None:
        """A pass over the next `num_tokens` tokens begins."""
        tokens = self._next + torch.arange(num_tokens, device=self._next.device)
        self._pass = self._recorded[tokens % len(self._recorded)].transpose(0, 1).contiguous()
        self._next += num_tokens

    def of(self, layer: int) -> torch.Tensor:
        """What `layer` chose for the tokens of the pass, `[num_tokens, ...]`, contiguous and the caller's
        own."""
        return self._pass[layer]

    def take(self, layer: int, num_tokens: int) -> torch.Tensor:
        """The same, where the first layer's is asked for when a pass begins. Layers of a pass come in order,
        all with the same number of tokens."""
        if layer == 0:
            self.begin(num_tokens)
        return self.of(layer)


class Replay:
    """Stands before an orchestrator's `run_layer` and puts recorded experts in place of the router's, whose
    weights it leaves alone."""

    def __init__(self, run_layer: RunLayer, experts: Experts, device: torch.device) -> None:
        """`experts`: `[tokens, layers, top_k]`."""
        self._run_layer = run_layer
        self._choice = RecordedChoice(experts, device=device)

    @property
    def position(self) -> int:
        """The next token of the recording; waits for the device."""
        return self._choice.position

    def seek(self, token: int) -> None:
        """The next pass begins with this token of the recording."""
        self._choice.seek(token)

    def __call__(
        self, layer: int, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """See `Orchestrator.run_layer`."""
        recorded = self._choice.take(layer, len(hidden))
        assert recorded.shape == top_k_index.shape, f"{recorded.shape} replayed for {top_k_index.shape}"
        return self._run_layer(layer, hidden, recorded, top_k_weights)


def held_out_streams(corpus: Path, *, num_streams: int, seed: int = 0) -> list[list[str]]:
    """Held-out documents for `num_streams` streams that share none, each with all kinds in turn."""
    draw = random.Random(seed)
    by_kind: dict[str, list[str]] = {}
    for source in read_sources(corpus):
        by_kind.setdefault(source.kind, []).extend(filter(is_held_out, source.documents()))
    for documents in by_kind.values():
        draw.shuffle(documents)
    return [_in_turn([kind[i::num_streams] for kind in by_kind.values()]) for i in range(num_streams)]


def record(
    streams: Sequence[Sequence[str]], *, num_tokens: int, model_folder: Path, device: str
) -> RecordedRouting:
    """Teacher-forced routing of the first `num_tokens` tokens of each stream, in windows of 512.

    Raises ValueError when a stream is shorter.
    """
    tokenizer = AutoTokenizer.from_pretrained(model_folder, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(model_folder, local_files_only=True).eval().to(device)
    windows = [_windows(tokenizer, documents, num_tokens) for documents in streams]
    experts = np.stack([_chosen(model, each)[:num_tokens] for each in windows])
    source = f"held-out text, {len(streams)} streams of {num_tokens} tokens, teacher-forced"
    return RecordedRouting(experts, model.config.num_experts, source)


def _in_turn(kinds: list[list[str]]) -> list[str]:
    """One of each kind after another, as long as every kind has one."""
    return list(itertools.chain.from_iterable(zip(*kinds, strict=False)))


def _windows(tokenizer: Any, documents: Sequence[str], num_tokens: int) -> torch.Tensor:
    """Token windows `[count, WINDOW]`, the last one filled up by what follows, or by its own beginning."""
    ids: list[int] = []
    for document in documents:
        ids += tokenizer(document + SEPARATOR, truncation=True, max_length=DOCUMENT_TOKENS)["input_ids"]
        if len(ids) >= num_tokens:
            break
    else:
        raise ValueError(f"a stream of {len(documents)} documents has {len(ids)} tokens, not {num_tokens}")
    count = -(-num_tokens // WINDOW)
    return torch.tensor((ids * (1 + count * WINDOW // len(ids)))[: count * WINDOW]).view(count, WINDOW)


@torch.inference_mode()
def _chosen(model: Any, windows: torch.Tensor) -> Experts:
    """Experts that the routers choose, `[tokens, layers, top_k]`."""
    config, parts = model.config, []
    for batch in windows.split(WINDOWS_AT_ONCE):
        outputs = model.model(input_ids=batch.to(model.device), use_cache=False, output_router_logits=True)
        logits = torch.stack(outputs.router_logits, dim=1)  # [tokens, layers, experts]
        parts.append(logits.topk(config.num_experts_per_tok, dim=-1).indices.cpu())
    return torch.cat(parts).numpy()


def main(arguments: Sequence[str] | None = None) -> None:
    """Record, say what the routing is like, and save it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", type=Path, default=model_path(), help="default: the bundled one")
    parser.add_argument("--streams", type=int, default=4, help="4 make 16 layers of 128 experts")
    parser.add_argument("--tokens", type=int, default=1024, help="of each stream")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    streams = held_out_streams(options.corpus, num_streams=options.streams)
    routing = record(streams, num_tokens=options.tokens, model_folder=options.model, device=options.device)
    for i, stream in enumerate(routing.experts):
        print(f"stream {i}: {RoutingFacts.of(stream, routing.num_experts)}")
    routing.save(options.out)


if __name__ == "__main__":
    main()
