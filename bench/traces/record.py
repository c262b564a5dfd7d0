"""Traces of a narrow MoE in a minute: batches of documents, every router listened to.

    python -m bench.traces.record --model DIR --tokens DIR --out DIR

    learning.safetensors   training text, teacher-forced: what predictors learn from
    heldout.safetensors    held-out text of every kind, teacher-forced
    sampled.safetensors    held-out beginnings, continued at temperature 0.8, then listened to in one prefill

Other than `hetero-runtime trace`, which goes through the offloaded engine one document at a time, this one
holds the whole model on the device. The files are the same, and hold what routers say one layer early; that
takes as much again as their logits. Attention and routers compute in float32, the grouped products of experts
in bfloat16: router logits in bfloat16 would tie too often.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeForCausalLM

from bench.models.fast_forward import install_fast_forward
from bench.models.streams import Stream, load_streams
from bench.traces.documents import PAD, Tokens, choose_documents, side_by_side
from bench.traces.early import asked_early
from bench.traces.forward import hidden_states
from bench.traces.look import LOOKED_AT, lru_hits
from bench.traces.terms import RouterTap
from hetero_runtime import __version__
from hetero_runtime.prediction.fingerprint import config_sha256
from hetero_runtime.trace import RoutingFacts, TraceInfo, write_trace
from hetero_scheduler.trace import Trace

END = 0
TEMPERATURE = 0.8
_AT_ONCE = 64
_SHORTEST = 64
"""Tokens of the shortest document that is listened to."""
_TOLD = 4096
"""Tokens of a trace whose LRU hits are told."""


class Listener:
    """A model on its device, ready to be listened to."""

    def __init__(self, folder: Path) -> None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=torch.float32)
        assert isinstance(model, Qwen3MoeForCausalLM), f"{folder}: is {type(model).__name__}"
        self.model: Qwen3MoeForCausalLM = model.to(device)  # type: ignore[arg-type]
        self.model.train(False)
        if device.type == "cuda":
            install_fast_forward(self.model)
        self.folder = folder
        self._tap = RouterTap(self.model)

    @torch.no_grad()
    def listen(self, documents: Sequence[Tokens]) -> Trace:
        """The trace of `documents`, each seen by itself, with what routers say one layer early."""
        logits, early, chosen = [], [], []
        with asked_early(self.model) as tap:
            for start in range(0, len(documents), _AT_ONCE):
                part = documents[start : start + _AT_ONCE]
                rows, _ = side_by_side(part)
                hidden_states(self.model, torch.from_numpy(rows).to(self.model.device))
                routing, said_early = self._tap.take(len(part)), tap.take(len(part))
                for i, ids in enumerate(part):
                    logits.append(_by_token(routing.logits[:, i, : len(ids)].half()))
                    early.append(_by_token(said_early[:, i, : len(ids)].half()))
                    chosen.append(_by_token(routing.chosen[:, i, : len(ids)].to(torch.int16)))
        return Trace(
            logits=np.concatenate(logits),
            topk=np.concatenate(chosen),
            tokens=np.concatenate(documents).astype(np.int32),
            bounds=np.cumsum([0, *map(len, documents)], dtype=np.int64),
            early=np.concatenate(early),
        )

    @torch.no_grad()
    def go_on(self, prompts: Sequence[Tokens], *, num_new: int, seed: int) -> list[Tokens]:
        """Each prompt, all of one length, with up to `num_new` sampled tokens; a text ends with its END."""
        torch.manual_seed(seed)
        rows = torch.tensor(np.stack(prompts), device=self.model.device)
        written = self.model.generate(
            rows,
            attention_mask=torch.ones_like(rows),
            max_new_tokens=num_new,
            do_sample=True,
            temperature=TEMPERATURE,
            top_k=0,
            top_p=1.0,
            eos_token_id=END,
            pad_token_id=PAD,
        )
        return [_until_end(row, rows.shape[1]) for row in written.cpu().numpy()]

    def describe(self, *, decoding: str, seed: int, num_new: int, cut: int) -> TraceInfo:
        """Where a trace of this model comes from."""
        is_sampled = decoding == "sampled"
        return TraceInfo(
            model=self.folder.name,
            architecture=type(self.model).__name__,
            config_sha256=config_sha256(self.folder),
            dtype="float32",
            decoding="sampled" if is_sampled else "teacher-forced",
            temperature=TEMPERATURE if is_sampled else 0.0,
            seed=seed if is_sampled else None,
            max_tokens=num_new if is_sampled else 0,
            cut=cut,
            tool_version=__version__,
        )


def _by_token(said: torch.Tensor) -> npt.NDArray[Any]:
    """`[layers, tokens, …]` on the device to `[tokens, layers, …]` on the host."""
    turned: npt.NDArray[Any] = said.transpose(0, 1).contiguous().cpu().numpy()
    return turned


def _until_end(row: Tokens, prompt: int) -> Tokens:
    """The row up to the first END after the prompt, that one included."""
    ends = np.flatnonzero(row[prompt:] == END)
    return row[: prompt + ends[0] + 1] if len(ends) else row


def record(
    listener: Listener, documents: Sequence[Tokens], out: Path, info: TraceInfo, *, name: str
) -> Trace:
    """Listen to `documents`, write `out/NAME.safetensors`, say what the routing is like."""
    trace = listener.listen(documents)
    write_trace(out / f"{name}.safetensors", trace, info)
    facts = RoutingFacts.of(trace)
    hits = "/".join(f"{lru_hits(trace.topk[:_TOLD], trace.num_experts, part):.1f}" for part in LOOKED_AT)
    print(
        f"{name}: {trace.num_tokens:,} tokens, {len(documents)} documents, load entropy "
        f"{facts.load_entropy:.3f}, LRU hits {hits} %, same expert again {100 * facts.persistence:.0f} % (by "
        f"chance {100 * facts.by_chance:.0f} %)",
        flush=True,
    )
    return trace


def record_all(listener: Listener, streams: Sequence[Stream], options: argparse.Namespace) -> None:
    """All three traces, as the command line asks for them."""
    length, seed = options.length, options.seed
    for name, count in (("learning", options.learning), ("heldout", options.heldout)):
        is_held_out = name == "heldout"
        documents = choose_documents(
            streams, count, length=length, shortest=min(_SHORTEST, length), is_held_out=is_held_out, seed=seed
        )
        info = listener.describe(decoding="teacher-forced", seed=0, num_new=0, cut=length)
        record(listener, documents, options.out, info, name=name)
    prompt, num_new = options.prompt, length - options.prompt
    prompts = choose_documents(
        streams, options.sampled, length=prompt, shortest=prompt, is_held_out=True, seed=seed + 1
    )
    written = listener.go_on(prompts, num_new=num_new, seed=seed)
    info = listener.describe(decoding="sampled", seed=seed, num_new=num_new, cut=prompt)
    record(listener, written, options.out, info, name="sampled")


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the model and the texts, and record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="folder that bench.traces.train wrote")
    parser.add_argument("--tokens", type=Path, required=True, help="folder that bench.traces.pack made")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--learning", type=int, default=1000, help="documents to learn from")
    parser.add_argument("--heldout", type=int, default=120, help="held-out documents")
    parser.add_argument("--sampled", type=int, default=96, help="held-out beginnings to go on from")
    parser.add_argument("--length", type=int, default=256, help="most tokens of a document")
    parser.add_argument("--prompt", type=int, default=32, help="tokens of a beginning")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    _, streams = load_streams(options.tokens, options.tokens, 0)
    record_all(Listener(options.model), streams, options)


if __name__ == "__main__":
    main()
