"""Where the time of decode steps goes on a device: kernels by kind, and the gaps between them.

    kernels       ██ attention ██ products ██ experts ██ misses ██   each instant counted once
    beside           ▒▒ predictor, tables ▒▒                         only what sticks out of other kernels
    copies             ░░░░░░░ copy of an expert ░░░░░░░             only what sticks out of all kernels
    the rest      short gaps: idle between kernels; long ones: the device waits for the host

The kinds of one step therefore add up to its length. A kernel that was launched early, and waits for the one
before it, begins to count where that one ends.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

KINDS = {
    "small": ("at::native", "Memcpy DtoD", "Memcpy DtoH", "Memset", "_norm_rows", "_route_"),
    "experts": ("up_kernel", "down_kernel", "sum_kernel"),
    "attention": ("_attend_split", "_reduce_splits", "_rotate_head", "_append", "_expand_head"),
    "products": ("nvjet", "gemm", "gemv", "cutlass", "splitK", "cublas", "_linear_"),
    "predictor": ("_forecast_kernel", "_token_kernel", "_router_kernel"),
    "tables": (
        "_ensure_kernel",
        "_create_kernel",
        "_land_kernel",
        "_score_kernel",
        "_propose_kernel",
        "_jsd_kernel",
    ),
    "routing": ("_decide_kernel", "_follow_kernel", "_weigh_token"),
    "misses": (
        "_gather_",
        "_decode_kernel",
        "_await_kernel",
        "_unpack_kernel",
        "_divide_kernel",
        "_call_kernel",
        "_answer_kernel",
        "Memcpy HtoD",
    ),
}
"""Kind to what the name of a kernel contains; the first that fits counts. `products` are those outside of
experts; `small` is norms, routers, residual additions, sampling."""

OTHER, IDLE, HOST = "other", "idle", "host"
ALL_KINDS = (*KINDS, OTHER, IDLE, HOST)
BESIDE = ("predictor", "tables")
"""Kinds that may run beside others."""
COPY = "Memcpy HtoD"
"""How names of copies to the device begin. They count only where no kernel runs."""

LONGEST_IDLE_US = 20.0
"""A longer gap lies between replays: the device waits for the host."""


class Work(NamedTuple):
    """One kernel or copy on the device, in µs of any clock."""

    name: str
    begin_us: float
    end_us: float


@dataclass(frozen=True)
class StepTime:
    """A mean step: µs by kind, kernels and copies by kind, and the names of kind `other` with their µs."""

    us: dict[str, float]
    kernels: dict[str, float]
    unknown: dict[str, float]

    @property
    def total_us(self) -> float:
        """Length of the step."""
        return sum(self.us.values())

    @classmethod
    def of(cls, works: Iterable[Work], *, num_steps: int) -> StepTime:
        """The mean step of all work of `num_steps` steps. Raises ValueError when there is none."""
        ordered = sorted(works, key=lambda work: (_rank(work.name), work.begin_us))
        if not ordered or num_steps < 1:
            raise ValueError(f"{len(ordered)} kernels in {num_steps} steps: nothing to break down")
        us, unknown, busy = dict.fromkeys(ALL_KINDS, 0.0), defaultdict[str, float](float), _Busy()
        kernels = dict.fromkeys((*KINDS, OTHER), 0.0)
        for work in ordered:
            kind, uncovered = kind_of(work.name), busy.add(work.begin_us, work.end_us)
            us[kind] += uncovered
            kernels[kind] += 1
            if kind == OTHER:
                unknown[work.name] += uncovered
        for gap in busy.gaps():
            us[IDLE if gap <= LONGEST_IDLE_US else HOST] += gap
        return cls(
            *({name: n / num_steps for name, n in counts.items()} for counts in (us, kernels, unknown))
        )


def kind_of(name: str) -> str:
    """The kind of a kernel or copy, `other` where the table knows none."""
    for kind, parts in KINDS.items():
        if any(part in name for part in parts):
            return kind
    return OTHER


def _rank(name: str) -> int:
    """In which order works are counted; what comes later counts only where nothing before it runs."""
    return 2 if name.startswith(COPY) else int(kind_of(name) in BESIDE)


class _Busy:
    """Times at which the device does something, as disjoint intervals in order."""

    def __init__(self) -> None:
        self._begins: list[float] = []
        self._ends: list[float] = []

    def add(self, begin: float, end: float) -> float:
        """Unite with `begin` to `end`; returns how much of that was not busy before."""
        first = bisect_left(self._ends, begin)  # the first interval that does not end before
        last = bisect_left(self._begins, end)  # the first that begins after, or where this one ends
        touched = list(zip(self._begins[first:last], self._ends[first:last], strict=True))
        covered = sum(min(e, end) - max(b, begin) for b, e in touched)
        begin_all, end_all = min([begin, *(b for b, _ in touched)]), max([end, *(e for _, e in touched)])
        self._begins[first:last], self._ends[first:last] = [begin_all], [end_all]
        return end - begin - covered

    def gaps(self) -> Sequence[float]:
        """Lengths of the pauses between the first work and the last."""
        return [begin - end for end, begin in zip(self._ends, self._begins[1:], strict=False)]
