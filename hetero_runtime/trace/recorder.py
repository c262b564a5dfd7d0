"""Record a trace: the routing of a model on many documents, through the offloaded engine.

    1  generate   each document's text goes on, sampled: the routing of text that the model would write
    2  listen     prompt and answer in one packed prefill, with every router listened to

Decoding alone would do, but a prefill gives the logits of a whole document in one pass, and the engine that
serves needs no hook. Teacher-forced, the first pass is left out and the text itself is listened to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from hetero_runtime import __version__
from hetero_runtime.assembly import Parts, assemble
from hetero_runtime.checkpoint import Checkpoint
from hetero_runtime.config import ResolvedConfig
from hetero_runtime.config.combinations import require_no_drafter
from hetero_runtime.config.routing import require_exact
from hetero_runtime.engine import Engine
from hetero_runtime.errors import RequestCancelled
from hetero_runtime.generation import CancelToken, SamplingParams
from hetero_runtime.hf.router_hooks import check_recordable
from hetero_runtime.hf.routing_record import record_routing
from hetero_runtime.hf.tokens import load_tokenizer
from hetero_runtime.no_room import no_room_for
from hetero_runtime.orchestrator import Phase
from hetero_runtime.prediction.fingerprint import config_sha256
from hetero_runtime.trace.documents import TokenIds, encode
from hetero_runtime.trace.file import Decoding, TraceInfo
from hetero_runtime.trace.parts import PartFolder
from hetero_runtime.trace.progress import Meter, Watch
from hetero_scheduler.trace import Trace


@dataclass(frozen=True)
class TraceSettings:
    """How tokens come about."""

    is_teacher_forced: bool = False
    """Take the documents' own tokens and generate none."""
    max_tokens: int = 256
    """Most tokens to generate after each document."""
    temperature: float = 0.8
    """0 is greedy."""
    seed: int = 0
    """Document d is sampled with seed + d."""
    cut: int | None = None
    """Keep this many tokens of each document; None keeps all."""
    asks_early: bool = False
    """Also record what each router says to the input of the layer before it."""

    @property
    def decoding(self) -> Decoding:
        """In the words of TraceInfo."""
        if self.is_teacher_forced:
            return "teacher-forced"
        return "sampled" if self.temperature else "greedy"

    def sampling(self, document: int) -> SamplingParams:
        """For one document. Raises RequestError for a value out of range."""
        return SamplingParams(
            max_tokens=self.max_tokens, temperature=self.temperature, seed=self.seed + document
        )


class Recorded(NamedTuple):
    """What was written."""

    trace: Trace
    info: TraceInfo


def record_trace(
    config: ResolvedConfig,
    texts: Sequence[str],
    out: Path,
    *,
    settings: TraceSettings,
    watch: Watch | None = None,
) -> Recorded:
    """Record `texts` into the file `out`; go on where an earlier run with the same settings stopped.

    Raises RequestError, ConfigError and CheckpointError before any weight is read, what loading raises, and
    RequestCancelled when `watch.cancel` says so; documents that are done are kept.
    """
    watch = watch or Watch()
    settings.sampling(0)
    require_exact(config.routing, "a trace is of the model's own routing")
    require_no_drafter(config.speculation, "a trace is recorded step by step")
    check_recordable(config.model.path, dtype=config.model.dtype)
    documents = encode(
        texts,
        load_tokenizer(config.model.path),
        cut=settings.cut,
        num_new=0 if settings.is_teacher_forced else settings.max_tokens,
        max_length=config.execution.max_length,
    )
    info = _describe(config, settings)
    folder = PartFolder(out, info, has_early=settings.asks_early)
    missing = folder.missing(documents)
    folder.make()
    if missing:
        with watch.loading() as reading:
            parts = assemble(config, progress=reading)
        meter = Meter(watch.recording, num_documents=len(documents), num_missing=len(missing))
        with Engine(parts) as engine:
            recorder = _Recorder(engine, parts, settings, cancel=watch.cancel, meter=meter)
            for index in missing:
                folder.write(index, recorder.record(index, documents[index]))
                meter.add_document()
    return Recorded(folder.join(len(documents)), info)


class _Recorder:
    """Both passes over one document after another."""

    def __init__(
        self, engine: Engine, parts: Parts, settings: TraceSettings, *, cancel: CancelToken, meter: Meter
    ) -> None:
        self._engine, self._parts, self._settings = engine, parts, settings
        self._cancel, self._meter = cancel, meter

    def record(self, index: int, ids: TokenIds) -> Trace:
        """The trace of document `index`, whose text is `ids`."""
        if self._settings.is_teacher_forced:
            trace = self._listen(ids)
            self._meter.add_tokens(len(ids))
            return trace
        return self._listen(self._generate(index, ids))

    def _generate(self, index: int, ids: TokenIds) -> TokenIds:
        """Pass 1: `ids` and what the model says next."""
        row = self._engine.open(list(ids), self._settings.sampling(index), cancel=self._cancel)
        for _ in row.deltas():
            self._meter.add_tokens(1)
        self._go_on_or_raise()
        return ids + row.completion().token_ids

    def _listen(self, ids: TokenIds) -> Trace:
        """Pass 2: one prefill of `ids`."""
        parts = self._parts
        fix = "cut documents shorter (--cut), or lower memory.slabs"
        with (
            record_routing(parts.model, asks_early=self._settings.asks_early) as record,
            parts.sequences.open() as sequence,
            parts.orchestrator.pass_(Phase.PREFILL, checkpoint=self._go_on_or_raise),
            no_room_for(f"a pass over {len(ids)} tokens", parts.device, fix=fix),
        ):
            sequence.extend(torch.tensor(ids, device=parts.device))
            routing = record.take()
        return Trace(
            logits=routing.logits.numpy(),
            topk=routing.top_k.numpy(),
            tokens=np.array(ids, dtype=np.int32),
            bounds=np.array([0, len(ids)], dtype=np.int64),
            early=None if routing.early is None else routing.early.numpy(),
        )

    def _go_on_or_raise(self) -> None:
        if self._cancel.is_cancelled:
            raise RequestCancelled(
                f"cancelled; documents kept: {self._meter.num_kept}. The same recording, begun again, goes "
                "on from there"
            )


def _describe(config: ResolvedConfig, settings: TraceSettings) -> TraceInfo:
    checkpoint = Checkpoint.open(config.model.path)
    decoding = settings.decoding
    return TraceInfo(
        model=checkpoint.path.name,
        architecture=checkpoint.config["architectures"][0],
        config_sha256=config_sha256(checkpoint.path),
        dtype=config.model.dtype,
        decoding=decoding,
        temperature=settings.temperature if decoding == "sampled" else 0.0,
        seed=settings.seed if decoding == "sampled" else None,
        max_tokens=0 if settings.is_teacher_forced else settings.max_tokens,
        cut=settings.cut,
        tool_version=__version__,
    )
