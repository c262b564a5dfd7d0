"""The steps of VisMMOE's Table 4 as engines of this runtime, one after another on one bank of experts.

    base            LRU over all layers, eagerly, on demand, all image tokens: what plain offloading does
    compression     + half of the image tokens behind the first layers, which are pinned
    prediction      + a lookahead predictor, and what it names first fetched ahead
    orchestration   the whole of preset vismmoe, as it runs on a GPU: prefix by Eq. 10, the order of loading
                    by forecasts, prompts through grouped kernels, tokens in the captured step
    captured_base   no row of the table: the base again, but for prompts and steps that are captured as the
                    whole's are, to tell what the captured step alone is worth

In mode offload misses are loaded, in mode hybrid the CPU computes some of them. All have the same room for
experts, a pinned prefix included.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from bench.decode_case import settle
from bench.eager_decode import free_device
from bench.vl.mosaic import Mosaic
from hetero_runtime.assembly import Parts, assemble
from hetero_runtime.config import Config
from hetero_runtime.engine import Engine
from hetero_runtime.experts.base import ExpertStore
from hetero_runtime.orchestrator import Orchestrator
from hetero_runtime.orchestrator.device import DeviceOrchestrator
from hetero_runtime.plan.geometry import read_geometry
from hetero_runtime.planned import plan_for
from hetero_runtime.source import config_from
from hetero_runtime.stats import EngineStats, PhaseStats

STEPS = ("base", "compression", "prediction", "orchestration")
WHOLE, CAPTURED_BASE = STEPS[-1], "captured_base"
HANDLERS = {"offload": "load", "hybrid": "hybrid"}
"""By mode: what happens to an expert that is missing."""
KEEP_RATIO = 0.5
SETTLING_TOKENS = 128
"""Of an answer that nobody times, in which an engine tries its captured steps."""
_TEMPERATURE = 0.8
"""Greedy text repeats itself, which flatters every cache."""


class Step(NamedTuple):
    """One engine."""

    mode: str
    name: str

    @property
    def words(self) -> dict[str, Any]:
        """What its configuration says, but for memory and files."""
        plain = {"preset": "lru", "prediction": {"predictor": "none"}, "prefetch": {"schedule": "none"}}
        words: dict[str, dict[str, Any]] = {
            "base": plain,
            "captured_base": plain,
            "compression": plain | {"vision": {"keep_ratio": KEEP_RATIO}},
            "prediction": {
                "preset": "lru",
                "prediction": {"predictor": "lookahead_mlp"},
                "prefetch": {"schedule": "top_b", "extra": 12},
                "vision": {"keep_ratio": KEEP_RATIO},
            },
            "orchestration": {"preset": "vismmoe"},
        }
        return words[self.name] | {"misses": {"handler": HANDLERS[self.mode]}}

    @property
    def reads_predictor(self) -> bool:
        """Whether it needs the calibrated one."""
        return self.name in STEPS[2:]

    @property
    def is_captured(self) -> bool:
        """Whether its tokens are decoded in the captured step."""
        return self.name in (WHOLE, CAPTURED_BASE)


def steps_of(modes: Sequence[str]) -> tuple[list[Step], list[Step]]:
    """What the ratios of `modes` are of, and what lies between."""
    ends = [Step(mode, name) for mode in modes for name in (STEPS[0], WHOLE, CAPTURED_BASE)]
    return ends, [Step(mode, name) for mode in modes for name in STEPS[1:-1]]


class Setup(NamedTuple):
    """What all engines share."""

    checkpoint: Path
    device: str
    residency: float
    """Room for experts, as a share of all of them."""
    prefix: int
    """Layers that are pinned where a step says it itself."""
    max_length: int
    predictor: Path

    def config(self, step: Step) -> Config:
        """Of the engine of `step`."""
        geometry = read_geometry(self.checkpoint)
        room = int(self.residency * geometry.num_routed_experts)
        pinned = {"slabs": room - self.prefix * geometry.num_experts, "pinned_prefix": self.prefix}
        plain = {"slabs": room, "pinned_prefix": 0}
        memory = {"base": plain, CAPTURED_BASE: plain, WHOLE: {"slabs": room}}
        words = step.words | {"memory": memory.get(step.name, pinned)}
        if step.reads_predictor:
            words["prediction"] = words.get("prediction", {}) | {"path": str(self.predictor)}
        return self.loaded(words, mode="graph" if step.is_captured else "eager")

    def loaded(self, words: dict[str, Any], *, mode: str = "eager") -> Config:
        """The model with `words`. Experts are as wide in host memory as on the device, as the paper's are."""
        common = {
            "device": self.device,
            "execution": {"mode": mode, "max_rows": 1, "max_length": self.max_length},
            "memory": words["memory"] | {"packed": False},
        }
        return config_from(self.checkpoint, words | common)


class Bank:
    """Experts in host memory, loaded once for all engines that come one after another."""

    def __init__(self) -> None:
        self._store: ExpertStore | None = None

    @contextmanager
    def parts(self, config: Config) -> Iterator[Parts]:
        """Parts of an engine of `config`, which must all be of one model; their experts stay."""
        resolved = plan_for(config).config  # what cannot be costs no experts
        store, self._store = self._store, None
        parts = assemble(resolved, store=store)
        try:
            yield parts
        finally:
            self._store = parts.release()
            free_device()

    def close(self) -> None:
        """Give the experts back."""
        if self._store is not None:
            self._store.close()
            self._store = None


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One engine's prompts. Times in milliseconds; `decode_ms` of a token."""

    all_prefill_ms: tuple[float, ...]
    all_decode_ms: tuple[float, ...]
    prefill: PhaseStats
    decode: PhaseStats
    compress_ms: float
    """Of a prompt; 0 where all image tokens are kept."""
    pinned: int
    """First MoE layers whose experts are all resident, outside the cache."""
    found: str
    """By timing captured steps; empty where nothing was."""

    @property
    def prefill_ms(self) -> float:
        return statistics.median(self.all_prefill_ms)

    @property
    def decode_ms(self) -> float:
        return statistics.median(self.all_decode_ms)

    def latency_ms(self, num_tokens: int) -> float:
        """A prompt and `num_tokens` tokens after the first."""
        return self.prefill_ms + num_tokens * self.decode_ms

    def __str__(self) -> str:
        return f"{self.prefill_ms:.0f} ms prefill, {self.decode_ms:.1f} ms a token; {self.about}"

    @property
    def about(self) -> str:
        """What the times come from."""
        about = f"{self.pinned} layers pinned; prefill: {_about(self.prefill)}; decode: {_about(self.decode)}"
        return f"{about}; {self.found}" if self.found else about


def _about(phase: PhaseStats) -> str:
    """Of a pass."""
    moved = phase.cache.bytes_moved / max(phase.passes, 1) / 1e6
    stalled = phase.stall_s / phase.seconds if phase.seconds else 0.0
    pass_ms = 1e3 * phase.seconds / max(phase.passes, 1)
    return (
        f"hits {phase.cache.hit_rate:.1%}, {moved:.0f} MB and {pass_ms:.1f} ms a pass, "
        f"stalled {stalled:.0%} of the time, {phase.cpu_share:.0%} of experts on the CPU"
    )


def measure(parts: Parts, mosaics: Sequence[Mosaic], *, tokens: int, settling: int) -> Measured:
    """Ask about each of `mosaics`, two or more; the first is not counted, for its kernels compile, nor are
    up to `settling` further answers to it, until the engine has tried all its captured steps.

    The caller closes `parts`, or has their experts go on.
    """
    engine = Engine(parts)
    _ask(engine, mosaics[0], tokens, seed=0)
    settle(parts.orchestrator, lambda seed: _ask(engine, mosaics[0], SETTLING_TOKENS, seed=seed), settling)
    before = engine.stats()
    timings = [_ask(engine, mosaic, tokens, seed=seed) for seed, mosaic in enumerate(mosaics[1:], 1)]
    after = engine.stats()
    engine.check()
    return Measured(
        all_prefill_ms=tuple(prefill for prefill, _ in timings),
        all_decode_ms=tuple(decode for _, decode in timings),
        prefill=_between(before.prefill, after.prefill),
        decode=_between(before.decode, after.decode),
        compress_ms=_compress_ms(before, after),
        pinned=engine.config.memory.pinned_prefix,
        found=_found(parts.orchestrator),
    )


def _found(orchestrator: Orchestrator) -> str:
    if not isinstance(orchestrator, DeviceOrchestrator):
        return ""
    found = []
    if orchestrator.num_ways > 1 or orchestrator.is_plain:
        found.append(f"steps {'without' if orchestrator.is_plain else 'with'} forecasts")
    if orchestrator.trials is not None:
        found.append(f"{orchestrator.trials.choice:.0%} of misses for the CPU")
    return ", ".join(found) + ("" if orchestrator.is_settled else ", still trying") if found else ""


def _ask(engine: Engine, mosaic: Mosaic, tokens: int, *, seed: int) -> tuple[float, float]:
    """Milliseconds to the first token, and of each one after it."""
    completion = engine.generate(
        mosaic.asked, max_tokens=tokens + 1, ignore_eos=True, temperature=_TEMPERATURE, seed=seed
    )
    timings = completion.timings
    return 1e3 * timings.ttft_s, 1e3 * timings.decode_s / tokens


def _between(before: PhaseStats, after: PhaseStats) -> PhaseStats:
    return PhaseStats(**{name: getattr(after, name) - value for name, value in vars(before).items()})


def _compress_ms(before: EngineStats, after: EngineStats) -> float:
    prompts = after.compression.prompts - before.compression.prompts
    return 1e3 * (after.compression.seconds - before.compression.seconds) / max(prompts, 1)
