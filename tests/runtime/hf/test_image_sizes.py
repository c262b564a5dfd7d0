"""What follows from sizes of images is made on the host: passes over images ask the device for nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hetero_runtime.foresight.sight import Sight
from hetero_runtime.hf.visual import image_positions, images_on, read_sizes_on_host
from hetero_runtime.hf.visual.sizes import add_features_to
from tests.architectures import build_checkpoint, image_inputs, reference_model

NO_VALUES = torch.device("meta")
"""Who asks a tensor there for a value gets an error, and where a GPU is asked, its host waits."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that sees."""
    return build_checkpoint("Qwen3VLMoe", tmp_path_factory.mktemp("Qwen3VLMoe"))


def two_sizes() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A prompt `[n]` with images of 64 x 64 pixels, and its images."""
    inputs = image_inputs(num_images=2)
    ids = inputs.pop("input_ids")[0]
    del inputs["attention_mask"]
    return ids, inputs


def logits_of(model: Any, ids: torch.Tensor, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=ids[None], use_cache=False, **inputs).logits
    return logits


def test_a_pass_over_images_is_the_same_and_asks_the_device_for_nothing(folder: Path) -> None:
    ids, images = two_sizes()
    expected = logits_of(reference_model(folder), ids, images)
    model: Any = reference_model(folder)
    read_sizes_on_host(model)
    inputs = images | {"position_ids": image_positions(model, ids, images).positions}
    for _ in range(2):  # the second time the encoder's tables are there already
        assert torch.equal(logits_of(model, ids, inputs), expected)
    model.to(NO_VALUES).set_experts_implementation("batched_mm")
    inputs = images_on(NO_VALUES, images) | {"position_ids": inputs["position_ids"].to(NO_VALUES)}
    assert logits_of(model, ids.to(NO_VALUES), inputs).shape == expected.shape


def test_tables_follow_the_sizes(folder: Path) -> None:
    plain, model = (reference_model(folder) for _ in range(2))
    read_sizes_on_host(model)
    for side in (64, 128, 64):
        inputs = image_inputs(side=side)
        pixels, sizes = inputs["pixel_values"], inputs["image_grid_thw"]
        with torch.inference_mode():
            expected = plain.model.visual(pixels, grid_thw=sizes).pooler_output
            assert torch.equal(model.model.visual(pixels, grid_thw=sizes).pooler_output, expected)


def test_positions_are_those_of_transformers(folder: Path) -> None:
    ids, images = two_sizes()
    model: Any = reference_model(folder)
    logits_of(model, ids, images)
    positions, offset = image_positions(model, ids, images)
    expected, _ = model.model.get_rope_index(
        ids[None], image_grid_thw=images["image_grid_thw"], mm_token_type_ids=images["mm_token_type_ids"]
    )
    assert torch.equal(positions, expected)
    assert offset == int(model.model.rope_deltas) == int(expected.max()) + 1 - len(ids)


@pytest.mark.parametrize("kept", [None, [0, 2, 3, 5]], ids=["whole", "cut"])
def test_features_are_added_where_images_stand(folder: Path, kept: list[int] | None) -> None:
    text: Any = reference_model(folder).model.language_model
    hidden, features = torch.randn(1, 6, 8), torch.randn(3, 8)
    is_image = torch.tensor([[False, True, True, False, False, True]])
    expected = text._deepstack_process(hidden, is_image, features)
    places = None if kept is None else torch.tensor(kept)
    add_features_to(text, kept=lambda: places)
    if places is not None:
        hidden, expected = hidden[:, places], expected[:, places]
    assert torch.equal(text._deepstack_process(hidden, is_image, features), expected)
    on_device = (tensor.to(NO_VALUES) for tensor in (hidden, is_image, features))
    places = None if places is None else places.to(NO_VALUES)
    assert text._deepstack_process(*on_device).shape == expected.shape


def test_the_summary_of_an_image_asks_for_no_value() -> None:
    class Part:
        def positions(self, ids: torch.Tensor, _images: Any) -> list[torch.Tensor]:
            return [torch.tensor([1, 2], device=ids.device)]

    kept: list[torch.Tensor] = []
    part: Any = Part()
    sight = Sight(part, lambda: kept[0] if kept else None)
    for device in (torch.device("cpu"), NO_VALUES):
        kept.clear()
        with sight.during(torch.zeros(4, dtype=torch.long, device=device), {}):
            sight.hear(torch.tensor([[9.0], [1.0], [3.0], [9.0]], device=device))
            whole = sight.news()
            kept.append(torch.tensor([0, 2, 3], device=device))
            cut = sight.news()
        assert whole is not None and cut is not None
        assert device == NO_VALUES or (whole.tolist(), cut.tolist()) == ([2.0], [3.0])


def test_only_what_the_host_reads_stays_there() -> None:
    names = ("pixel_values", "image_grid_thw", "mm_token_type_ids", "image_places", "tile_grid")
    moved = images_on(NO_VALUES, {name: torch.zeros(1) for name in names})
    there = {name for name, tensor in moved.items() if tensor.device == NO_VALUES}
    assert there == {"pixel_values", "image_places"}
