"""Compression at work in one engine."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hetero_gpu.stopwatch import Stopwatch, stopwatch_for
from hetero_runtime.hf.hooks import RunLayer
from hetero_runtime.hf.token_cut import TokenCut
from hetero_runtime.hf.visual import Images, VisualPart, listen_to_attention, received_attention
from hetero_runtime.vision.stats import CompressionStats
from hetero_scheduler.compression import ImageTokens, TokenSelector


@dataclass
class _Prompt:
    """What is known so far of the prompt that runs."""

    positions: list[torch.Tensor]
    images: Images
    num_tokens: int
    received: list[torch.Tensor] = field(default_factory=list)
    """Of each call of the encoder's last attention."""
    chosen: list[torch.Tensor] = field(default_factory=list)
    """Of each MoE layer that has routed, the experts `[tokens, k]`."""
    kept: npt.NDArray[np.bool_] | None = None
    """`[num_tokens]`, once chosen."""
    seconds: float = 0.0
    """Of the choice."""


class Compressor:
    """The loop of a prompt with images, one pass at a time:

        pass_of       whose ids and images they are
        the encoder   says what its last attention asks; what patches receive is computed beside it
        run_layer     says what routers chose, layer by layer, on its way to the orchestrator
        the cut       behind the prefix: which visual tokens go on

    What comes after the prompt needs nothing: each layer's KV cache holds what the layer saw.
    """

    def __init__(self, model: Any, part: VisualPart, selector: TokenSelector, *, prefix: int) -> None:
        """`prefix`: MoE layers before the cut, at least one, and at least one is behind it."""
        self._part, self._selector, self._prefix = part, selector, prefix
        self._cut = TokenCut(model, first=prefix)
        part.follow(self._cut)
        listen_to_attention(part.attention, self._hear)
        self._prompt: _Prompt | None = None
        self._watch: Stopwatch[_Prompt] | None = None
        """Of what listening to the encoder takes; nobody waits for it there."""
        self._stats = CompressionStats()

    def stats(self) -> CompressionStats:
        """Of whole prompts so far. Any thread."""
        return self._stats

    @property
    def first_layer(self) -> int:
        """The first decoder layer behind the cut."""
        return self._cut.first_layer

    @property
    def kept(self) -> torch.Tensor | None:
        """While a prompt runs, once it is cut: places of the tokens that went on, int64 ascending."""
        return self._cut.kept

    def listening(self, run_layer: RunLayer) -> RunLayer:
        """`run_layer`, its choices noted while a prompt runs."""

        def noting(
            layer: int, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
        ) -> torch.Tensor:
            if self._prompt is not None:
                self._prompt.chosen.append(top_k_index)
            return run_layer(layer, hidden, top_k_index, top_k_weights)

        return noting

    @contextmanager
    def pass_of(self, ids: torch.Tensor, images: Images) -> Iterator[None]:
        """Around the pass over the prompt `ids` `[T]` with `images`; the caller has the turn."""
        prompt = _Prompt(self._part.positions(ids, images), images, len(ids))
        self._prompt = prompt
        try:
            with self._cut.during(self._choose):
                yield
            self._stats += self._count(prompt)
        finally:
            self._prompt = None

    def _hear(self, query: torch.Tensor, key: torch.Tensor, scaling: float) -> None:
        if self._prompt is None:
            return
        watch = self._watch = self._watch or stopwatch_for(query.device)
        watch.start()
        self._prompt.received.append(received_attention(query, key, scaling=scaling))
        watch.stop(self._prompt)

    def _choose(self) -> torch.Tensor | None:
        prompt = self._prompt
        assert prompt is not None, "a cut without its prompt"
        assert len(prompt.chosen) == self._prefix, f"{len(prompt.chosen)} layers routed before the cut"
        device = prompt.chosen[0].device
        if device.type == "cuda":  # what is computed before has its own time; copies of experts go on
            torch.cuda.current_stream(device).synchronize()
        began_s = time.perf_counter()
        prompt.kept = self._keep(prompt)
        kept = torch.from_numpy(prompt.kept.nonzero()[0]).to(device)
        prompt.seconds += time.perf_counter() - began_s
        return None if prompt.kept.all() else kept

    def _count(self, prompt: _Prompt) -> CompressionStats:
        counted = _count(prompt, self._prefix)  # waits for the device
        laps = [] if self._watch is None else self._watch.laps()
        listened_s = sum(lap.seconds for lap in laps if lap.what is prompt)
        return replace(counted, seconds=prompt.seconds + listened_s)

    def _keep(self, prompt: _Prompt) -> npt.NDArray[np.bool_]:
        """Text, what the selector keeps of the images, and the last token, whoever's it is."""
        experts = torch.stack(prompt.chosen).cpu().numpy()  # [prefix, T, k]
        places = [positions.cpu().numpy() for positions in prompt.positions]
        saliency = self._part.saliency(prompt.received, prompt.images)
        images = [
            ImageTokens(each.double().cpu().numpy(), experts[:, place])
            for each, place in zip(saliency, places, strict=True)
        ]
        kept = np.ones(prompt.num_tokens, dtype=np.bool_)
        for place, chosen in zip(places, self._selector.select(images), strict=True):
            kept[place] = False
            kept[place[chosen]] = True
        kept[-1] = True
        return kept


def _count(prompt: _Prompt, prefix: int) -> CompressionStats:
    assert prompt.kept is not None, "the pass ended before its cut"
    flat = torch.cat([layer.reshape(-1) for layer in prompt.chosen]).cpu().numpy()  # waits once for all
    ends = np.cumsum([layer.numel() for layer in prompt.chosen])[:-1]
    top_k = prompt.chosen[0].shape[-1]
    chosen = [layer.reshape(-1, top_k) for layer in np.split(flat, ends)]
    visual = torch.cat(prompt.positions).cpu().numpy()
    return CompressionStats(
        prompts=1,
        visual_tokens=len(visual),
        kept_tokens=int(prompt.kept[visual].sum()),
        experts_before=_num_activated(chosen[:prefix]),
        experts_after=_num_activated([each[prompt.kept] for each in chosen[:prefix]] + chosen[prefix:]),
    )


def _num_activated(chosen: Sequence[npt.NDArray[np.int64]]) -> tuple[int, ...]:
    """Distinct experts of each layer."""
    return tuple(int(np.count_nonzero(np.bincount(layer.reshape(-1)))) for layer in chosen)
