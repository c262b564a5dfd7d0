"""The engine: a model whose experts do not fit, ready to make tokens.

    with Engine.load("config.yaml") as engine:
        print(engine.generate("Once upon a time").text)

The way of one request:

    1  prompt     text or messages to ids, checked against the context         prompt.py
    2  place      one of `execution.max_rows`; memory is planned for that many  row.py
    3  prefill    the whole prompt in one pass, logits of its last token       hf/forward.py
    4  step       sample, extend by one token; one turn of the engine each     turns.py
    5  text       token to text, stop strings, end of text                     generation/
    6  stats      what the experts cost                                        stats.py

Inside each pass transformers runs the model and calls `orchestrator.run_layer` for every MoE layer.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import AsyncGenerator, Generator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from hetero_runtime.assembly import Parts, assemble
from hetero_runtime.config import Config, ResolvedConfig, load_config
from hetero_runtime.errors import RequestError
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
from hetero_runtime.planned import plan_for
from hetero_runtime.prompt import Prompt, PromptReader
from hetero_runtime.row import Row, Shared
from hetero_runtime.stats import EngineStats, StatsRecorder
from hetero_runtime.turns import Turns


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
        self._shared = Shared(
            model=parts.model,
            device=parts.device,
            orchestrator=parts.orchestrator,
            turns=Turns(),
            places=threading.BoundedSemaphore(parts.config.execution.max_rows),
            stats=StatsRecorder(parts.cache),
            closing=CancelToken(),
        )
        self._workers = ThreadPoolExecutor(thread_name_prefix="hetero-engine")

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
        `overrides`: keys or sections laid over it: `device="cpu", memory={"residency": 0.25}`. Raises
        ConfigError, CheckpointError, or BudgetError (it does not fit, with the smallest change that would),
        before any weight is read where that can be known.
        """
        return cls(assemble(plan_for(config_from(source, overrides)).config, progress=progress))

    @property
    def config(self) -> ResolvedConfig:
        """The configuration, with every `auto` decided."""
        return self._parts.config

    # ---- generation

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        cancel: CancelToken | None = None,
        timeout_s: float | None = None,
        **sampling: Any,
    ) -> Completion:
        """The whole answer at once.

        `params`, or its fields as keywords (`max_tokens=64`). A request that is cancelled or past `timeout_s`
        gives what there is, with finish reason `cancelled` or `deadline`. Raises RequestError.
        """
        row = self._row(prompt, _request(params, cancel, timeout_s, sampling))
        for _ in row.deltas():
            pass
        return row.completion()

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        cancel: CancelToken | None = None,
        timeout_s: float | None = None,
        **sampling: Any,
    ) -> Generator[Delta, None, None]:
        """The answer token by token; arguments as for `generate`.

        A place is held from the first delta until the generator ends or is closed: one thread that
        interleaves more streams than `execution.max_rows` waits for itself.
        """
        return self._row(prompt, _request(params, cancel, timeout_s, sampling)).deltas()

    async def agenerate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        cancel: CancelToken | None = None,
        timeout_s: float | None = None,
        **sampling: Any,
    ) -> Completion:
        """`generate` for asyncio: the loop stays free, and cancelling the task cancels the request."""
        request = _request(params, cancel, timeout_s, sampling)
        row = self._row(prompt, request)
        deltas = iterate_in_thread(row.deltas, self._workers, cancel=request.cancel)
        async with aclosing(deltas):
            async for _ in deltas:
                pass
        return row.completion()

    def astream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        cancel: CancelToken | None = None,
        timeout_s: float | None = None,
        **sampling: Any,
    ) -> AsyncGenerator[Delta, None]:
        """`stream` for asyncio; leaving the loop early (`contextlib.aclosing`) ends the request."""
        request = _request(params, cancel, timeout_s, sampling)
        row = self._row(prompt, request)
        return iterate_in_thread(row.deltas, self._workers, cancel=request.cancel)

    # ---- state

    def stats(self) -> EngineStats:
        """What the engine has done so far, and what its experts cost."""
        parts = self._parts
        return self._shared.stats.snapshot(
            bank_bytes=parts.store.bank_bytes, slab_bytes=parts.slabs.num_bytes, device=parts.device
        )

    def check(self) -> None:
        """Assert that nothing was lost between passes: slots, copies in flight, places."""
        with self._shared.turns.take():
            self._parts.orchestrator.check()

    def close(self) -> None:
        """End running requests (as `cancelled`), wait for them, give all memory back. Idempotent."""
        if self._shared.closing.is_cancelled:
            return
        self._shared.closing.cancel()
        for _ in range(self.config.execution.max_rows):
            self._shared.places.acquire()
        self._workers.shutdown(wait=True, cancel_futures=True)
        self._parts.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _row(self, prompt: Prompt, request: Request) -> Row:
        if self._shared.closing.is_cancelled:
            raise RequestError("the engine is closed; load a new one")
        read = self._prompts.read(prompt, request.params)
        text = TextStream(
            self._parts.tokenizer,
            request.params,
            eos_token_ids=self._parts.eos_token_ids,
            prompt_ids=read.text_ids,
        )
        return Row(self._shared, replace(request, prompt_ids=read.ids), text=text, images=read.images)


def config_from(source: str | Path | Mapping[str, Any] | None, overrides: Mapping[str, Any]) -> Config:
    """The configuration that `Engine.load` means: a model folder stands for a file that only names it."""
    flat = [f"{path}={json.dumps(value)}" for path, value in _leaves(overrides)]
    if isinstance(source, str | Path) and Path(source).is_dir():
        return load_config({"model": {"path": str(source)}}, overrides=flat)
    return load_config(source, overrides=flat)


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _request(
    params: SamplingParams | None,
    cancel: CancelToken | None,
    timeout_s: float | None,
    sampling: Mapping[str, Any],
) -> Request:
    """A request without its prompt yet."""
    try:
        params = replace(params or SamplingParams(), **sampling)
    except TypeError as error:
        raise RequestError(f"{error}; sampling fields are those of SamplingParams") from error
    deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
    return Request((), params, cancel or CancelToken(), deadline_s)
