"""One candidate, loaded and run for a moment.

Each runs as it will serve: `execution.mode: auto` is decided for each of them, and where that is graph,
tokens are read by its captured step. Kernels compile and steps are captured before anything is timed. Where
such a step splits misses, it is timed with the share that it begins with: finding a better one takes longer
than a run here.

The first run lets the exact model write a text; all others read that very text, token by token, so that each
does the same work. Their next-token distributions beside the exact ones give the divergence on text of the
exact model (PSR §6.1), with nothing sampled but the text.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn import functional as F

from hetero_runtime.assembly import Parts, assemble
from hetero_runtime.config import ResolvedConfig
from hetero_runtime.errors import HeteroError
from hetero_runtime.experts.base import ExpertStore
from hetero_runtime.experts.store import Progress
from hetero_runtime.generation import SamplingParams, make_sampler
from hetero_runtime.orchestrator import Phase
from hetero_runtime.planned import plan_for
from hetero_runtime.tuning.base import Candidate, Measured, Measurer

PROMPT = "The weather was fine in the morning, and so we decided to walk along the river to the old mill."
NUM_WARM = 8
"""Tokens that fill the cache and are not timed."""
NUM_TIMED = 48
RUN_SECONDS = 2.0
"""A run ends then, with one token timed at least."""


class _Run(NamedTuple):
    """`ids` that followed the prompt, the model's log-probabilities after each of them `[n, vocab]`, and the
    seconds of each."""

    ids: list[int]
    said: torch.Tensor
    seconds: list[float]


class EngineMeasurer(Measurer):
    """`candidates` of one model, run with one bank of experts. All are planned at once, while memory is as
    the best of them will find it."""

    def __init__(self, candidates: Sequence[Candidate], progress: Progress | None = None) -> None:
        self._plans = {candidate.name: _plan(candidate) for candidate in candidates}
        self._progress = progress
        self._store: ExpertStore | None = None
        self._last: tuple[Candidate, Parts] | None = None
        self._exact: _Run | None = None

    def measure(self, candidate: Candidate) -> Measured:
        run = _run(self._load(candidate), self._exact)
        if self._exact is None:
            assert candidate.is_exact, "the first candidate writes the text"
            self._exact = run
        kl, error = (0.0, 0.0) if candidate.is_exact else _divergence(self._exact.said, run.said)
        timed = run.seconds[NUM_WARM:] or run.seconds[-1:]
        return Measured(1e3 * statistics.fmean(timed), kl, error, num_tokens=len(timed))

    def take(self, candidate: Candidate) -> Parts:
        """The parts of `candidate`, measured or not, which are the caller's from now on."""
        parts = self._load(candidate)
        self._last = None
        return parts

    def close(self) -> None:
        """Give back what nobody took. Safe to call twice."""
        self._hand_over()
        if self._store is not None:
            self._store.close()
            self._store = None

    def _load(self, candidate: Candidate) -> Parts:
        if self._last is not None and self._last[0] is candidate:
            return self._last[1]
        config = self._plans[candidate.name]
        if isinstance(config, HeteroError):
            raise config
        self._hand_over()
        store, self._store = self._store, None  # which is closed where this candidate turns out impossible
        parts = assemble(config, progress=self._progress, store=store)
        self._last = candidate, parts
        return parts

    def _hand_over(self) -> None:
        """The experts of the last candidate are for the next one."""
        if self._last is not None:
            self._store = self._last[1].release()
            self._last = None


def _plan(candidate: Candidate) -> ResolvedConfig | HeteroError:
    """Its configuration for this machine, or why there is none."""
    try:
        return plan_for(candidate.config).config
    except HeteroError as error:
        return error


def _run(parts: Parts, exact: _Run | None) -> _Run:
    """Read the prompt, then the text of `exact`, or write one at temperature 1; less where a row is short."""
    run, began_s = _Run([], torch.empty(0), []), time.perf_counter()
    said: list[torch.Tensor] = []
    room = parts.config.execution.max_length
    prompt = torch.tensor(parts.tokenizer(PROMPT)["input_ids"][: (room + 1) // 2], device=parts.device)
    num_written = min(NUM_WARM + NUM_TIMED, max(1, room - len(prompt)))
    with parts.sequences.open() as sequence:
        with parts.orchestrator.pass_(Phase.PREFILL, checkpoint=_go_on):
            logits = sequence.extend(prompt)
        sampler = make_sampler(SamplingParams(temperature=1.0, seed=0), len(logits), parts.device)
        for step in range(num_written if exact is None else len(exact.ids)):
            run.ids.append(sampler.sample(logits, run.ids) if exact is None else exact.ids[step])
            token_began_s = time.perf_counter()
            with parts.orchestrator.pass_(Phase.DECODE, checkpoint=_go_on):
                logits = sequence.extend(torch.tensor(run.ids[-1:], device=parts.device))
            said.append(F.log_softmax(logits, dim=-1).cpu())  # waits for the device
            run.seconds.append(time.perf_counter() - token_began_s)
            if time.perf_counter() - began_s > RUN_SECONDS:
                break
    return run._replace(said=torch.stack(said))


def _divergence(exact: torch.Tensor, other: torch.Tensor) -> tuple[float, float]:
    """Mean divergence of two runs over the tokens that both read, and its standard error."""
    common = min(len(exact), len(other))
    terms = exact[:common].exp() * (exact[:common] - other[:common])
    nats = terms.sum(-1)
    error = float(nats.std()) / common**0.5 if common > 1 else float("inf")
    return float(nats.mean()), error


def _go_on() -> None:
    return
