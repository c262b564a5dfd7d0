"""Prompts that lose image tokens, in rows of the fixed cache: as one after another in transformers' own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from hetero_runtime.assembly import Parts, assemble
from hetero_runtime.hf.sequences import StaticSequences
from hetero_runtime.orchestrator import Phase
from hetero_runtime.planned import plan_for
from hetero_runtime.source import config_from
from tests.architectures import build_checkpoint, image_inputs, prompt_ids

NUM_STEPS = 12


class Prompt(NamedTuple):
    """`num_dropped`: image tokens that layers behind the cut do not see."""

    ids: torch.Tensor
    images: dict[str, torch.Tensor] | None
    num_dropped: int


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[Parts]:
    folder = build_checkpoint("Qwen3VLMoe", tmp_path / "model")
    memory = {"slabs": "all", "pinned_prefix": 1}
    words = {"device": "cpu", "memory": memory, "vision": {"keep_ratio": 0.5}}
    made = assemble(plan_for(config_from(folder, words)).config)
    yield made
    made.close()


@pytest.fixture
def prompts() -> list[Prompt]:
    """One image, none, two images."""
    found = []
    for num_images in (1, 0, 2):
        if not num_images:
            found.append(Prompt(prompt_ids(9)[0], None, 0))
            continue
        images = image_inputs(num_images=num_images, side=128)
        ids = images.pop("input_ids")[0]
        del images["attention_mask"]
        found.append(Prompt(ids, images, int(images["mm_token_type_ids"].sum()) // 2))
    return found


@torch.inference_mode()
def one_after_another(parts: Parts, prompt: Prompt) -> list[int]:
    with parts.sequences.open() as sequence, parts.orchestrator.pass_(Phase.PREFILL, checkpoint=list):
        said = [int(sequence.extend(prompt.ids, prompt.images).argmax())]
        while len(said) <= NUM_STEPS:
            said.append(int(sequence.extend(torch.tensor(said[-1:])).argmax()))
    return said


def in_rows(parts: Parts, sequences: StaticSequences, prompts: list[Prompt]) -> list[list[int]]:
    with parts.orchestrator.pass_(Phase.PREFILL, checkpoint=list):
        said = [
            [int(sequences.prefill(row, prompt.ids, prompt.images).argmax())]
            for row, prompt in enumerate(prompts)
        ]
        for _ in range(NUM_STEPS):
            logits = sequences.decode(torch.tensor([row[-1] for row in said]))
            for row, token in zip(said, logits.argmax(dim=-1).tolist(), strict=True):
                row.append(token)
    return said


def check_lengths(parts: Parts, sequences: StaticSequences, prompts: list[Prompt]) -> None:
    """A layer in front of the cut has all tokens of a row, one behind it has lost some of them."""
    layers = list(sequences._cache._layers)
    for row, prompt in enumerate(prompts):
        for number, missing in ((0, 0), (1, prompt.num_dropped)):
            keys = layers[number].keys  # type: ignore[union-attr]
            assert keys is not None
            length = sequences.length(row) - missing
            assert keys[row, :, :length].abs().sum(dim=(0, 2)).all() and not keys[row, :, length:].any()


@pytest.mark.parametrize("is_fused", [False, True], ids=["stock", "fused"])
def test_rows_with_fewer_image_tokens(is_fused: bool, parts: Parts, prompts: list[Prompt]) -> None:
    expected = [one_after_another(parts, prompt) for prompt in prompts]
    sequences = StaticSequences(parts.model, rows=3, max_length=200, cut=parts.compressor)
    if is_fused:
        pytest.importorskip("triton")
        from hetero_runtime.hf.fused_attention import fuse_attention

        assert fuse_attention(parts.model).num_layers == 3
    assert in_rows(parts, sequences, prompts) == expected
    check_lengths(parts, sequences, prompts)


def test_a_row_is_used_again_and_goes_on_behind_what_was_cut(parts: Parts, prompts: list[Prompt]) -> None:
    image, text, _ = prompts
    expected = [one_after_another(parts, prompt) for prompt in (image, text)]
    sequences = StaticSequences(parts.model, rows=1, max_length=200, cut=parts.compressor)
    with parts.orchestrator.pass_(Phase.PREFILL, checkpoint=list):
        said = [int(sequences.prefill(0, image.ids, image.images).argmax())]
        assert int(sequences.prefill(0, torch.tensor(expected[0][:4])).argmax()) == expected[0][4]
    assert said == expected[0][:1]
    sequences.reset(0)
    assert in_rows(parts, sequences, [text]) == expected[1:]
