"""The fastest candidate that the budget allows, and why."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from hetero_runtime.errors import HeteroError
from hetero_runtime.tuning.base import Candidate, Measured, Measurer

SECONDS = 8.0
"""After the first candidate has run; then no other begins."""
MARGIN = 0.05
"""Share of the time a token by which another candidate has to be faster than the first one."""


class Verdict(NamedTuple):
    """One candidate and what became of it. `measured` is None where it did not run."""

    candidate: Candidate
    measured: Measured | None
    reason: str


class Choice(NamedTuple):
    """`best` of all `verdicts`."""

    best: Candidate
    verdicts: tuple[Verdict, ...]

    def lines(self) -> list[str]:
        """Why, a line a candidate."""
        marks = ("*" if verdict.candidate is self.best else " " for verdict in self.verdicts)
        return [
            f"{mark} {verdict.candidate.name}: {verdict.reason}"
            for mark, verdict in zip(marks, self.verdicts, strict=True)
        ]


def choose(
    candidates: Sequence[Candidate],
    measurer: Measurer,
    *,
    kl_budget: float,
    seconds: float = SECONDS,
    clock: Callable[[], float] = time.monotonic,
) -> Choice:
    """Measure `candidates` in order while time lasts, and take the fastest whose divergence, with its
    standard error, is at most `kl_budget` nats a token. Nothing is measured where there is one alone.

    Raises what the first candidate raises, which has to run.
    """
    first = candidates[0]
    if len(candidates) == 1:
        return Choice(first, (Verdict(first, None, "not measured: what is given leaves nothing to choose"),))
    verdicts = [Verdict(first, measured := measurer.measure(first), _told(measured, kl_budget))]
    began_s = clock()
    for candidate in candidates[1:]:
        if clock() - began_s > seconds:
            verdicts.append(Verdict(candidate, None, f"not measured: {seconds:.0f} s are over"))
            continue
        try:
            measured = measurer.measure(candidate)
        except HeteroError as error:
            verdicts.append(Verdict(candidate, None, f"not possible: {error}"))
            continue
        verdicts.append(Verdict(candidate, measured, _told(measured, kl_budget)))
    return Choice(_fastest(verdicts, kl_budget), tuple(verdicts))


def _fastest(verdicts: Sequence[Verdict], kl_budget: float) -> Candidate:
    times = {
        verdict.candidate: verdict.measured.ms_per_token
        for verdict in verdicts
        if verdict.measured is not None and _is_allowed(verdict.measured, kl_budget)
    }
    first = verdicts[0].candidate
    fastest = min(times, key=lambda candidate: times[candidate])
    return fastest if times[fastest] < (1 - MARGIN) * times[first] else first


def _is_allowed(measured: Measured, kl_budget: float) -> bool:
    return measured.kl + measured.kl_error <= kl_budget


def _told(measured: Measured, kl_budget: float) -> str:
    told = f"{measured.ms_per_token:.1f} ms a token over {measured.num_tokens}"
    if measured.kl == 0 == measured.kl_error:
        return told
    told += f", KL {measured.kl:.4f} ± {measured.kl_error:.4f} nats a token"
    return told if _is_allowed(measured, kl_budget) else f"{told}: over routing.kl_budget {kl_budget}"
