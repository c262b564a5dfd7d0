"""From candidates to the parts of an engine."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

from hetero_runtime.assembly import Parts
from hetero_runtime.experts.store import Progress
from hetero_runtime.tuning.base import Candidate
from hetero_runtime.tuning.choose import Choice, choose
from hetero_runtime.tuning.measure import EngineMeasurer

log = logging.getLogger(__name__)


class Settled(NamedTuple):
    """The best candidate, loaded, and how it was chosen."""

    parts: Parts
    choice: Choice


def settle(candidates: Sequence[Candidate], *, progress: Progress | None = None) -> Settled:
    """Measure, choose, say why to the log, and load the best one.

    Raises what loading the first candidate raises.
    """
    measurer = EngineMeasurer(candidates, progress)
    try:
        choice = choose(candidates, measurer, kl_budget=candidates[0].config.routing.kl_budget)
        for line in choice.lines():
            log.info("preset: auto: %s", line)
        return Settled(measurer.take(choice.best), choice)
    finally:
        measurer.close()
