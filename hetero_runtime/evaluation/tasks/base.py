"""What a benchmark asks of a model. No word of lm-eval here: any other asker could stand in its place."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class Likelihood(NamedTuple):
    """Of a continuation, given its context."""

    log_likelihood: float
    """Nats, the sum over its tokens; never above 0."""
    is_greedy: bool
    """Whether greedy decoding would have said exactly it."""


class Answers(ABC):
    """A model that answers. All methods keep the order of what they are given; texts, no token ids.

    All raise RequestError for a text that the model cannot take.
    """

    @abstractmethod
    def likelihoods(self, pairs: Sequence[tuple[str, str]]) -> list[Likelihood]:
        """Of (context, continuation). An empty context stands for the beginning of a text. Where both do not
        fit, the context loses its beginning."""

    @abstractmethod
    def rolling(self, texts: Sequence[str]) -> list[float]:
        """Log-likelihood of whole texts, each token given as much before it as fits."""

    @abstractmethod
    def generate(self, prompts: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
        """The text that follows each (prompt, settings), greedy unless the settings say otherwise. Settings
        are lm-eval's: `until`, `max_gen_toks`, `do_sample`, `temperature`, `top_p`, `top_k`. A prompt that is
        too long loses its beginning."""

    @abstractmethod
    def chat_prompt(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool) -> str:
        """`messages` as the text that the model's chat template makes of them."""
