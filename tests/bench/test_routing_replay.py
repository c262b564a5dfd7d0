"""Routing is recorded from held-out text alone, the same each time, and replayed token for token."""

from __future__ import annotations

import itertools
import lzma
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from bench.models.corpus import SEPARATOR, is_held_out
from bench.routing import RecordedRouting
from bench.routing_replay import Replay, held_out_streams, main, record
from tests.architectures import build_checkpoint

KINDS = ("code", "prose", "story")


def _held_out(kind: str) -> Iterator[str]:
    texts = (f"{kind} number {i}, of some length" for i in itertools.count())
    return filter(is_held_out, texts)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each kind: 12 documents that are held out, and one that is not."""
    folder = tmp_path_factory.mktemp("corpus")
    for kind in KINDS:
        documents = [*itertools.islice(_held_out(kind), 12), f"{kind} to train on"]
        text = SEPARATOR.join(documents)
        (folder / f"P.{kind}.made-up.txt.xz").write_bytes(lzma.compress(text.encode()))
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_checkpoint("Qwen3Moe", tmp_path_factory.mktemp("model"))


def test_streams_are_held_out_text_of_every_kind_in_turn(corpus: Path) -> None:
    streams = held_out_streams(corpus, num_streams=2)
    assert streams == held_out_streams(corpus, num_streams=2)
    documents = [document for stream in streams for document in stream]
    assert len(set(documents)) == len(documents) == 3 * 12
    assert all(map(is_held_out, documents))
    for stream in streams:
        assert [document.split()[0] for document in stream] == 6 * list(KINDS)


def test_recording_is_what_the_routers_choose(model: Path, corpus: Path) -> None:
    streams = held_out_streams(corpus, num_streams=2)
    recorded = record(streams, num_tokens=60, model_folder=model, device="cpu")
    config = AutoModelForCausalLM.from_pretrained(model).config
    shape = (2, 60, config.num_hidden_layers, config.num_experts_per_tok)
    assert recorded.experts.shape == shape
    assert recorded.experts.max() < recorded.num_experts == config.num_experts
    ordered = np.sort(recorded.experts, axis=-1)
    assert (ordered[..., 1:] != ordered[..., :-1]).all()
    again = record(streams, num_tokens=60, model_folder=model, device="cpu")
    assert (again.experts == recorded.experts).all()


def test_stream_that_is_too_short_is_refused(model: Path) -> None:
    with pytest.raises(ValueError, match="a stream of 1 documents has"):
        record([["short"]], num_tokens=1000, model_folder=model, device="cpu")


def test_command_writes_a_file(model: Path, corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "routing.safetensors"
    words = ["--corpus", corpus, "--out", out, "--model", model, "--streams", "2", "--tokens", "40"]
    main([str(word) for word in words])
    assert RecordedRouting.load(out).experts.shape[:2] == (2, 40)


def test_replay_puts_recorded_experts_in_place_of_the_routers() -> None:
    seen: list[tuple[int, list[list[int]]]] = []

    def run_layer(
        layer: int, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        seen.append((layer, index.tolist()))
        return hidden

    recorded = np.arange(5 * 2 * 2).reshape(5, 2, 2)  # [tokens, layers, top_k]
    replay = Replay(run_layer, recorded, torch.device("cpu"))
    for num_tokens in (3, 1):  # a prompt, then one token
        hidden, chosen = torch.zeros(num_tokens, 4), torch.zeros(num_tokens, 2, dtype=torch.long)
        for layer in range(2):
            replay(layer, hidden, chosen, torch.ones(num_tokens, 2))
    assert seen == [(layer, recorded[:3, layer].tolist()) for layer in range(2)] + [
        (layer, recorded[3:4, layer].tolist()) for layer in range(2)
    ]
    assert replay.position == 4
    for layer in range(2):  # the end of the recording, and its beginning again
        replay(layer, torch.zeros(2, 4), torch.zeros(2, 2, dtype=torch.long), torch.ones(2, 2))
    assert seen[-2:] == [(layer, recorded[[4, 0], layer].tolist()) for layer in range(2)]
