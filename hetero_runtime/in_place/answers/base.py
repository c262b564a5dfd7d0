"""The contract of who answers the calls of a captured step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

from hetero_gpu.control import ControlRegion
from hetero_gpu.in_place import Mailbox
from hetero_runtime.in_place.misses import InPlaceStats


class CallLine(NamedTuple):
    """What both ends of a call share."""

    mailbox: Mailbox
    region: ControlRegion


class Answers(ABC):
    """Answers each call with the sum of its experts, or, where computing them fails, with zeros."""

    @abstractmethod
    def run(self, answered: int) -> None:
        """Answer the calls after number `answered`, until the region's STOP is set. Raises what went wrong in
        a call, which is answered then: whoever calls this goes on with the next."""

    @abstractmethod
    def stats(self) -> InPlaceStats:
        """Of all calls so far; from any thread."""
