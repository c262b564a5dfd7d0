"""Listening to an encoder's attention changes no bit of it, and hears what eager attention would keep."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hetero_runtime.hf.visual import attention, listen_to_attention, received_attention, visual_part
from tests.architectures import build_checkpoint, image_inputs, reference_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that sees."""
    return build_checkpoint("Qwen3VLMoe", tmp_path_factory.mktemp("Qwen3VLMoe"))


def received_plainly(query: torch.Tensor, key: torch.Tensor, scaling: float) -> torch.Tensor:
    weights = torch.softmax((query @ key.transpose(2, 3)).double() * scaling, dim=-1)  # [b, heads, n, n]
    return weights.mean(dim=(1, 2))


@pytest.mark.parametrize("most_weights", [1, 100, 1 << 22])
@pytest.mark.parametrize("shape", [(1, 2, 1, 8), (1, 4, 63, 16), (3, 2, 20, 8)], ids=str)
def test_received_in_parts_is_received_at_once(
    shape: tuple[int, ...], most_weights: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(attention._MOST_WEIGHTS, "cpu", most_weights)
    query, key = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0)).unbind(0)
    received = received_attention(query, key, scaling=0.3)
    torch.testing.assert_close(received.double(), received_plainly(query, key, 0.3), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(received.sum(-1), torch.ones(shape[0]))


class Sizes(TorchDispatchMode):
    """Elements of all that is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            self.seen.append(made.numel())
        return made


def test_all_weights_are_written_twice_and_no_more() -> None:
    """As scores and as what the softmax makes of them."""
    query, key = torch.randn(2, 1, 4, 63, 16).unbind(0)
    with Sizes() as sizes:
        received_attention(query, key, scaling=0.3)
    assert sizes.seen.count(4 * 63 * 63) == 2


def test_listening_changes_no_bit_and_hears_each_image(folder: Path) -> None:
    model = reference_model(folder)
    inputs = image_inputs(num_images=2)
    pixels, grids = inputs["pixel_values"], inputs["image_grid_thw"]
    with torch.inference_mode():
        before = model.model.visual(pixels, grid_thw=grids).pooler_output
        heard: list[torch.Tensor] = []
        part = visual_part(model)
        assert part is not None
        listen_to_attention(
            part.attention,
            lambda query, key, scaling: heard.append(received_attention(query, key, scaling=scaling)),
        )
        after = model.model.visual(pixels, grid_thw=grids).pooler_output
    assert torch.equal(before, after)
    assert [tuple(each.shape) for each in heard] == [(1, int(grid.prod())) for grid in grids]
    saliency = part.saliency(heard, inputs)
    positions = part.positions(inputs["input_ids"][0], inputs)
    assert [len(each) for each in saliency] == [len(each) for each in positions]
    merged = heard[1][0].view(-1, 4)  # the encoder's order has the four patches of a token side by side
    assert torch.equal(saliency[1], merged.mean(dim=1))


def test_what_reads_text_alone_has_no_visual_part(tmp_path: Path) -> None:
    assert visual_part(reference_model(build_checkpoint("Qwen3Moe", tmp_path))) is None


def test_only_attention_that_is_known_is_listened_to(folder: Path) -> None:
    part = visual_part(reference_model(folder))
    assert part is not None
    part.attention.config._attn_implementation = "eager"
    with pytest.raises(AssertionError, match="attends by eager"):
        listen_to_attention(part.attention, lambda _query, _key, _scaling: None)
