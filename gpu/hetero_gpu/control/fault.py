"""What a kernel reports when it could not do what it was asked."""

from __future__ import annotations

from enum import IntEnum


class TableError(IntEnum):
    """Value of the error word; it stays until the host has read it, so nothing is lost between two visits."""

    NONE = 0
    NO_SLOT = 1
    BAD_EXPERT = 2
    BAD_LANDING = 3
    FORECAST_STALLED = 4
    NO_ANSWER = 5

    def explain(self) -> str:
        """One sentence for a user."""
        return _EXPLANATIONS[self]


_EXPLANATIONS = {
    TableError.NONE: "no error",
    TableError.NO_SLOT: (
        "a layer needed more experts than there are slots that may be evicted: too few slabs for top-k times "
        "rows, or prefetches that never landed hold them"
    ),
    TableError.BAD_EXPERT: "the router chose an expert that the model does not have",
    TableError.BAD_LANDING: "the prefetch worker reported a copy that nobody asked for",
    TableError.FORECAST_STALLED: "programs of a forecast waited in vain for each other",
    TableError.NO_ANSWER: "a layer waited in vain for the experts that the CPU was to compute",
}
