"""Our own kernels over the host bank as it is, packed records too: no second copy of the weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from hetero_cpu_kernels.experts import CpuExperts, ExpertForm, Routing, Target
from hetero_cpu_kernels.experts.plan import FEW_TOKENS, MOST_TOKENS
from hetero_cpu_kernels.pool import WorkerError, WorkerPool
from hetero_runtime.errors import DeviceError
from hetero_runtime.in_place.base import Done, Floats, InPlaceExperts, Integers, StandingExperts, Work
from hetero_runtime.plan.in_place import in_place_pairs


class _Part(NamedTuple):
    """Experts of one call; one with very many tokens comes several times. `bounds`: of the work's pairs."""

    experts: Integers
    bounds: Integers


class NativeExperts(InPlaceExperts):
    """`records`: all of the bank, uint8, flat, in the order of their keys. `pool` is closed with this.

    The same bits whatever the number of workers. Much work is computed in several calls, so that memory for
    activations stays small; all but the first begin in `wait`.
    """

    def __init__(
        self,
        form: ExpertForm,
        pool: WorkerPool,
        *,
        target: Target,
        records: torch.Tensor,
        num_experts: int,
        spare_cpus: frozenset[int] = frozenset(),
    ) -> None:
        self._form, self.spare_cpus = form, spare_cpus
        self.num_workers, self.target = pool.num_workers, target
        self._pool, self._experts = pool, CpuExperts(form, pool, target=target)
        self._bank, self._record_bytes, self._num_experts = records.numpy(), form.record_bytes, num_experts
        self._most_pairs = in_place_pairs(form.hidden, form.intermediate)
        self._rest: Iterator[_Part] = iter(())
        self._work: Work | None = None
        self._total: Floats | None = None
        self._warm_up(form)

    def submit(self, work: Work) -> None:
        if self._work is not None:
            self.wait()
        self._rest = _parts(work, self._most_pairs)
        self._total = self._start(work, next(self._rest))
        self._work = work

    def wait(self) -> Done:
        assert self._work is not None and self._total is not None, "wait without submitted work"
        work, total = self._work, self._total
        self._work = self._total = None
        try:
            self._experts.wait()
            seconds = self._experts.last_s
            for part in self._rest:
                more = self._start(work, part)
                self._experts.wait()
                seconds += self._experts.last_s
                total += more
        except WorkerError as error:
            raise DeviceError(f"computing experts on the CPU failed: {error}") from error
        return Done(total, seconds)

    def stand(self, hidden: Floats, total: Floats, *, top_k: int) -> StandingExperts | None:
        if len(hidden) > FEW_TOKENS:
            return None
        from hetero_cpu_kernels.experts.standing import StandingCall

        own = CpuExperts(self._form, self._pool, target=self.target)
        call = StandingCall(own, self._pool, hidden=hidden, out=total, top_k=top_k, bank=self._bank)
        return StandingExperts(call, self._record_bytes, self._num_experts, self.spare_cpus)

    def close(self) -> None:
        self._pool.close()
        self._bank = np.empty(0, dtype=np.uint8)

    def _warm_up(self, form: ExpertForm) -> None:
        """What is compiled at the first call is compiled now, not while somebody waits for a token."""
        one, none = np.ones(1, dtype=np.int64), np.zeros(1, dtype=np.int64)
        hidden = np.zeros((1, form.hidden), dtype=np.float32)
        self.submit(Work(0, hidden, none, np.append(none, one), none, np.ones(1, dtype=np.float32)))
        self.wait()

    def _start(self, work: Work, part: _Part) -> Floats:
        """Submit one call. Returns where its sum will be."""
        pairs = slice(part.bounds[0], part.bounds[-1])
        routing = Routing(
            offsets=(work.layer * self._num_experts + part.experts) * self._record_bytes,
            bounds=part.bounds - part.bounds[0],
            tokens=work.tokens[pairs],
            weights=work.weights[pairs],
        )
        out = np.empty_like(work.hidden)
        self._experts.submit(work.hidden, self._bank, routing=routing, out=out)
        return out


def _parts(work: Work, most_pairs: int) -> Iterator[_Part]:
    """Cut work into calls of at most `most_pairs` pairs, at most MOST_TOKENS of them of one expert."""
    if len(work.tokens) <= min(most_pairs, MOST_TOKENS):
        yield _Part(work.experts, work.bounds)
        return
    grain = min(most_pairs, MOST_TOKENS)
    experts: list[int] = []
    bounds: list[int] = [0]
    for expert, first, end in zip(
        work.experts.tolist(), work.bounds[:-1].tolist(), work.bounds[1:].tolist(), strict=True
    ):
        for begin in range(first, end, grain):
            stop = min(begin + grain, end)
            if experts and stop - bounds[0] > most_pairs:
                yield _Part(np.array(experts), np.array(bounds))
                experts, bounds = [], [begin]
            experts.append(expert)
            bounds.append(stop)
    yield _Part(np.array(experts), np.array(bounds))
