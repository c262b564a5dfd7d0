"""Texts whose likelihood is asked for, as rows with the span that counts.

    context "The river"   continuation " froze over"   ─►   row  t t t t t t    span 3:6

The pair is tokenised as one text, so that a continuation has the tokens that it has in running text.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from hetero_runtime.errors import RequestError
from hetero_runtime.evaluation.base import RowScore, TokenIds


class Span(NamedTuple):
    """The tokens of `row` from `begin` on are asked for."""

    row: TokenIds
    begin: int

    def log_likelihood(self, score: RowScore) -> float:
        """The sum over the span, of the score of the row."""
        return -float(score.nats[self.begin - 1 :].sum())

    def is_greedy(self, score: RowScore) -> bool:
        """Whether every token of the span is what greedy decoding would have said."""
        return bool(score.is_greedy[self.begin - 1 :].all())


class SpanReader:
    """Reads texts for one model. `begin_token`: what stands before a text that has nothing before it."""

    def __init__(self, tokenizer: Any, *, begin_token: int, max_length: int) -> None:
        self._tokenizer, self._begin, self._max_length = tokenizer, begin_token, max_length

    def pair(self, context: str, continuation: str) -> Span:
        """Raises RequestError for a continuation without tokens, or longer than a row."""
        if not context:
            ids = self._plain(continuation)
            row, begin = (ids, 1) if ids[:1] == [self._begin] else ([self._begin, *ids], 1)
        else:
            blank = context[len(context.rstrip()) :]  # a token of its own would not occur in running text
            context = context.removesuffix(blank)
            row = list(self._tokenizer(context + blank + continuation)["input_ids"])
            begin = len(self._tokenizer(context)["input_ids"]) if context else 0
            if not begin:
                row, begin = [self._begin, *row], 1
        if begin >= len(row):
            raise RequestError(f"the continuation {continuation!r:.60} has no tokens; give a text")
        if len(row) - begin >= self._max_length:
            raise RequestError(
                f"the continuation {continuation!r:.60} has {len(row) - begin} tokens, and a row holds "
                f"{self._max_length} with a token before it; raise execution.max_length, or leave it out"
            )
        cut = max(0, len(row) - self._max_length)
        return Span(tuple(row[cut:]), begin - cut)

    def windows(self, text: str) -> list[Span]:
        """Rows that predict every token of `text` once, each the longest that fits. RequestError when `text`
        has no tokens."""
        ids = self._plain(text)
        row = ids if ids[:1] == [self._begin] else [self._begin, *ids]
        if len(row) < 2:
            raise RequestError(f"the text {text!r:.60} has no tokens; give a text")
        spans, step = [], self._max_length - 1
        for begin in range(1, len(row), step):
            end = min(begin + step, len(row))
            start = max(0, end - self._max_length)
            spans.append(Span(tuple(row[start:end]), begin - start))
        return spans

    def prompt(self, text: str, num_new: int) -> list[int]:
        """Token ids of `text`, the last ones where `num_new` more would not fit. Raises RequestError where
        there is room for none."""
        room = self._max_length - num_new
        if room < 1:
            raise RequestError(
                f"max_gen_toks is {num_new}, and a row holds {self._max_length} tokens; lower it, or raise "
                "execution.max_length"
            )
        ids = list(self._tokenizer(text)["input_ids"]) or [self._begin]
        return ids[-room:]

    def _plain(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])


def begin_token(tokenizer: Any) -> int:
    """The token that stands before a text: the one that begins texts, or else the one that ends them.

    Raises RequestError where the tokenizer has neither.
    """
    for token in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if token is not None:
            return int(token)
    raise RequestError(
        "the tokenizer has no token that begins or ends a text, so nothing can stand before one"
    )
