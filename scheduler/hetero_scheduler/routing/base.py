"""The contract of a routing policy: a few numbers that one step reads.

The policies of PSR and of its baselines are points of one space, so there is one step (`scan.py`, and written
down plainly in `reference.py`), and a policy is where in that space it lies.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Literal, NamedTuple

Priority = Literal["lru", "a"]
"""Who is evicted last. lru: executed or inserted last. a: PSR §4.1, two moving averages of the router's own
choices and the token prior."""
RangeOf = Literal["fixed", "running"]
"""What a bonus of 1 adds. fixed: the calibrated mean of max - min of a layer's scores. running: the mean over
the request so far, this token included."""


class Shape(NamedTuple):
    """Of the routed model."""

    num_layers: int
    num_experts: int
    top_k: int


class Rules(NamedTuple):
    """What a step reads of a policy. Neutral values: exact routing with an LRU cache beside it."""

    bonus: float = 0.0
    """Lambda: what an expert in the logical cache gains, in ranges of the layer's scores."""
    protected: int = 0
    """J: so many of the router's best gain the bonus wherever they are."""
    insertions: int = 0
    """n: new experts that a layer and token may insert from the pre-gate."""
    window: int = 0
    """Candidates of the pre-gate, from its best on."""
    is_running: bool = False
    """Whether the range is the running one."""
    is_lru: bool = True
    """Whether the priority is LRU's; otherwise A's."""
    executes_guess: bool = False
    """Whether the pre-gate's best top_k are executed in place of the router's choice."""


class RoutingPolicy(ABC):
    """Frozen parameters with a name. Subclasses raise ValueError for values that mean nothing."""

    name: ClassVar[str]

    @property
    @abstractmethod
    def rules(self) -> Rules:
        """The numbers of a step."""

    @property
    def looks_ahead(self) -> bool:
        """Whether the policy listens to the next layer's router, one layer early."""
        return self.rules.insertions > 0 or self.rules.executes_guess

    @property
    def is_exact(self) -> bool:
        """Whether the router's own choice is executed, whatever the cache holds."""
        return self.rules.bonus == 0 and not self.rules.executes_guess


def check_bonus(bonus: float) -> None:
    """Raise ValueError unless `bonus` is a finite number of 0 or more."""
    if not 0 <= bonus < float("inf"):
        raise ValueError(f"bonus is {bonus}; give a finite number of 0 or more")


def check_steering(insertions: int, window: int) -> None:
    """Raise ValueError unless both are counts."""
    if insertions < 0 or window < 1:
        raise ValueError(f"insertions {insertions} and window {window}; give 0 or more, and 1 or more")


def check_priority(priority: str) -> None:
    """Raise ValueError for a name that is no priority."""
    if priority not in ("lru", "a"):
        raise ValueError(f"unknown priority {priority!r}; known: lru, a")
