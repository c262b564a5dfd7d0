"""What looks ahead while layers run, by whatever it knows of layers to come."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection

import numpy as np
import numpy.typing as npt

from hetero_scheduler import ExpertKey


class Ahead(ABC):
    """Told by the orchestrator of every MoE layer of a pass, in this order; may prefetch in the last two."""

    @abstractmethod
    def layer_begins(self, chosen: npt.NDArray[np.int64]) -> None:
        """A MoE layer of the pass begins. `chosen` `[tokens, top_k]`: its experts."""

    def kept(self, layer: int) -> Collection[ExpertKey]:
        """Prefetches for `layer` that stay on their way although it runs without them. None, unless said."""
        return ()

    @abstractmethod
    def look_ahead(self, layer: int, running: list[ExpertKey]) -> None:
        """All loads of `layer` are submitted. `running`: its experts, all resident or on their way, which
        have to stay."""

    @abstractmethod
    def layer_ends(self, layer: int, running: list[ExpertKey]) -> None:
        """The link may have room. `running`: experts that stay."""
