"""The model as lm-eval wants it: requests in, answers out, nothing decided here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lm_eval.api.model import LM

from hetero_runtime.evaluation.tasks.base import Answers


class ServedLM(LM):  # type: ignore[misc]  # lm-eval carries no types
    """lm-eval's face of `answers`. `name`: what its reports call the model."""

    def __init__(self, answers: Answers, *, name: str) -> None:
        super().__init__()
        self._answers, self._name = answers, name

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """`args` of each request: (context, continuation)."""
        likelihoods = self._answers.likelihoods([request.args for request in requests])
        return [(each.log_likelihood, each.is_greedy) for each in likelihoods]

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """`args` of each request: (text,)."""
        return self._answers.rolling([request.args[0] for request in requests])

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """`args` of each request: (prompt, settings)."""
        return self._answers.generate([request.args for request in requests])

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The prompt that a chat makes."""
        return self._answers.chat_prompt(chat_history, add_generation_prompt=add_generation_prompt)

    @property
    def tokenizer_name(self) -> str:
        """In the keys of lm-eval's caches."""
        return self._name
