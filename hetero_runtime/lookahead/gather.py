"""Passes to learn from: lessons through the engine, its routers listened to.

A lesson gives one pass over its prompt, and single tokens: those at the prompt's end, after its images, and
those of what follows it. A causal model makes of a token the same whether it comes alone or with others, so
what follows runs in one pass where it is known; but a token a pass behind a prompt of which layers hold fewer
tokens than others, since one mask cannot be for all of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from hetero_runtime.assembly import Parts
from hetero_runtime.errors import RequestError
from hetero_runtime.evaluation.base import TokensSeen
from hetero_runtime.foresight.sight import make_sight
from hetero_runtime.generation import SamplingParams, make_sampler
from hetero_runtime.hf.forward import Sequence
from hetero_runtime.hf.pass_record import HeardPass, PassRecord, record_passes
from hetero_runtime.hf.router_hooks import listen_to_routers
from hetero_runtime.hf.visual import images_on, visual_part
from hetero_runtime.lookahead.lessons import Lesson
from hetero_runtime.no_room import no_room_for
from hetero_runtime.orchestrator import Phase
from hetero_scheduler.predict.lookahead_features import Passes, Shares, faded, shares_of

_HALF_MAX = float(np.finfo(np.float16).max)


@dataclass(frozen=True)
class GatherOptions:
    """How much of each lesson is kept."""

    tokens: int = 128
    """Single tokens of a lesson, at most."""
    max_new: int = 32
    """Tokens that the model writes where a lesson has no answer, sampled."""
    temperature: float = 0.8
    seed: int = 0
    """Lesson i is sampled with seed + i."""


def gather(
    parts: Parts, lessons: Iterable[Lesson], *, options: GatherOptions, seen: TokensSeen | None = None
) -> Passes:
    """Passes over `lessons`, in order; document i is lesson i. `seen`: told of lessons done, and how many.

    Raises RequestError for no lessons, what listening to routers raises, and DeviceError without room.
    """
    found = list(lessons)
    if not found:
        raise RequestError("there is nothing to learn from; give texts of a few words or more")
    gathered = _Gathered(num_experts=parts.store.num_experts)
    with record_passes(parts.model) as record, ExitStack() as stack:
        listener = _Listener(parts, record, options)
        for handle in listen_to_routers(parts.model, listener.look):
            stack.callback(handle.remove)
        for number, lesson in enumerate(found):
            listener.attend(number, lesson, gathered)
            if seen is not None:
                seen(number + 1, len(found))
    return gathered.passes()


class _Gathered:
    """Grows pass by pass."""

    def __init__(self, *, num_experts: int) -> None:
        self._num_experts = num_experts
        self._rows: list[tuple[Shares, Shares, npt.NDArray[np.float16], int, int]] = []
        self._visual: list[npt.NDArray[np.float16] | None] = []
        self._history: Shares = np.zeros((0, 0), np.float32)

    def begin(self, visual: torch.Tensor | None) -> None:
        """A new document, with its visual summary."""
        self._visual.append(None if visual is None else _half(visual))
        self._history = np.zeros((0, 0), np.float32)

    def add(self, hidden: list[torch.Tensor], chosen: list[torch.Tensor]) -> None:
        """A pass: by layer `[tokens, H]` and `[tokens, K]`."""
        shares = np.stack([shares_of(each.cpu().numpy(), self._num_experts) for each in chosen])
        before = self._history if self._history.size else np.zeros_like(shares)
        pooled = _half(torch.stack([each.float().mean(dim=0) for each in hidden]))
        self._rows.append((before, shares, pooled, len(self._visual) - 1, len(chosen[0])))
        self._history = faded(before, shares)

    def passes(self) -> Passes:
        """Everything so far; no visual feature where no document has an image."""
        history, share, hidden, document, num_tokens = zip(*self._rows, strict=True)
        sizes = [len(visual) for visual in self._visual if visual is not None]
        nothing = np.zeros(sizes[0] if sizes else 0, dtype=np.float16)
        return Passes(
            np.stack(history).astype(np.float16),
            np.stack(share).astype(np.float16),
            np.stack(hidden),
            np.stack([nothing if visual is None else visual for visual in self._visual]),
            np.array(document, dtype=np.int64),
            np.array(num_tokens, dtype=np.int64),
        )


class _Listener:
    def __init__(self, parts: Parts, record: PassRecord, options: GatherOptions) -> None:
        self._parts, self._record, self._options = parts, record, options
        self._part = visual_part(parts.model)
        self._sight = None if self._part is None else make_sight(parts.model, parts.compressor)
        self._visual: torch.Tensor | None = None

    def look(self, _layer: int, _logits: torch.Tensor, _hidden: torch.Tensor) -> None:
        """As in `listen_to_routers`: what the images look like may have changed."""
        news = None if self._sight is None else self._sight.news()
        self._visual = self._visual if news is None else news

    def attend(self, number: int, lesson: Lesson, gathered: _Gathered) -> None:
        self._visual = None
        with self._parts.sequences.open() as sequence:
            logits = self._run(sequence, lesson.prompt_ids, lesson.images)
            prompt = self._record.take()
            gathered.begin(self._visual)
            gathered.add(prompt.hidden, prompt.chosen)
            self._add_tokens(gathered, prompt, min(self._num_after(lesson), self._options.tokens // 2))
            if lesson.answer_ids is not None:
                self._read(sequence, lesson.answer_ids[: self._options.tokens], lesson, gathered)
            else:
                self._write(sequence, logits, number, lesson.prompt_ids, gathered)

    def _read(self, sequence: Sequence, answer: tuple[int, ...], lesson: Lesson, gathered: _Gathered) -> None:
        """Let the model read what follows."""
        is_cut = lesson.images is not None and self._parts.compressor is not None
        for part in [(token,) for token in answer] if is_cut else [answer]:
            self._run(sequence, part, None)
            self._add_tokens(gathered, self._record.take(), len(part))

    def _write(
        self,
        sequence: Sequence,
        logits: torch.Tensor,
        number: int,
        prompt_ids: tuple[int, ...],
        gathered: _Gathered,
    ) -> None:
        """Let the model go on, a pass a token."""
        options, history = self._options, list(prompt_ids)
        params = SamplingParams(temperature=options.temperature, seed=options.seed + number)
        sampler = make_sampler(params, logits.shape[-1], self._parts.device)
        for _ in range(options.max_new):
            token = sampler.sample(logits, history)
            if token in self._parts.eos_token_ids:
                return
            history.append(token)
            logits = self._run(sequence, (token,), None)
            self._add_tokens(gathered, self._record.take(), 1)

    def _run(
        self, sequence: Sequence, ids: tuple[int, ...], images: dict[str, torch.Tensor] | None
    ) -> torch.Tensor:
        device = self._parts.device
        tokens = torch.tensor(ids, device=device)
        inputs = None if images is None else images_on(device, images)
        looking = nullcontext() if self._sight is None or not inputs else self._sight.during(tokens, inputs)
        with (
            looking,
            self._parts.orchestrator.pass_(Phase.PREFILL, checkpoint=lambda: None),
            no_room_for(f"a pass over {len(ids)} tokens", device, fix="cut texts shorter (--length)"),
        ):
            return sequence.extend(tokens, inputs)

    def _num_after(self, lesson: Lesson) -> int:
        """Tokens of the prompt behind its last image."""
        if lesson.images is None or self._part is None:
            return len(lesson.prompt_ids)
        positions = self._part.positions(torch.tensor(lesson.prompt_ids), lesson.images)
        return len(lesson.prompt_ids) - 1 - max(int(each.max()) for each in positions)

    def _add_tokens(self, gathered: _Gathered, heard: HeardPass, count: int) -> None:
        """The last `count` tokens, one after the other."""
        for back in range(count, 0, -1):
            hidden, chosen = ([each[-back][None] for each in layers] for layers in heard[:2])
            gathered.add(hidden, chosen)


def _half(tensor: torch.Tensor) -> npt.NDArray[np.float16]:
    """On the host; where float16 does not reach, its ends."""
    half: npt.NDArray[np.float16] = tensor.float().clamp(-_HALF_MAX, _HALF_MAX).half().cpu().numpy()
    return half
