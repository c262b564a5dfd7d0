"""The contract of a stepper."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager

import torch

from hetero_runtime.generation import Request
from hetero_runtime.passes import Checkpoint


class Tokens(ABC):
    """The answer to one request, token by token. One thread at a time."""

    @abstractmethod
    def first(self, images: dict[str, torch.Tensor]) -> int:
        """Run the prompt and give the first token. `images`: the model's own inputs, on any device."""

    @abstractmethod
    def next(self) -> int:
        """The token after the last one. Raises RequestError when its logits are unsound, and whatever the
        pass raised; `max_tokens` of the request is the most that may be asked for."""


class Stepper(ABC):
    """Serves any number of threads; each request has its own `Tokens`."""

    @abstractmethod
    def open(self, request: Request, checkpoint: Checkpoint) -> AbstractContextManager[Tokens]:
        """A place in the model for `request`, until the context is left. There must be one (callers hold a
        permit). `checkpoint` raises when the request is no longer wanted."""
