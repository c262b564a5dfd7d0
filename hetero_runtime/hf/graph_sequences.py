"""Sequences whose decode step is a CUDA graph, the choice of the next token included.

    capture, once   a token of no meaning in row 0 ─► warm up ─► capture, for each number of rows and each way
                    that a step can go ─► forget it
    prefill         eager: transformers' model on our KV cache; the first token is sampled from its logits
    submit          [copy who is active ─► replay step ─► replay sampling] x steps ─► one copy to the host

    tokens [rows] ─► step graph ─► logits [rows, vocab] ─► sampling graph ─► tokens [rows]     never leaves
                                                                 └─► said [steps, rows] ─► pinned host memory

A step covers the first 1, 2, 4, ... rows. Those that are not active in it take part without a trace: their
experts are not loaded; their cache, their length and their token stay as they are.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Rows
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from hetero_runtime.generation.params import SamplingParams
from hetero_runtime.generation.row_sampler import RowSampler
from hetero_runtime.hf.forward import Sequence
from hetero_runtime.hf.sequences import PromptCut, StaticSequences
from hetero_runtime.hf.visual import Images

Around = Callable[[], AbstractContextManager[None]]
AroundWay = Callable[[int], AbstractContextManager[None]]
"""Of one of the ways that a step can go."""
Replay = Callable[[], object]
Capture = Callable[[Callable[[], object]], Replay]
"""Takes device work and gives what repeats it."""


class Texts(Protocol):
    """Somebody who is told of the texts in rows."""

    def read(
        self, row: int, ids: torch.Tensor, *, is_first: bool, images: Images | None = None
    ) -> AbstractContextManager[None]:
        """Around each pass over a prompt `ids` `[n]` in `row`, with `images` where it has any; `is_first`:
        its text begins with it."""

    def end(self, row: int) -> None:
        """The text of `row` has ended."""


NUM_WARM_UPS = 3
"""Steps before the capture: kernels compile and libraries allocate what they never allocate again."""


class Ways(Protocol):
    """Which way steps go, where they can go several; each is captured."""

    @property
    def num_ways(self) -> int:
        """Ways that a step can still go."""

    @property
    def way(self) -> int:
        """That of the decode pass that runs."""

    def end_step(self) -> None:
        """Captured, behind the logits of a step: the end of what goes on beside it."""


class _OneWay(NamedTuple):
    num_ways: int = 1
    way: int = 0

    def end_step(self) -> None:
        """Nothing goes on beside it."""


class StepPlan(NamedTuple):
    """Steps to submit together. `active[i][row]`: whether step i advances `row`; all steps name as many rows.
    `uniforms`: of the same shape, in [0, 1), for rows that draw; None when all are greedy and without a
    penalty."""

    active: Rows[Rows[bool]]
    uniforms: Rows[Rows[float]] | None


class Submitted:
    """Steps under way on the device."""

    def __init__(self, said: torch.Tensor) -> None:
        self._said = said
        self._done = torch.cuda.Event() if said.is_pinned() else None
        if self._done is not None:
            self._done.record()

    def wait(self) -> list[list[int]]:
        """Block until they are done: the token of each step and row; UNSOUND where its logits were."""
        if self._done is not None:
            self._done.synchronize()
        said: list[list[int]] = self._said.tolist()
        return said


class _StepGraphs(NamedTuple):
    """What is replayed for one number of rows: the step, then one of the samplings."""

    step: Replay
    greedy: Replay
    draw: Replay


class GraphSequences:
    """`rows` places of up to `max_length` tokens.

    `active`: bool `[rows]` on the device, shared with whoever runs the experts. Passes are for one thread at
    a time, and so are `take_row` and `give_back`.
    """

    def __init__(
        self,
        model: Any,
        *,
        active: torch.Tensor,
        max_length: int,
        capture: Capture | None = None,
        texts: Texts | None = None,
        cut: PromptCut | None = None,
    ) -> None:
        """`capture`: how work is captured; as a CUDA graph unless given. `texts`: who is told of them.
        `cut`: as for StaticSequences."""
        self._sequences = StaticSequences(
            model, rows=len(active), max_length=max_length, active=active, cut=cut
        )
        self._active = active
        self._capture = capture
        self.texts = texts
        """Who is told of the texts in rows."""
        self.tokens = torch.zeros(len(active), dtype=torch.long, device=active.device)
        """What the next step reads, by row; it stays at its address."""
        self._said = torch.zeros_like(self.tokens)
        self._uniforms = torch.zeros(len(active), device=active.device)
        vocab_size = model.config.get_text_config(decoder=True).vocab_size
        self._sampler = RowSampler(len(active), vocab_size, active.device)
        self._logits: dict[tuple[int, int], torch.Tensor] = {}
        self._graphs: dict[tuple[int, int], _StepGraphs] = {}  # by way and number of rows
        self._free = list(range(len(active)))
        self._around: tuple[Around, AroundWay]
        self._ways: Ways = _OneWay()

    @property
    def row_counts(self) -> list[int]:
        """Numbers of rows that a step may have."""
        powers = [1 << i for i in range(len(self._active).bit_length())]
        return sorted({min(power, len(self._active)) for power in [*powers, len(self._active)]})

    @torch.inference_mode()
    def capture(self, *, prefill: Around, decode: AroundWay, ways: Ways | None = None) -> None:
        """Capture the steps; slots and slabs see a few steps of a text that nobody asked for.

        `prefill` and `decode` make what surrounds such a pass: the orchestrator's preparations. `ways`: where
        steps can go more than one, or something goes on beside them.
        """
        self._around, self._ways = (prefill, decode), ways or _OneWay()
        self._graphs.clear()
        self._logits.clear()
        capture = self._capture or GraphCapture()
        nothing = torch.zeros(1, dtype=torch.long, device=self._active.device)
        with prefill(), self._reading(0, nothing):
            self._sequences.prefill(0, nothing)
        self._active.zero_()
        self._active[0] = True
        for way in range(self._ways.num_ways):
            with decode(way):
                for rows in self.row_counts:
                    self._graphs[way, rows] = _StepGraphs(
                        step=capture(partial(self._step, way, rows)),
                        greedy=capture(partial(self._greedy, way, rows)),
                        draw=capture(partial(self._draw, way, rows)),
                    )
        self._empty(0)

    def capture_again(self) -> None:
        """As before, with what the model does now. All rows are empty; waits for steps under way."""
        if self._active.is_cuda:
            torch.cuda.synchronize(self._active.device)
        prefill, decode = self._around
        self.capture(prefill=prefill, decode=decode, ways=self._ways)

    # ---- rows

    def take_row(self) -> int:
        """The lowest free row, empty. There must be one."""
        return heapq.heappop(self._free)

    def give_back(self, row: int) -> None:
        """Empty `row` and let others have it."""
        self._empty(row)
        heapq.heappush(self._free, row)

    @contextmanager
    def open(self) -> Iterator[Sequence]:
        """A row for passes without sampling."""
        row = self.take_row()
        try:
            yield RowSequence(self, row)
        finally:
            self.give_back(row)

    def close(self) -> None:
        """Wait for the device; free the graphs, their memory and the KV cache."""
        if self._active.device.type == "cuda":
            torch.cuda.synchronize(self._active.device)
        self._graphs.clear()
        self._logits.clear()
        self._sequences.close()

    # ---- passes

    @torch.inference_mode()
    def first_token(
        self,
        row: int,
        ids: torch.Tensor,
        images: dict[str, torch.Tensor],
        *,
        params: SamplingParams,
        uniform: float,
    ) -> int:
        """Run the prompt `ids` `[n]` in the empty `row`: its first token, sampled with `params` as all that
        follow; UNSOUND where the logits are. Waits for the device."""
        logits = self.read(row, ids, images)[None]
        self._sampler.set(row, params, ids)
        if self._sampler.is_plain(params):
            said = self._sampler.greedy(logits)
        else:
            uniforms = torch.full((1,), uniform, device=ids.device)
            everyone = torch.ones(1, dtype=torch.bool, device=ids.device)
            said = self._sampler.draw(logits, uniforms, is_active=everyone, first_row=row)
        self.tokens[row] = said[0].clamp_min(0)
        return int(said)

    def length(self, row: int) -> int:
        """Tokens in `row`; 0 where no text is."""
        return self._sequences.length(row)

    @torch.inference_mode()
    def read(
        self, row: int, ids: torch.Tensor, images: dict[str, torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Append `ids` `[n]` to `row`, a prompt; logits of the last one, `[vocab]` float32."""
        with self._reading(row, ids, images or None):
            return self._sequences.prefill(row, ids, images or None)

    @torch.inference_mode()
    def read_one(self, row: int, token: torch.Tensor) -> torch.Tensor:
        """Append `token` `[1]` to `row` by the captured step, alone in it; its logits, `[vocab]` float32.
        Waits for nothing. Raises RequestError when the row has no room."""
        rows = next(count for count in self.row_counts if count > row)
        self._sequences.advance(row)
        self._active.zero_()
        self._active[row] = True
        self.tokens[row] = token[0]
        self._graphs[self._ways.way, rows].step()
        return self._logits[self._ways.way, rows][row].clone()

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> Submitted:
        """Submit the steps of `plan`; waits for nothing. A row's token is the one that it said last. Raises
        RequestError, with nothing submitted, when a row has no room for its steps."""
        num_steps, rows = len(plan.active), len(plan.active[0])
        graphs = self._graphs[self._ways.way, rows]
        for row, steps in enumerate(zip(*plan.active, strict=True)):
            self._sequences.advance(row, sum(steps))
        active = self._to_device(torch.tensor(plan.active))
        uniforms = self._to_device(torch.tensor(plan.uniforms)) if plan.uniforms is not None else None
        said = torch.empty((num_steps, rows), dtype=torch.long, pin_memory=self._active.is_cuda)
        for i in range(num_steps):
            self._active[:rows].copy_(active[i])
            graphs.step()
            if uniforms is None:
                graphs.greedy()
            else:
                self._uniforms[:rows].copy_(uniforms[i])
                graphs.draw()
            said[i].copy_(self._said[:rows], non_blocking=True)
        return Submitted(said)

    def _empty(self, row: int) -> None:
        self._sequences.reset(row)
        if self.texts is not None:
            self.texts.end(row)

    def _reading(
        self, row: int, ids: torch.Tensor, images: Images | None = None
    ) -> AbstractContextManager[None]:
        if self.texts is None:
            return nullcontext()
        return self.texts.read(row, ids, is_first=self._sequences.length(row) == 0, images=images)

    # ---- what is captured

    def _step(self, way: int, rows: int) -> None:
        self._logits[way, rows] = self._sequences.step(self.tokens[:rows])
        self._ways.end_step()

    def _greedy(self, way: int, rows: int) -> None:
        self._say(self._sampler.greedy(self._logits[way, rows]))

    def _draw(self, way: int, rows: int) -> None:
        active, uniforms = self._active[:rows], self._uniforms[:rows]
        self._say(self._sampler.draw(self._logits[way, rows], uniforms, is_active=active))

    def _say(self, said: torch.Tensor) -> None:
        tokens = self.tokens[: len(said)]
        self._said[: len(said)].copy_(said)
        tokens.copy_(torch.where(self._active[: len(said)], said.clamp_min(0), tokens))

    def _to_device(self, values: torch.Tensor) -> torch.Tensor:
        if not self._active.is_cuda:
            return values
        return values.pin_memory().to(self._active.device, non_blocking=True)


class GraphCapture:
    """Captures CUDA graphs that are replayed one at a time, so that all share one pool of memory.

    A pool goes with the last of its graphs: graphs captured anew take a new one.
    """

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, work: Callable[[], object]) -> Replay:
        """Run `work` a few times, then capture it on the current device."""
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(NUM_WARM_UPS):
                work()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Threads of copies ask for their events meanwhile, which is no part of the capture.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            work()
        return graph.replay


class RowSequence:
    """One row as a sequence, sampled by nobody: one token behind others is read by the captured step, inside
    a decode pass; anything else is a prefill, inside such a pass."""

    def __init__(self, graphs: GraphSequences, row: int) -> None:
        self._graphs, self._row = graphs, row

    def extend(self, ids: torch.Tensor, images: dict[str, torch.Tensor] | None = None) -> torch.Tensor:
        if len(ids) == 1 and not images and self._graphs.length(self._row):
            return self._graphs.read_one(self._row, ids)
        return self._graphs.read(self._row, ids, images)
