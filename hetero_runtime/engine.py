"""The engine: a model whose experts do not fit, ready to make tokens.

    with Engine.load("config.yaml") as engine:
        print(engine.generate("Once upon a time").text)

The way of one request:

    1  prompt     text or messages to ids, checked against the context         prompt.py
    2  place      one of `execution.max_rows`; memory is planned for that many  row.py
    3  prefill    the whole prompt in one pass, the first token from it        stepping/
    4  step       one token a pass, or a checked draft, in turn or all at once  stepping/, turns.py
    5  text       token to text, stop strings, end of text                     generation/
    6  stats      what the experts cost                                        stats.py

Inside each pass transformers runs the model and calls `orchestrator.run_layer` for every MoE layer.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import AsyncGenerator, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self, TypedDict, Unpack

from hetero_runtime.assembly import Parts, assemble
from hetero_runtime.config import ResolvedConfig
from hetero_runtime.errors import RequestError
from hetero_runtime.experts.base import ExpertStore
from hetero_runtime.experts.store import Progress
from hetero_runtime.generation import (
    CancelToken,
    Completion,
    Delta,
    Request,
    SamplingParams,
    TextStream,
    iterate_in_thread,
)
from hetero_runtime.passes import Passes
from hetero_runtime.planned import plan_for
from hetero_runtime.prompt import Prompt, PromptReader
from hetero_runtime.row import Row, Shared
from hetero_runtime.source import config_from
from hetero_runtime.stats import EngineStats, StatsRecorder
from hetero_runtime.stepping import make_stepper
from hetero_runtime.tuning import find_candidates, settle
from hetero_runtime.turns import Turns

log = logging.getLogger(__name__)

NUM_WAITING = 28
"""Requests from asyncio that may wait for a place in a thread, where cancellation and deadline reach them at
once; more of them queue for a thread first."""


class RequestOptions(TypedDict, total=False):
    """Keywords of a request: the fields of SamplingParams, and how it may end early."""

    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    seed: int | None
    stop: tuple[str, ...]
    ignore_eos: bool
    cancel: CancelToken | None
    """Ends the request from any thread, between two layers at the latest."""
    timeout_s: float | None
    """Seconds from now after which no further step begins."""


class Engine:
    """Generates text; usable from any number of threads and from asyncio. Build it with `Engine.load`."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._prompts = PromptReader(
            parts.config.model.path,
            tokenizer=parts.tokenizer,
            config=parts.model.config,
            has_images=parts.architecture.has_images,
            max_length=parts.config.execution.max_length,
        )
        self._turns, stats = Turns(), StatsRecorder(parts.cache, parts.orchestrator, parts.steered)
        self._shared = Shared(
            stepper=make_stepper(
                parts.sequences,
                Passes(parts.device, parts.orchestrator, self._turns, stats),
                parts.speculation,
            ),
            places=threading.BoundedSemaphore(parts.config.execution.max_rows),
            stats=stats,
            closing=CancelToken(),
        )
        num_workers = parts.config.execution.max_rows + NUM_WAITING
        self._workers = ThreadPoolExecutor(num_workers, thread_name_prefix="hetero-engine")

    @classmethod
    def load(
        cls,
        source: str | Path | Mapping[str, Any] | None = None,
        *,
        progress: Progress | None = None,
        **overrides: Any,
    ) -> Self:
        """Load a model.

        `source`: a YAML file, a configuration as a dict, a model folder, or None for the bundled model.
        `overrides`: keys or sections laid over it: `device="cpu", memory={"residency": 0.25}`. With
        `preset: auto` short runs choose first, for some seconds, and the log says why. Raises ConfigError,
        CheckpointError, or BudgetError (it does not fit, with the smallest change that would), before any
        weight is read where that can be known.
        """
        config = config_from(source, overrides)
        if config.preset == "auto":
            candidates = find_candidates(partial(config_from, source, overrides))
            return cls(settle(candidates, progress=progress).parts)
        planned = plan_for(config)
        if planned.memory.why_eager is not None:
            log.info("execution.mode: auto is eager: %s", planned.memory.why_eager)
        return cls(assemble(planned.config, progress=progress))

    @property
    def config(self) -> ResolvedConfig:
        """The configuration, with every `auto` decided."""
        return self._parts.config

    # ---- generation

    def open(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> Row:
        """Check a request and give the row that will serve it: `deltas()`, `completion()`, `cancel()`.

        Sampling comes from `params`, or from its fields as keywords (`max_tokens=64`). Raises RequestError.
        """
        if self._shared.closing.is_cancelled:
            raise RequestError("the engine is closed; load a new one")
        request = _request(params, options)
        read = self._prompts.read(prompt, request.params)
        text = TextStream(
            self._parts.tokenizer,
            request.params,
            eos_token_ids=self._parts.eos_token_ids,
            prompt_ids=read.text_ids,
        )
        return Row(self._shared, replace(request, prompt_ids=read.ids), text=text, images=read.images)

    def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> Completion:
        """The whole answer at once; arguments as for `open`.

        A request that is cancelled or past `timeout_s` gives what there is, with that finish reason.
        """
        row = self.open(prompt, params, **options)
        for _ in row.deltas():
            pass
        return row.completion()

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> Generator[Delta, None, None]:
        """The answer token by token; arguments as for `open`.

        A place is held from the first delta until the generator ends or is closed: one thread that
        interleaves more streams than `execution.max_rows` waits for itself.
        """
        return self.open(prompt, params, **options).deltas()

    async def agenerate(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> Completion:
        """`generate` for asyncio: the loop stays free, and cancelling the task cancels the request."""
        row = self.open(prompt, params, **options)
        async with aclosing(self._in_thread(row)) as deltas:
            async for _ in deltas:
                pass
        return row.completion()

    def astream(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> AsyncGenerator[Delta, None]:
        """`stream` for asyncio; leaving the loop early (`contextlib.aclosing`) ends the request."""
        return self._in_thread(self.open(prompt, params, **options))

    def _in_thread(self, row: Row) -> AsyncGenerator[Delta, None]:
        return iterate_in_thread(row.deltas, self._workers, cancel=row.request.cancel)

    # ---- state

    def stats(self) -> EngineStats:
        """What the engine has done so far, and what its experts cost."""
        parts = self._parts
        return self._shared.stats.snapshot(
            bank_bytes=parts.store.bank_bytes,
            slab_bytes=parts.slabs.num_bytes,
            disk=parts.supply.read_stats(),
            device=parts.device,
            compression=parts.compression_stats(),
        )

    def weight_errors(self) -> list[float] | None:
        """How far the experts' weights are from the checkpoint's: by MoE layer, root mean square of the error
        over that of the weights. None where `model.experts` leaves them as they are."""
        return self._parts.store.errors

    def lru_hit_rate(self) -> float | None:
        """What LRU would have hit in decode, given the routing so far: what foresight has to beat. None where
        nothing acts on forecasts or nothing was decoded."""
        foresight = self._parts.foresight
        if foresight is None:
            return None
        with self._turns.take():
            return foresight.rival.hit_rate()

    def check(self) -> None:
        """Assert that nothing was lost between passes: slots, copies in flight, places."""
        with self._turns.take():
            self._parts.orchestrator.check()

    def close(self) -> None:
        """End all requests (as `cancelled`), wait for the pass under way, give all memory back. Idempotent.

        Waits for no caller: a stream that somebody holds and does not read ends when it is read or dropped.
        """
        if not self._shared.closing.is_cancelled:
            self.release().close()

    def release(self) -> ExpertStore:
        """As `close`, once, but for the experts, which may serve another engine of this model."""
        assert not self._shared.closing.is_cancelled, "the experts of this engine are not its own any more"
        self._shared.closing.cancel()
        with self._turns.take():
            store = self._parts.release()
        self._workers.shutdown(wait=False, cancel_futures=True)
        return store

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _request(params: SamplingParams | None, options: RequestOptions) -> Request:
    """A request without its prompt yet."""
    sampling: dict[str, Any] = dict(options)
    cancel = sampling.pop("cancel", None) or CancelToken()
    timeout_s = sampling.pop("timeout_s", None)
    unknown = sorted(set(sampling) - set(SamplingParams.__dataclass_fields__))
    if unknown:
        raise RequestError(
            f"unknown option {', '.join(unknown)}; known: cancel, timeout_s, "
            f"{', '.join(SamplingParams.__dataclass_fields__)}"
        )
    if not isinstance(cancel, CancelToken):
        raise RequestError(f"cancel is {cancel!r:.40}; give a CancelToken")
    if timeout_s is not None and not (isinstance(timeout_s, int | float) and math.isfinite(timeout_s)):
        raise RequestError(f"timeout_s is {timeout_s!r:.40}; give seconds, or None to wait for ever")
    deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
    return Request((), replace(params or SamplingParams(), **sampling), cancel, deadline_s)
