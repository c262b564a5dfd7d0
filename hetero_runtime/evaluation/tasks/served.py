"""Answers of the model that serves: likelihoods by batched full forwards, generated text by the engine.

The two are loaded one at a time, when they are first asked: full forwards are driven by the host, and text is
generated as the configuration says, by captured steps where it means them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

from hetero_runtime.engine import Engine
from hetero_runtime.evaluation.base import TokensSeen
from hetero_runtime.evaluation.harness import Harness
from hetero_runtime.evaluation.tasks.base import Answers, Likelihood
from hetero_runtime.evaluation.tasks.requests import sampling_params
from hetero_runtime.evaluation.tasks.spans import Span, SpanReader

AnswersDone = Callable[[int, int], None]
"""Called with (texts generated, texts in all)."""


class ServedAnswers(Answers):
    """`open_harness`, `open_engine`: load the model until their context is left. `seen`: while full forwards
    run; `answered`: while texts are generated."""

    def __init__(
        self,
        tokenizer: Any,
        reader: SpanReader,
        *,
        open_harness: Callable[[], AbstractContextManager[Harness]],
        open_engine: Callable[[], AbstractContextManager[Engine]],
        seen: TokensSeen | None = None,
        answered: AnswersDone | None = None,
    ) -> None:
        self._tokenizer, self._reader = tokenizer, reader
        self._seen, self._answered = seen, answered
        self._open_harness, self._open_engine = open_harness, open_engine

    def likelihoods(self, pairs: Sequence[tuple[str, str]]) -> list[Likelihood]:
        spans = [self._reader.pair(context, continuation) for context, continuation in pairs]
        return self._score(spans)

    def rolling(self, texts: Sequence[str]) -> list[float]:
        windows = [self._reader.windows(text) for text in texts]
        scored = iter(self._score([span for each in windows for span in each]))
        return [sum(next(scored).log_likelihood for _ in each) for each in windows]

    def generate(self, prompts: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
        params = [sampling_params(settings) for _, settings in prompts]
        ids = [
            self._reader.prompt(text, each.max_tokens)
            for (text, _), each in zip(prompts, params, strict=True)
        ]
        if not ids:
            return []
        with self._open_engine() as engine, ThreadPoolExecutor(engine.config.execution.max_rows) as rows:
            texts = []
            for completion in rows.map(engine.generate, ids, params):
                texts.append(completion.text)
                if self._answered is not None:
                    self._answered(len(texts), len(ids))
            return texts

    def chat_prompt(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool) -> str:
        text: str = self._tokenizer.apply_chat_template(
            list(messages),
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        return text

    def _score(self, spans: Sequence[Span]) -> list[Likelihood]:
        if not spans:
            return []
        rows = list(dict.fromkeys(span.row for span in spans))  # a row asked for twice runs once
        with self._open_harness() as harness:
            scores = dict(zip(rows, harness.score(rows, seen=self._seen), strict=True))
        return [
            Likelihood(span.log_likelihood(scores[span.row]), span.is_greedy(scores[span.row]))
            for span in spans
        ]
