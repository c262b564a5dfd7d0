"""The contract of a text under way: what it hears of its passes, and what that lets it say."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from hetero_scheduler.predict import Forecast


class Said(NamedTuple):
    """A forecast. `runs_now`: its next run is in the pass under way; otherwise in the text's next one."""

    forecast: Forecast
    runs_now: bool


class Text(ABC):
    """One text. Of each pass it is told, in this order:

    begin_pass, begin_step       a pass begins; the id that runs, where it is one
    see                          before `hear`, where there is news of what its images look like
    hear, decided, speak         of each MoE layer: its router spoke, its experts are known; what now?
    """

    orders_prompts: bool = False
    """Whether it says of a prompt, layer by layer, what comes next in it."""
    sees: bool = False
    """Whether it wants to know what images look like."""

    def __init__(self) -> None:
        self.is_new = True
        """Whether no pass of this text has begun yet."""

    @abstractmethod
    def begin(self) -> None:
        """A new text: nothing is known of it."""

    @abstractmethod
    def begin_pass(self) -> None:
        """What was heard of a pass that was given up is forgotten."""

    def begin_step(self, token: int) -> list[Forecast]:
        """The next token is known. What that lets it say of the pass that runs it."""
        return []

    def see(self, visual: torch.Tensor) -> None:  # noqa: B027 (most look at routing alone)
        """`visual` `[hidden_size]`: the mean embedding of the image tokens that go on."""

    @abstractmethod
    def hear(self, layer: int, logits: torch.Tensor, hidden: torch.Tensor) -> None:
        """As in `listen_to_routers`."""

    def decided(self, layer: int, chosen: npt.NDArray[np.int64]) -> None:  # noqa: B027 (logits say most)
        """The experts of `layer`, `[tokens, top_k]`."""

    @abstractmethod
    def speak(self, layer: int) -> list[Said]:
        """What the routing of `layer` lets it say anew; nothing where that was not heard."""
