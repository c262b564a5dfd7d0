"""The full-forward harness: whole texts through the model that serves, many rows at once.

    row 0   t t t t t t t t      one pass; each row is a request of its own
    row 1   t t t t t . . .      filled up at its end, where causality hides it from all that counts
    row 2   t t t . . . . .

A teacher-forced token needs no step of its own: its context is known, so a pass over rows says what as many
decode steps would. The experts run through the engine's orchestrator, offloaded like in serving. The model
says the same in both ways up to the order of float sums (PSR §5).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch

from hetero_runtime.assembly import Parts
from hetero_runtime.errors import ConfigError, RequestError
from hetero_runtime.evaluation.base import RowScore, TokenIds, TokensSeen
from hetero_runtime.hf.forward import forward_rows
from hetero_runtime.no_room import no_room_for
from hetero_runtime.orchestrator import Phase
from hetero_runtime.routing import Routing, TextPart

_LOGITS_AT_ONCE = 2**27
"""Elements of the logits of one pass, at most (but for one row): 512 MiB in float32."""


class Harness:
    """Scores rows by the model of `parts`, which nothing else may use meanwhile.

    `rows_at_once`: most rows of a pass; fewer where their logits would take too much memory. `routing`: the
    policy that the model's routers ask; None: the one that `parts` were built with.
    """

    def __init__(self, parts: Parts, *, rows_at_once: int = 16, routing: Routing | None = None) -> None:
        if rows_at_once < 1:
            raise RequestError(f"rows is {rows_at_once}; run 1 row or more at once")
        if parts.config.routing.policy == "block_selection":
            raise ConfigError(
                "routing.policy: block_selection chooses experts for drafts, and a text that is given has "
                "none; write routing.policy: exact, or let the engine answer"
            )
        self._parts, self._rows_at_once = parts, rows_at_once
        self._routing = parts.routing if routing is None else routing
        self._vocab_size = int(parts.model.config.get_text_config(decoder=True).vocab_size)

    @property
    def max_length(self) -> int:
        """Tokens of the longest row."""
        return self._parts.config.execution.max_length

    def score(self, rows: Sequence[TokenIds], *, seen: TokensSeen | None = None) -> list[RowScore]:
        """What the model says of each row, in the order of `rows`, each of 2 tokens or more.

        Raises RequestError where a row is too long or too short.
        """
        self._check(rows)
        scores: dict[int, RowScore] = {}
        num_tokens, num_done = sum(map(len, rows)), 0
        for batch in self._batches(rows):
            for index, score in zip(batch, self._score_batch([rows[i] for i in batch]), strict=True):
                scores[index] = score
            num_done += sum(len(rows[i]) for i in batch)
            if seen is not None:
                seen(num_done, num_tokens)
        return [scores[i] for i in range(len(rows))]

    def _check(self, rows: Sequence[TokenIds]) -> None:
        for i, row in enumerate(rows):
            if not 2 <= len(row) <= self.max_length:
                raise RequestError(
                    f"row {i} has {len(row)} tokens; a row has 2 or more and at most execution.max_length, "
                    f"{self.max_length}: cut it, or raise that key where the model's context allows"
                )

    def _batches(self, rows: Sequence[TokenIds]) -> Iterator[list[int]]:
        """Indices into `rows`, the longest first, so that what does not fit in memory is known at once."""
        order = sorted(range(len(rows)), key=lambda i: -len(rows[i]))
        while order:
            fitting = _LOGITS_AT_ONCE // (len(rows[order[0]]) * self._vocab_size)
            count = max(1, min(self._rows_at_once, fitting))
            yield order[:count]
            order = order[count:]

    def _routed(self, rows: Sequence[TokenIds]) -> AbstractContextManager[None]:
        """Each row with a logical cache of its own, which what fills it up does not reach."""
        if self._routing is None:
            return nullcontext()
        return self._routing.pass_of([TextPart(self._routing.new_cache(), np.array(row)) for row in rows])

    def _score_batch(self, rows: list[TokenIds]) -> list[RowScore]:
        parts, lengths = self._parts, [len(row) for row in rows]
        ids = torch.zeros(len(rows), max(lengths), dtype=torch.long)
        for row, tokens in zip(ids, rows, strict=True):
            row[: len(tokens)] = torch.tensor(tokens)
        fix = "run fewer rows at once (--rows), or shorter ones"
        with (
            parts.orchestrator.pass_(Phase.PREFILL, checkpoint=_go_on),
            self._routed(rows),
            no_room_for(f"a pass over {ids.numel()} tokens", parts.device, fix=fix),
        ):
            logits = forward_rows(parts.model, ids.to(parts.device))  # [rows, longest, vocab]
            return [
                _score_row(logits[i, : n - 1], ids[i, 1:n].to(parts.device)) for i, n in enumerate(lengths)
            ]


def _score_row(logits: torch.Tensor, following: torch.Tensor) -> RowScore:
    """`logits` `[n, vocab]` of the model after each token, `following` `[n]` what came next."""
    log_likelihood = torch.log_softmax(logits.float(), dim=-1)
    nats = -log_likelihood.gather(1, following[:, None])[:, 0]
    is_sound = torch.isfinite(nats)
    if not bool(is_sound.all()):
        raise RequestError(
            f"the model gives NaN or infinite logits at token {int(is_sound.int().argmin()) + 1}; check it "
            "with `hetero-runtime verify`"
        )
    is_greedy = logits.argmax(dim=-1) == following
    return RowScore(nats.double().cpu().numpy(), is_greedy.cpu().numpy().astype(np.bool_))


def _go_on() -> None:
    return
