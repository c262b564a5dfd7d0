"""The contract of a prefetch schedule: which expert does the link carry next?

Time is counted in positions: pos = step · num_layers + layer, one for each run of a MoE layer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from hetero_scheduler.keys import ExpertKey


class Task(NamedTuple):
    """One expert that may be worth a transfer. `confidence`: its expected hits, in 0..1. `deadline`: the pos
    at which its layer runs and needs it."""

    key: ExpertKey
    confidence: float
    deadline: int


@dataclass(frozen=True)
class Tasks:
    """Many tasks as columns, `[num_tasks]` each: a schedule looks at hundreds of them for every transfer."""

    layer: npt.NDArray[np.int64]
    expert: npt.NDArray[np.int64]
    confidence: npt.NDArray[np.float64]
    deadline: npt.NDArray[np.int64]

    @classmethod
    def of(cls, tasks: Iterable[Task]) -> Tasks:
        """The same tasks as columns."""
        rows = [(*task.key, task.confidence, task.deadline) for task in tasks]
        layer, expert, confidence, deadline = zip(*rows, strict=True) if rows else ((), (), (), ())
        return cls(
            np.array(layer, dtype=np.int64),
            np.array(expert, dtype=np.int64),
            np.array(confidence, dtype=np.float64),
            np.array(deadline, dtype=np.int64),
        )

    def __len__(self) -> int:
        """Number of tasks."""
        return int(self.deadline.size)

    def __getitem__(self, index: int) -> Task:
        """Task `index`."""
        key = ExpertKey(int(self.layer[index]), int(self.expert[index]))
        return Task(key, float(self.confidence[index]), int(self.deadline[index]))

    def take(self, indices: npt.NDArray[np.intp] | npt.NDArray[np.bool_] | slice) -> Tasks:
        """The tasks at `indices`, or where a mask is set."""
        return Tasks(
            self.layer[indices], self.expert[indices], self.confidence[indices], self.deadline[indices]
        )


class Schedule(ABC):
    """Candidates come from forecasts; `next` hands them out one transfer at a time.

        update(tasks)              a forecast arrived
        next(pos, is_present)      the link is free: what now?      → Task | None
        landed(task, num_positions)    that transfer ended; ask `next` again
        clear()                    a new document, positions start anew

    Implementations say in `_choose` what they prefer. Pure: no clock, no I/O; not thread-safe.
    """

    name: ClassVar[str]
    lead: int = 2
    """A task is dropped once fewer than this many positions are left until its deadline: with 2, one for the
    very next layer comes too late (SeqMoE Algorithm 1, line 4). 1 where forecasts of the very next layer
    come in, sure enough for a copy that arrives late to be worth more than one that is not begun."""

    def __init__(self, num_layers: int) -> None:
        if num_layers < 1:
            raise ValueError(f"num_layers is {num_layers}; at least 1 is needed")
        self.num_layers = num_layers
        self._tasks = Tasks.of(())

    def __len__(self) -> int:
        """Candidates held now, present and overdue ones included."""
        return len(self._tasks)

    def update(self, tasks: Tasks) -> None:
        """Take in a forecast: its tasks replace all candidates of the deadlines that it names, so a fresher
        forecast of a layer's run takes the place of the older one; other deadlines keep theirs."""
        kept = self._tasks.take(~np.isin(self._tasks.deadline, tasks.deadline))
        merged = [
            np.concatenate(columns)
            for columns in zip(
                (kept.deadline, kept.layer, kept.expert, kept.confidence),
                (tasks.deadline, tasks.layer, tasks.expert, tasks.confidence),
                strict=True,
            )
        ]
        deadline, layer, expert, confidence = merged
        order = np.lexsort((expert, layer, deadline))
        self._tasks = Tasks(layer, expert, confidence, deadline).take(order)

    def next(self, pos: int, is_present: npt.NDArray[np.bool_]) -> Task | None:
        """The task to transfer now, which is a candidate no longer; None when nothing is worth it.

        `pos`: the layer that runs now; it never goes back without `clear`. `is_present`: `[num_layers,
        num_experts]`, True for experts that hold a slot, resident or on their way; their tasks stay
        candidates, because they may be evicted before the deadline. The caller reserves a slot and submits
        the copy, or leaves it when no slot is free.
        """
        start = int(self._tasks.deadline.searchsorted(pos + self.lead))
        if start:
            self._tasks = self._tasks.take(slice(start, None))
        is_absent = ~is_present[self._tasks.layer, self._tasks.expert]
        index = self._choose(pos, self._tasks, np.flatnonzero(is_absent))
        if index is None:
            return None
        task = self._tasks[index]
        is_kept = np.ones(len(self._tasks), dtype=np.bool_)
        is_kept[index] = False
        self._tasks = self._tasks.take(is_kept)
        return task

    @abstractmethod
    def _choose(self, pos: int, tasks: Tasks, absent: npt.NDArray[np.intp]) -> int | None:
        """Index into `tasks` of the one to transfer, one of `absent`; None for none of them.

        `tasks` are sorted by (deadline, layer, expert) and none of them is overdue; `absent` ascends.
        """

    def landed(self, task: Task, num_positions: float) -> None:
        """The transfer of `task` ended after `num_positions` positions (fractions welcome, 0 when it began
        and ended within one). Only a schedule that budgets the link listens."""
        assert num_positions >= 0, f"the transfer of {task.key} took {num_positions} positions"

    def clear(self) -> None:
        """Forget all candidates; what was learned about the link stays."""
        self._tasks = Tasks.of(())
