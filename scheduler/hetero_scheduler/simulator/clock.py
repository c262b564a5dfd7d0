"""Imagined time: layers that run one after the other, and a link that moves one expert after the other.

    layer    ──── l ────│ stall │──── l + 1 ────│──── l + 2 ────
    link     ─ ahead ──────│ d │ d │── ahead ──────── idle ──────

What a layer demands (d) overtakes prefetches that wait in the queue; the copy already on the link is finished
first or, where copies cross in pieces, goes on afterwards. Nothing is ever called back.

    link     ─ ahead ──────│ d │ d │─ ahead, the rest of it ── ahead ─────── idle ──────
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from hetero_scheduler.keys import ExpertKey


class Copy(NamedTuple):
    """A prefetch on its way into `slot`, reserved under `tag`."""

    key: ExpertKey
    slot: int
    tag: int


class Link:
    """One link: `record_ms` a copy, at most `depth` prefetches given to it and not arrived yet.

    `overtakes`: a demand does not wait for the copy on the link, unless that is demanded too.
    """

    def __init__(self, record_ms: float, *, depth: int, overtakes: bool = False) -> None:
        self.record_ms, self.depth, self._overtakes = record_ms, depth, overtakes
        self._queue: list[Copy] = []
        self._first_done_ms = 0.0  # the first of the queue is always on the move

    # ---- queries

    @property
    def has_room(self) -> bool:
        """Whether another prefetch may be given to the link."""
        return len(self._queue) < self.depth

    @property
    def next_arrival_ms(self) -> float:
        """When the next prefetch arrives; infinite when none is under way."""
        return self._first_done_ms if self._queue else float("inf")

    # ---- commands

    def submit(self, copy: Copy, *, now_ms: float) -> None:
        """Give a prefetch to the link; it moves after all that was given before."""
        assert self.has_room, f"{len(self._queue)} copies are in flight, {self.depth} may be"
        if not self._queue:
            self._first_done_ms = now_ms + self.record_ms
        self._queue.append(copy)

    def arrive(self, now_ms: float) -> list[Copy]:
        """Take the prefetches that have arrived by `now_ms`, in order."""
        arrived = []
        while self.next_arrival_ms <= now_ms:
            arrived.append(self._queue.pop(0))
            self._first_done_ms += self.record_ms
        return arrived

    def demand(
        self, num_missing: int, *, late: Collection[ExpertKey], now_ms: float
    ) -> tuple[float, list[Copy]]:
        """Move `num_missing` experts and the prefetches of `late` before all that waits.

        Returns when they are all there (`now_ms` when there is nothing to wait for), and the prefetches that
        have arrived by then. Call `arrive(now_ms)` before.
        """
        if not num_missing and not late:
            return now_ms, []
        moving, waiting = self._queue[:1], self._queue[1:]
        wanted = [copy for copy in waiting if copy.key in late]
        demanded_ms = (len(wanted) + num_missing) * self.record_ms
        if self._overtakes and moving and moving[0].key not in late:
            self._queue = [copy for copy in self._queue if copy.key not in late]
            self._first_done_ms += demanded_ms
            return now_ms + demanded_ms, wanted
        begin_ms = self._first_done_ms if moving else now_ms
        done_ms = begin_ms + demanded_ms
        self._queue = [copy for copy in waiting if copy.key not in late]
        self._first_done_ms = done_ms + self.record_ms
        return done_ms, moving + wanted
