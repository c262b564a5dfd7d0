"""What is chosen from, and the contract of who measures it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

from hetero_runtime.config import Config


class Candidate(NamedTuple):
    """One way to run the model."""

    name: str
    config: Config

    @property
    def is_exact(self) -> bool:
        """Whether routers choose as they would with all experts resident."""
        return self.config.routing.policy in ("exact", "block_selection")


class Measured(NamedTuple):
    """One short run."""

    ms_per_token: float
    kl: float
    """Nats a token from the exact model to this one, on text of the exact model; 0 where routing is exact."""
    kl_error: float
    """Standard error of `kl`."""
    num_tokens: int


class Measurer(ABC):
    """Runs candidates one after another."""

    @abstractmethod
    def measure(self, candidate: Candidate) -> Measured:
        """Load and run it for a moment; the first one has to be exact. Raises ConfigError, CheckpointError,
        BudgetError or DeviceError for what this machine or model cannot do."""
