"""Hugging Face Accelerate's offload of the same model, by our measure: the base of VisMMOE's Table 4.

It keeps whole layers on the device; of the others it copies every expert for every pass.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForImageTextToText
from transformers.generation.streamers import BaseStreamer

from bench.eager_decode import free_device
from bench.vl.mosaic import Mosaic
from hetero_runtime.generation import SamplingParams
from hetero_runtime.hf.tokens import load_tokenizer
from hetero_runtime.plan.geometry import read_geometry
from hetero_runtime.prompt import PromptReader

_PREFIX = "model.language_model"
_ALWAYS_THERE = (
    "model.visual",
    f"{_PREFIX}.embed_tokens",
    f"{_PREFIX}.norm",
    f"{_PREFIX}.rotary_emb",
    "lm_head",
)


class Peer(NamedTuple):
    """Milliseconds: medians of a prompt, and of a token after the first one."""

    prefill_ms: float
    decode_ms: float
    resident: int
    layers: int

    def latency_ms(self, num_tokens: int) -> float:
        """As of `bench.vl_steps.Measured`."""
        return self.prefill_ms + num_tokens * self.decode_ms


class _Clock(BaseStreamer):
    """Told of the prompt before it runs, then of each token once it is on the host."""

    def __init__(self) -> None:
        self.moments: list[float] = []

    def put(self, _value: torch.Tensor) -> None:
        self.moments.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is kept back."""


def measure_accelerate(
    checkpoint: Path, mosaics: Sequence[Mosaic], *, device: str, residency: float, tokens: int
) -> Peer:
    """Ask about each of `mosaics`, two or more; the first is not counted.

    On a GPU what is not resident lies in host memory; on a CPU, which then plays the device, on the disk.
    """
    layers = read_geometry(checkpoint).num_moe_layers
    resident = int(residency * layers)
    main, below = (0, "cpu") if device == "cuda" else ("cpu", "disk")
    places = dict.fromkeys(_ALWAYS_THERE, main)
    places |= {f"{_PREFIX}.layers.{layer}": main if layer < resident else below for layer in range(layers)}
    with tempfile.TemporaryDirectory() as folder:
        model: Any = AutoModelForImageTextToText.from_pretrained(
            checkpoint, dtype=torch.bfloat16, device_map=places, offload_folder=folder, local_files_only=True
        ).eval()
        prompts = _inputs(checkpoint, model.config, mosaics)
        timings = [_ask(model, _on(device, prompt), tokens) for prompt in prompts][1:]
        del model
        free_device()
    prefills, decodes = zip(*timings, strict=True)
    return Peer(statistics.median(prefills), statistics.median(decodes), resident, layers)


def _inputs(checkpoint: Path, config: Any, mosaics: Sequence[Mosaic]) -> list[dict[str, torch.Tensor]]:
    """What transformers takes of each prompt."""
    reader = PromptReader(
        checkpoint,
        tokenizer=load_tokenizer(checkpoint),
        config=config,
        has_images=True,
        max_length=config.text_config.max_position_embeddings,
    )
    read = [reader.read(mosaic.asked, SamplingParams(max_tokens=1)) for mosaic in mosaics]
    return [{"input_ids": torch.tensor([prompt.ids]), **(prompt.images or {})} for prompt in read]


def _on(device: str, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: part.to(device) for name, part in inputs.items()}


@torch.inference_mode()
def _ask(model: Any, inputs: dict[str, torch.Tensor], tokens: int) -> tuple[float, float]:
    clock, count = _Clock(), tokens + 1
    model.generate(**inputs, max_new_tokens=count, min_new_tokens=count, do_sample=False, streamer=clock)
    began, first, *_, last = clock.moments
    return 1e3 * (first - began), 1e3 * (last - first) / tokens
