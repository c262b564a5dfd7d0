"""All rows in one captured step, a round ahead of whoever reads.

    device   | round 1 | round 2 | round 3 |          a round: a few steps for every row that wants tokens
    host          submit 2, read 1 | submit 3, read 2 | ...

Whichever request runs out of tokens first takes the turn and advances all of them, so rows step together
without a thread of their own, and none is advanced that nobody reads (but for one round). Rounds last some
milliseconds: short steps share one visit of the host, long ones are delivered one by one. The device does not
wait for the host between rounds, since the tokens never leave it.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from hetero_gpu.stopwatch import Stopwatch, stopwatch_for
from hetero_runtime.generation import Request
from hetero_runtime.generation.row_sampler import UNSOUND, RowSampler
from hetero_runtime.generation.sampling import unsound_logits
from hetero_runtime.hf.graph_sequences import GraphSequences, StepPlan, Submitted
from hetero_runtime.hf.visual import images_on
from hetero_runtime.orchestrator import Phase
from hetero_runtime.passes import Checkpoint, Passes
from hetero_runtime.stepping.base import Stepper, Tokens
from hetero_runtime.stepping.usual import UsualSteps

VISIT_S = 4e-3
"""How long a round should last: short for whoever reads a stream, long beside a visit of the host."""
MOST_STEPS = 8


class _Round(NamedTuple):
    """Steps under way. `shares`: how many of them belong to each request."""

    submitted: Submitted
    shares: dict[GraphTokens, int]
    began_s: float


class _Timed(NamedTuple):
    """What is timed of a round."""

    num_steps: int
    num_tokens: int


class GraphStepper(Stepper):
    """See the module docstring. Methods with an underscore are for who holds the turn."""

    def __init__(self, sequences: GraphSequences, passes: Passes) -> None:
        self._sequences, self._passes = sequences, passes
        self._rows: dict[int, GraphTokens] = {}
        self._left: deque[int] = deque()
        self._under_way: deque[_Round] = deque()
        self._last_done_s, self._step_s = 0.0, VISIT_S
        self._watch: Stopwatch[_Timed] = stopwatch_for(passes.device)
        self._usual = UsualSteps(passes.orchestrator)

    @contextmanager
    def open(self, request: Request, checkpoint: Checkpoint) -> Iterator[Tokens]:
        with self._passes.turns.take():
            self._renew()
            row = self._sequences.take_row()
        try:
            yield GraphTokens(self, row, request, checkpoint=checkpoint)
        finally:
            self._left.append(row)  # without a turn: an abandoned stream may end inside another's
        if self._passes.orchestrator.is_outdated:  # now, when nobody waits for this row's next token
            with self._passes.turns.take():
                self._renew()

    def run_prompt(self, tokens: GraphTokens, images: dict[str, torch.Tensor]) -> None:
        """Prefill; gives `tokens` the first one, or UNSOUND. Takes the turn."""
        request, device = tokens.request, self._passes.device
        inputs = images_on(device, images)
        ids = torch.tensor(request.prompt_ids, device=device)
        with self._passes.one(Phase.PREFILL, num_tokens=len(ids), checkpoint=tokens.checkpoint):
            (uniform,) = tokens.draw_uniforms(1)
            token = self._sequences.first_token(
                tokens.row, ids, inputs, params=request.params, uniform=uniform
            )
            tokens.put([token])  # before the turn is over: the next one may step this row
            self._rows[tokens.row] = tokens

    def advance(self, tokens: GraphTokens) -> None:
        """Give `tokens` what it waits for: a token, or what went wrong. Takes the turn."""
        with self._passes.turns.take():
            tokens.checkpoint()
            if not tokens.is_served:
                self._advance()

    # ---- one visit

    def _advance(self) -> None:
        """Hand out the oldest round, with another one under way meanwhile."""
        self._sweep()
        shares = self._under_way[0].shares if self._under_way else self._wanted()
        assert shares, "a request was asked for more than its max_tokens"
        num_tokens, num_passes = sum(shares.values()), max(shares.values())
        try:
            with self._passes.inside(
                Phase.DECODE, num_tokens=num_tokens, num_passes=num_passes, checkpoint=_go_on
            ):
                while len(self._under_way) < 2 and (wanted := self._wanted()):
                    self._under_way.append(self._submit(wanted))
                said = self._under_way[0].submitted.wait()
                for (steps, tokens), seconds in self._watch.laps():
                    self._usual.observe(steps, seconds, tokens_a_step=tokens / steps)
        except Exception as error:
            self._fail(error)
            return
        self._hand_out(self._under_way.popleft(), said)

    def _wanted(self) -> dict[GraphTokens, int]:
        """Steps of the next round for each request that wants some."""
        most = max(1, min(MOST_STEPS, int(VISIT_S / self._step_s)))
        shares = {tokens: tokens.num_wanted(most) for tokens in self._rows.values()}
        return {tokens: share for tokens, share in shares.items() if share > 0}

    def _submit(self, shares: dict[GraphTokens, int]) -> _Round:
        num_steps, last_row = max(shares.values()), max(tokens.row for tokens in shares)
        num_rows = next(rows for rows in self._sequences.row_counts if rows > last_row)
        active = [[False] * num_rows for _ in range(num_steps)]
        uniforms = [[0.0] * num_rows for _ in range(num_steps)]
        for tokens, share in shares.items():
            for i, uniform in enumerate(tokens.draw_uniforms(share)):
                active[i][tokens.row], uniforms[i][tokens.row] = True, uniform
        is_plain = all(RowSampler.is_plain(tokens.request.params) for tokens in shares)
        began_s = time.perf_counter()
        self._watch.start()
        submitted = self._sequences.submit(StepPlan(active, None if is_plain else uniforms))
        self._watch.stop(_Timed(num_steps, sum(shares.values())))
        return _Round(submitted, shares, began_s)

    def _hand_out(self, done: _Round, said: list[list[int]]) -> None:
        now = time.perf_counter()
        self._step_s = (now - max(done.began_s, self._last_done_s)) / len(said)
        self._last_done_s = now
        for tokens, share in done.shares.items():
            tokens.put([step[tokens.row] for step in said[:share]])

    def _fail(self, error: Exception) -> None:
        """Every request under way ends with `error`; rounds under way are forgotten."""
        self._under_way.clear()
        for tokens in self._rows.values():
            tokens.put([error])

    def _renew(self) -> None:
        """Sweep; capture a step that is outdated anew, if no row has a text."""
        self._sweep()
        if not self._rows and self._passes.orchestrator.is_outdated:
            self._sequences.capture_again()

    def _sweep(self) -> None:
        """Empty the rows of requests that have left. What is under way for them is said to nobody."""
        while self._left:
            row = self._left.popleft()
            self._rows.pop(row, None)
            self._sequences.give_back(row)


class GraphTokens(Tokens):
    """One row. `row`, `request` and `checkpoint` do not change."""

    def __init__(self, stepper: GraphStepper, row: int, request: Request, *, checkpoint: Checkpoint) -> None:
        self.row, self.request, self.checkpoint = row, request, checkpoint
        self._stepper = stepper
        self._ready: deque[int | Exception] = deque()
        self._num_ordered, self._num_taken = 0, 0
        self._random = random.Random(request.params.seed)

    @property
    def is_served(self) -> bool:
        """Whether `next` has something to give."""
        return bool(self._ready)

    def first(self, images: dict[str, torch.Tensor]) -> int:
        self._stepper.run_prompt(self, images)
        return self._take()

    def next(self) -> int:
        while not self._ready:
            self._stepper.advance(self)
        return self._take()

    def num_wanted(self, most: int) -> int:
        """Steps of a round of `most` that this request can use: it is kept no more than two rounds ahead."""
        room = 2 * most - (self._num_ordered - self._num_taken)
        return min(most, room, self.request.params.max_tokens - self._num_ordered)

    def draw_uniforms(self, count: int) -> list[float]:
        """Random numbers for the next `count` tokens, which are ordered by that."""
        self._num_ordered += count
        return [self._random.random() for _ in range(count)]

    def put(self, said: Sequence[int | Exception]) -> None:
        """Tokens, or what is raised in place of one."""
        self._ready.extend(said)

    def _take(self) -> int:
        said = self._ready.popleft()
        if isinstance(said, Exception):
            self._ready.append(said)  # and again, whoever asks
            raise said
        if said == UNSOUND:
            raise unsound_logits(self._num_taken, "NaN or infinite logits, or too large for float32")
        self._num_taken += 1
        return said


def _go_on() -> None:
    return
