"""The block drafter's training on a CPU: prompts, blocks, the loss, a run of two seconds."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.models.block_lesson import Blocks, block_loss, cut_blocks, num_accepted
from bench.models.greedy_texts import continue_greedily, repeat_spans
from bench.models.streams import Stream
from bench.models.train_block_drafter import Run, load_target, teach
from hetero_runtime.speculation.block.file import read_network

CPU = torch.device("cpu")


def test_a_repeated_span_is_the_beginning_over_and_over() -> None:
    torch.manual_seed(0)
    windows = torch.arange(400).view(4, 100)
    repeated = repeat_spans(windows, 3)
    assert torch.equal(repeated[3], windows[3])
    for row, window in zip(repeated[:3], windows[:3], strict=True):
        span = int((row != window).nonzero()[0])  # where it begins again
        assert 4 <= span < 32
        assert torch.equal(row, window[:span].repeat(100 // span + 1)[:100])


def test_greedy_texts_are_what_the_model_finds_likeliest() -> None:
    target = load_target(CPU)
    said = continue_greedily(target.model, torch.tensor([[40, 50, 60, 70], [400, 500, 600, 700]]), 12)
    logits = target.model(input_ids=said).logits
    assert torch.equal(said[:, 4:], logits[:, 3:-1].argmax(-1))


def test_blocks_are_cut_where_they_begin_and_end_with_the_text() -> None:
    texts = torch.arange(20).view(2, 10)
    blocks = cut_blocks(texts, torch.tensor([[0, 7], [3, 9]]), 4)
    assert blocks.tokens.tolist() == [[[0, 1, 2, 3], [7, 8, 9, -1]], [[13, 14, 15, 16], [19, -1, -1, -1]]]


def test_what_counts_is_right_up_to_the_first_mistake_and_early_tokens_weigh_more() -> None:
    blocks = Blocks(torch.zeros(1, 3, dtype=torch.long), torch.tensor([[[9, 1, 2, 3]] * 3]))
    says = torch.tensor([[[1, 2, 3], [0, 2, 3], [1, 2, 0]]])
    logits = torch.nn.functional.one_hot(says, 10).float() * 5
    assert num_accepted(logits, blocks).tolist() == [[3, 0, 2]]
    early, late = (
        block_loss(logits[:, [row]], Blocks(blocks.first, blocks.tokens[:, [row]])) for row in (1, 2)
    )
    assert early > late


def test_tokens_after_the_end_of_a_text_teach_nothing() -> None:
    logits = torch.randn(1, 1, 3, 10)
    whole = Blocks(torch.zeros(1, 1), torch.tensor([[[9, 1, -1, -1]]]))
    other = logits.clone()
    other[..., 1:, :] = torch.randn(2, 10)
    assert torch.equal(block_loss(logits, whole), block_loss(other, whole))


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that a very short run leaves."""
    torch.manual_seed(0)
    tokens = np.tile(np.arange(5, 205, dtype=np.uint16), 4)
    tokens[::50] = 0
    streams = [Stream(f"story.{part}", part == "held", tokens) for part in ("train", "held")]
    folder = tmp_path_factory.mktemp("drafter")
    teach(streams, Run(seconds=2, rows=4, length=40, prompts=(8,), batch=2, blocks=4), folder)
    return folder


def test_a_short_run_leaves_a_drafter_and_what_it_found(drafter: Path) -> None:
    network = read_network(drafter, dtype=torch.float32, device=CPU)
    assert network.shape.num_target_layers == 8
    assert (drafter / "model.safetensors").stat().st_size < 4e6
    facts = json.loads((drafter / "train.json").read_text())
    assert facts["steps"] > 0
    assert set(facts["accepted"]) == {"documents", "repeated"}
    assert facts["loss"] > 0
