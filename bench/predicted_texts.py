"""Recorded texts that every engine decodes alike, whatever its weights: what `predicted_decode` replays.

    recording   | text 0: warms up  | text 1 ........... | text 2 ... | text 0
    run         | prompt | decoded  | prompt | timed     | ...        | token | counted

What is counted beside the simulator is text 0 once more, behind one token of it: an engine reads a prompt in
one pass, the simulator token by token.

Routers say the trace, also when they are asked a layer early, and the head says the trace's next token, so
each horizon of a forecast hears what it would have heard of the recorded model: routers so far (step), the
token just sampled (token), the next layer's router (layer). What a trace does not hold is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from bench.decode_case import Decode, decode, settle
from bench.traces.compact import first_documents
from bench.traces.laid_over import whole_documents
from bench.traces.routers import Recital, early_routers_recite, recite, say_tokens
from hetero_runtime.assembly import Parts
from hetero_runtime.config.tree import Horizon
from hetero_runtime.engine import Engine
from hetero_runtime.hf.router_hooks import routed_layers
from hetero_scheduler.trace import Trace

PROMPT = 16
MOST_TRIES = 12


class Texts(NamedTuple):
    """The documents of `trace`: a prompt and `tokens` decoded ones each. The first only warms up."""

    trace: Trace
    tokens: int

    @classmethod
    def of(cls, trace: Trace, *, tokens: int, runs: int, vocab_size: int) -> Texts:
        """One of `trace`'s documents for each of `runs`, and one before them.

        Raises ValueError where the trace has too few that long, or names tokens outside the vocabulary.
        """
        if trace.tokens.max() >= vocab_size:
            raise ValueError(f"token {trace.tokens.max()} of the trace: the model has {vocab_size} tokens")
        whole = whole_documents(trace, PROMPT + tokens)
        num_documents = len(whole.bounds) - 1
        if num_documents <= runs:
            raise ValueError(
                f"{num_documents} documents of {PROMPT + tokens} tokens, and {runs + 1} are to be decoded: "
                "fewer --runs or --tokens"
            )
        return cls(first_documents(whole, runs + 1), tokens)

    @property
    def begins(self) -> list[int]:
        """Where each begins in the trace."""
        return [int(begin) for begin in self.trace.bounds[:-1]]

    @property
    def counted(self) -> int:
        """Tokens that are counted beside the simulator."""
        return PROMPT + self.tokens - 1

    def with_counted(self) -> Trace:
        """All that an engine reads, the counted tokens last."""
        return Trace.joined([self.trace, first_documents(self.trace, 1)])

    def said(self, begin: int, count: int) -> list[int]:
        """The `count` tokens from there."""
        return [int(token) for token in self.trace.tokens[begin : begin + count]]

    def check(self, horizon: Horizon) -> None:
        """Raise ValueError where forecasts as near as `horizon` would not hear what was recorded."""
        if horizon == "layer" and self.trace.early is None:
            raise ValueError(
                "the trace does not hold what routers say one layer early, so the horizon layer would hear "
                "random weights; ask for --horizon token or step, or keep a trace with "
                "`python -m bench.traces.compact --early`"
            )


@contextmanager
def recited(parts: Parts, texts: Texts, *, asks_early: bool) -> Iterator[Recital]:
    """From now on the model of `parts` says `texts`; inside, also to who asks its routers early. A step that
    was captured before must be captured again."""
    num_layers = len(routed_layers(parts.model))
    recital = Recital(texts.trace, num_layers=num_layers, device=parts.device, asks_early=asks_early)
    recite(parts.model, recital)
    say_tokens(parts.model, recital)
    if not asks_early:
        yield recital
        return
    with early_routers_recite(recital):
        yield recital


def settle_on_first(parts: Parts, engine: Engine, recital: Recital, texts: Texts) -> None:
    """Decode the first text until all captured steps were tried, MOST_TRIES times at most. Raises as
    `decode_texts`."""
    begin = texts.begins[0]
    settle(
        parts.orchestrator,
        lambda _: _decode(engine, recital, texts, begin=begin, prompt=PROMPT),
        MOST_TRIES,
    )


def decode_texts(engine: Engine, recital: Recital, texts: Texts) -> tuple[Decode, ...]:
    """All but the first, which is decoded too. Raises RuntimeError where the engine says another text."""
    decodes = [_decode(engine, recital, texts, begin=begin, prompt=PROMPT) for begin in texts.begins]
    engine.check()
    return tuple(decodes[1:])


def decode_counted(engine: Engine, recital: Recital, texts: Texts) -> Decode:
    """The first text once more, behind one token of it. Raises as `decode_texts`."""
    decoded = _decode(engine, recital, texts, begin=0, prompt=1)
    engine.check()
    return decoded


def _decode(engine: Engine, recital: Recital, texts: Texts, *, begin: int, prompt: int) -> Decode:
    """The text that begins there, all of it, behind a prompt of so many of its tokens."""
    expected = texts.said(begin, PROMPT + texts.tokens)
    recital.seek(begin)
    decoded, said = decode(engine, expected[:prompt], len(expected) - prompt)
    if list(said[:-1]) != expected[prompt:]:
        raise RuntimeError(f"recorded is {expected[prompt:][:8]}..., the engine said {said[:8]}...")
    return decoded
