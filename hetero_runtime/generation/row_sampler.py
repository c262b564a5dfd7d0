"""Choosing the next token of several requests at once, on the device, inside a captured step.

    logits [rows, vocab] ─► penalty ─► argmax ───────────────────────────────┐
                               │                                             ├─► tokens [rows]
                               └─► temperature ─► sort ─► top-k, top-p, min-p ─► one draw by inverse CDF

The settings of each row lie on the device, so one captured step serves any mixture of requests. What is
random comes from the host: one uniform number a token, from a generator of the request's own, so a seeded
request gives the same tokens whatever else is served. `Sampler` is the reference of the transforms.
"""

from __future__ import annotations

import torch

from hetero_runtime.generation.params import SamplingParams

UNSOUND = -1
"""In place of a token: the logits held NaN or infinity, or left float32 on the way."""

_ALL = 2.0
"""A top-p above every sum of probabilities, rounded or not."""


class RowSampler:
    """Settings and history of `rows` requests over a vocabulary of `vocab_size`, on `device`."""

    def __init__(self, rows: int, vocab_size: int, device: torch.device) -> None:
        def of(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.full((rows, 1), value, dtype=dtype, device=device)

        self._temperature, self._top_p, self._min_p, self._penalty = of(1.0), of(_ALL), of(0.0), of(1.0)
        self._top_k = of(vocab_size, torch.long)
        self._is_greedy = of(1, torch.bool)
        self._seen = torch.zeros((rows, vocab_size), dtype=torch.bool, device=device)
        self._vocab_size = vocab_size

    def set(self, row: int, params: SamplingParams, history: torch.Tensor) -> None:
        """Serve a new request in `row`. `history`: ids `[n]` on the device, for the repetition penalty."""
        self._temperature[row] = 1.0 if params.is_greedy else params.temperature
        self._top_p[row] = params.top_p if params.top_p < 1 else _ALL
        self._min_p[row] = params.min_p
        self._penalty[row] = params.repetition_penalty
        self._top_k[row] = min(params.top_k or self._vocab_size, self._vocab_size)
        self._is_greedy[row] = params.is_greedy
        self._seen[row] = False
        if params.repetition_penalty != 1:
            self._seen[row, history] = True

    @staticmethod
    def is_plain(params: SamplingParams) -> bool:
        """Whether `greedy` is enough for a request."""
        return params.is_greedy and params.repetition_penalty == 1

    def greedy(self, logits: torch.Tensor) -> torch.Tensor:
        """The most likely tokens of requests that are all plain. `[n, vocab]` float32 to `[n]` int64; UNSOUND
        where the logits are."""
        return torch.where(torch.isfinite(logits).all(-1), logits.argmax(-1), UNSOUND)

    def draw(
        self, logits: torch.Tensor, uniforms: torch.Tensor, *, is_active: torch.Tensor, first_row: int = 0
    ) -> torch.Tensor:
        """Tokens of the rows from `first_row` on, whatever they ask for.

        `logits`: `[n, vocab]` float32. `uniforms`: `[n]`, in [0, 1). `is_active`: bool `[n]`, rows whose
        token counts as seen. Returns `[n]` int64; UNSOUND where logits or scores are no finite numbers.
        Nothing is read by the host.
        """
        rows = slice(first_row, first_row + len(logits))
        scores = self._penalised(logits, rows)
        chosen = torch.where(self._is_greedy[rows, 0], scores.argmax(-1), self._drawn(scores, uniforms, rows))
        is_sound = torch.isfinite(logits).all(-1) & torch.isfinite(scores.amax(-1))
        index = chosen[:, None]
        self._seen[rows].scatter_(1, index, self._seen[rows].gather(1, index) | is_active[:, None])
        return torch.where(is_sound, chosen, UNSOUND)

    def kept(self, logits: torch.Tensor, *, first_row: int = 0) -> torch.Tensor:
        """Probabilities from which `draw` takes one, `[n, vocab]`: 0 for what the filters drop."""
        rows = slice(first_row, first_row + len(logits))
        probabilities, order = self._filtered(self._penalised(logits, rows), rows)
        return torch.zeros_like(logits).scatter(1, order, probabilities)

    def _penalised(self, logits: torch.Tensor, rows: slice) -> torch.Tensor:
        penalty = self._penalty[rows]
        scaled = torch.where(logits < 0, logits * penalty, logits / penalty)
        return torch.where(self._seen[rows], scaled, logits) / self._temperature[rows]

    def _filtered(self, scores: torch.Tensor, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Probabilities that are left, most likely first, and their tokens; both `[n, vocab]`."""
        ranked, order = scores.sort(dim=-1, descending=True, stable=True)
        last = ranked.gather(1, self._top_k[rows] - 1)
        probabilities = torch.softmax(ranked.masked_fill(ranked < last, -torch.inf), dim=-1)
        before = probabilities.cumsum(-1) - probabilities  # exclusive, so that the first always stays
        is_kept = (before < self._top_p[rows]) & (probabilities >= self._min_p[rows] * probabilities[:, :1])
        probabilities = probabilities * is_kept
        return probabilities / probabilities.sum(-1, keepdim=True), order

    def _drawn(self, scores: torch.Tensor, uniforms: torch.Tensor, rows: slice) -> torch.Tensor:
        probabilities, order = self._filtered(scores, rows)
        cumulative = probabilities.cumsum(-1)
        num_kept = (probabilities > 0).sum(-1, keepdim=True)
        place = (cumulative <= uniforms[:, None] * cumulative[:, -1:]).sum(-1, keepdim=True)
        return order.gather(1, place.minimum((num_kept - 1).clamp_min(0)))[:, 0]
