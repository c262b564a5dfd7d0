"""Routers that do not compare their logits: from hidden states to scores, experts and weights in one launch.

    hidden ─► product, a few experts a program ─► logits ─► the last program to finish, token by token:
              gate + correction ─► scores ─► groups that are not among the best: -inf ─► top-k ─► weights

    sigmoid    scores are sigmoids plus a correction, a group is as good as its best two (DeepSeek-V3 §2.1.2)
    softmax    scores are logits, whose order is that of probabilities; a group is as good as its best expert
               (DeepSeek-V2 §2.2.2)

Weights are those of the gate alone, without correction. Among equal scores, and among equal groups, the one
of lower index is taken. As for `router`, which program is the last is a matter of timing; what it computes is
not. The next layer's router may say what it says of the same hidden states in the same launch.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"
# ruff: noqa: N803, N806 (compile-time constants are written in capitals)

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from hetero_gpu.linear import linear, load_lane, store_products
from hetero_gpu.overlap import meet, overlap_options
from hetero_gpu.router import MOST_EXPERTS, MOST_TOKENS, ROUTER_TILE, best_of, is_last_of
from hetero_gpu.weigh import WeightRule, shares_of, weigh, weigh_reference


@dataclass(frozen=True)
class ScoreForm:
    """What kernels are compiled for. `weighing.is_sigmoid` says how scores come out of logits too.

    `num_groups` divides `experts`; of them the best `kept_groups` are left. Raises ValueError for groups or a
    top-k that cannot be.
    """

    experts: int
    top_k: int
    weighing: WeightRule
    num_groups: int = 1
    kept_groups: int = 1

    def __post_init__(self) -> None:
        size = self.experts // self.num_groups
        if size * self.num_groups != self.experts or not 0 < self.kept_groups <= self.num_groups:
            raise ValueError(f"{self.kept_groups} of {self.num_groups} groups of {self.experts} experts")
        if not 0 < self.top_k <= self.kept_groups * size or self.experts > MOST_EXPERTS:
            raise ValueError(
                f"top-{self.top_k} of {self.kept_groups} groups of {size} experts; "
                f"{MOST_EXPERTS} experts at most"
            )


class Scored(NamedTuple):
    """What a router says of `T` tokens."""

    logits: torch.Tensor
    """`[T, E]`"""
    scores: torch.Tensor
    """What it takes its top-k of, -inf in groups that are left out: float32 `[T, E]`"""
    experts: torch.Tensor
    """Best first: int64 `[T, top_k]`"""
    weights: torch.Tensor
    """float32 `[T, top_k]`"""


class _Part(NamedTuple):
    """What programs of one router need."""

    weight: torch.Tensor
    correction: torch.Tensor
    scored: Scored
    programs_done: torch.Tensor


class ScoreRouter:
    """The whole router of one layer: one launch for up to `MOST_TOKENS` tokens, fit for a CUDA graph.

    `weight` `[E, size]`; `correction` float32 `[E]` or None, for sigmoid scores; `dtype`: of logits. The
    kernel launched just before may not write the weight. Calls may not overlap: a count of programs is kept
    between them.
    """

    def __init__(
        self, weight: torch.Tensor, correction: torch.Tensor | None, *, form: ScoreForm, dtype: torch.dtype
    ) -> None:
        assert correction is None or form.weighing.is_sigmoid, "a correction is one of sigmoid scores"
        if correction is None:
            correction = torch.zeros(form.experts, device=weight.device)
        self._weight, self._correction = weight.contiguous(), correction
        self._form, self._dtype = form, dtype
        self._programs_done = torch.zeros(1, dtype=torch.int32, device=weight.device)

    def __call__(self, hidden: torch.Tensor) -> Scored:
        """What it says of `hidden` `[T, size]`."""
        if len(hidden) > MOST_TOKENS:
            weight = self._weight.to(self._dtype)
            return self.choose(linear(hidden.to(self._dtype), weight))
        return self._in_one_launch(hidden, None)[0]

    def with_next(self, hidden: torch.Tensor, following: ScoreRouter) -> tuple[Scored, Scored]:
        """The same, and what `following`, a router of the same form, says of the same `hidden`."""
        assert following._form == self._form, "the layers of a model have routers of one form"
        if len(hidden) > MOST_TOKENS:
            return self(hidden), following(hidden)
        return self._in_one_launch(hidden, following)

    def _in_one_launch(self, hidden: torch.Tensor, following: ScoreRouter | None) -> tuple[Scored, Scored]:
        """What both say; the same twice where `following` is None."""
        routers = [self] if following is None else [self, following]
        shape = (len(hidden), self._form.experts)
        said = [router._room(hidden.new_empty(shape, dtype=router._dtype)) for router in routers]
        num_programs = triton.cdiv(self._form.experts, ROUTER_TILE.rows)
        parts = [
            _Part(router._weight, router._correction, scored, router._programs_done)
            for router, scored in zip(routers, said, strict=True)
        ]
        _route_scored_hidden[(len(routers) * num_programs,)](
            hidden.contiguous(),
            parts[0],
            None if following is None else parts[1],
            NUM_PROGRAMS=num_programs,
            FORM=self._form,
            HIDDEN=self._weight.shape[1],
            TOKENS=len(hidden),
            TOKEN_SLOTS=triton.next_power_of_2(len(hidden)),
            LANE=load_lane(self._weight),
            TILE=ROUTER_TILE,
            num_warps=ROUTER_TILE.num_warps,
            **overlap_options(hidden.device),
        )
        return said[0], said[-1]

    def choose(self, logits: torch.Tensor) -> Scored:
        """What it says of tokens whose `logits` `[T, E]` are known, of whatever type."""
        scored = self._room(logits.contiguous())
        _route_scored_token[(len(logits),)](
            self._correction, scored, FORM=self._form, num_warps=1, **overlap_options(logits.device)
        )
        return scored

    def weigh(self, logits: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """Weights float32 `[T, top_k]` by this router's rule of `experts` that somebody else chose."""
        return weigh(logits, experts, rule=self._form.weighing, dtype=torch.float32)

    def _room(self, logits: torch.Tensor) -> Scored:
        chosen = (len(logits), self._form.top_k)
        return Scored(
            logits,
            torch.empty_like(logits, dtype=torch.float32),
            logits.new_empty(chosen, dtype=torch.int64),
            logits.new_empty(chosen, dtype=torch.float32),
        )


def scored_reference(logits: torch.Tensor, correction: torch.Tensor | None, *, form: ScoreForm) -> Scored:
    """What `ScoreRouter.choose` says, in torch."""
    scores = logits.float()
    if form.weighing.is_sigmoid:
        scores = scores.sigmoid() + (0.0 if correction is None else correction)
    if form.kept_groups < form.num_groups:
        grouped = scores.unflatten(1, (form.num_groups, -1))
        worth = grouped.topk(2 if form.weighing.is_sigmoid else 1, dim=-1).values.sum(-1)
        order = worth.sort(dim=-1, descending=True, stable=True).indices
        is_left_out = torch.ones_like(worth, dtype=torch.bool).scatter(1, order[:, : form.kept_groups], False)
        scores = grouped.masked_fill(is_left_out[..., None], float("-inf")).flatten(1)
    experts = scores.sort(dim=-1, descending=True, stable=True).indices[:, : form.top_k]
    weights = weigh_reference(logits, experts, rule=form.weighing, dtype=torch.float32)
    return Scored(logits, scores, experts, weights)


@triton.jit
def _route_scored_token(correction, scored, FORM: tl.constexpr, OVERLAPS: tl.constexpr):
    meet(OVERLAPS)
    _score(tl.program_id(0).to(tl.int64), correction, scored, FORM)


@triton.jit
def _route_scored_hidden(
    hidden,
    own,
    following,
    NUM_PROGRAMS: tl.constexpr,
    FORM: tl.constexpr,
    HIDDEN: tl.constexpr,
    TOKENS: tl.constexpr,
    TOKEN_SLOTS: tl.constexpr,
    LANE: tl.constexpr,
    TILE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    program = tl.program_id(0)
    if program < NUM_PROGRAMS:
        _share(program, hidden, own, NUM_PROGRAMS, FORM, HIDDEN, TOKENS, TOKEN_SLOTS, LANE, TILE, OVERLAPS)
    elif following is not None:
        program -= NUM_PROGRAMS
        _share(
            program, hidden, following, NUM_PROGRAMS, FORM, HIDDEN, TOKENS, TOKEN_SLOTS, LANE, TILE, OVERLAPS
        )


@triton.jit
def _share(
    program,
    hidden,
    part,
    NUM_PROGRAMS: tl.constexpr,
    FORM: tl.constexpr,
    HIDDEN: tl.constexpr,
    TOKENS: tl.constexpr,
    TOKEN_SLOTS: tl.constexpr,
    LANE: tl.constexpr,
    TILE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """What one of the NUM_PROGRAMS of one router does: its products and, if it is the last, the rest."""
    experts = program * TILE.rows + tl.arange(0, TILE.rows)
    store_products(
        hidden, part.weight, part.weight, part.scored.logits, experts, False,
        HIDDEN, FORM.experts, TOKENS, TOKEN_SLOTS, LANE, TILE, OVERLAPS,
    )  # fmt: skip
    if is_last_of(part.programs_done, NUM_PROGRAMS):
        for token in tl.range(0, TOKENS):
            _score(token, part.correction, part.scored, FORM)


@triton.jit
def _score(token, correction, scored, FORM: tl.constexpr):
    """One token, from memory to memory: logits to scores, experts and weights."""
    EXPERTS: tl.constexpr = FORM.experts
    TOP_K: tl.constexpr = FORM.top_k
    WEIGHING: tl.constexpr = FORM.weighing
    SLOTS: tl.constexpr = triton.next_power_of_2(EXPERTS)
    CHOSEN: tl.constexpr = triton.next_power_of_2(TOP_K)
    _compare(scored.logits + token * EXPERTS, correction, scored.scores + token * EXPERTS, FORM)
    tl.debug_barrier()  # scores are read by other threads than wrote them
    slots, places = tl.arange(0, SLOTS), tl.arange(0, CHOSEN)
    is_place = places < TOP_K
    compared = tl.load(scored.scores + token * EXPERTS + slots, mask=slots < EXPERTS, other=float("-inf"))
    _, chosen = best_of(compared, SLOTS, TOP_K, CHOSEN)
    shares = shares_of(scored.logits + token * EXPERTS, chosen, is_place, WEIGHING, EXPERTS, SLOTS)
    tl.store(scored.experts + token * TOP_K + places, chosen.to(tl.int64), mask=is_place)
    tl.store(scored.weights + token * TOP_K + places, shares, mask=is_place)


@triton.jit
def _compare(logits, correction, scores, FORM: tl.constexpr):
    """`scores` `[EXPERTS]` of one token, whose experts lie here as groups by members."""
    SIZE: tl.constexpr = FORM.experts // FORM.num_groups
    MEMBERS: tl.constexpr = triton.next_power_of_2(SIZE)
    groups = tl.arange(0, triton.next_power_of_2(FORM.num_groups))
    members = tl.arange(0, MEMBERS)
    is_there = (groups < FORM.num_groups)[:, None] & (members < SIZE)[None, :]
    at = groups[:, None] * SIZE + members[None, :]
    compared = tl.load(logits + at, mask=is_there, other=float("-inf")).to(tl.float32)
    if FORM.weighing.is_sigmoid:
        compared = tl.sigmoid(compared)
        compared += tl.load(correction + at, mask=is_there, other=0.0)
        compared = tl.where(is_there, compared, float("-inf"))
    if FORM.kept_groups < FORM.num_groups:
        worth = tl.max(compared, axis=1)
        if FORM.weighing.is_sigmoid:
            is_best = compared == worth[:, None]
            first = tl.min(tl.where(is_best, members[None, :], MEMBERS), axis=1)
            worth += tl.max(tl.where(members[None, :] == first[:, None], float("-inf"), compared), axis=1)
        is_equal = worth[None, :] == worth[:, None]
        is_before = (worth[None, :] > worth[:, None]) | (is_equal & (groups[None, :] < groups[:, None]))
        is_kept = tl.sum(is_before.to(tl.int32), axis=1) < FORM.kept_groups
        compared = tl.where(is_kept[:, None], compared, float("-inf"))
    tl.store(scores + at, compared, mask=is_there)
