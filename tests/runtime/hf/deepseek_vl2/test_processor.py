"""How images are cut, how many tokens that makes, and how a conversation is written."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

from hetero_runtime.errors import CheckpointError, RequestError
from hetero_runtime.generation import render_messages
from hetero_runtime.hf.deepseek_vl2.tiles import TileGrid, choose_grid
from hetero_runtime.hf.images import ImageProcessor, image_token_id, make_image_processor
from hetero_runtime.hf.loading import read_config
from hetero_runtime.hf.tokens import load_tokenizer
from tests import tiny_tokenizer
from tests.deepseek_vl2_checkpoints import IMAGE, NUM_ADDED, TILE, build_deepseek_vl2

PUBLISHED = [(384 * m, 384 * n) for m in range(1, 10) for n in range(1, 10) if m * n <= 9]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return build_deepseek_vl2("tiny", tmp_path)


@pytest.fixture
def processor(folder: Path, monkeypatch: pytest.MonkeyPatch) -> ImageProcessor:
    monkeypatch.setitem(sys.modules, "torchvision", None)
    return make_image_processor(folder, read_config(folder), load_tokenizer(folder))


def noise(width: int, height: int) -> Image.Image:
    pixels = np.random.default_rng(width).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


@pytest.mark.parametrize(
    ("size", "grid"),
    [
        ((384, 384), (1, 1)),
        ((100, 100), (1, 1)),  # all keep all of it: the one that leaves the least empty
        ((1000, 500), (3, 2)),
        ((100, 900), (1, 3)),
        ((4000, 300), (9, 1)),
        ((5000, 5000), (3, 3)),
    ],
    ids=str,
)
def test_the_grid_keeps_most_pixels(size: tuple[int, int], grid: tuple[int, int]) -> None:
    assert choose_grid(size, PUBLISHED, tile_size=384) == grid


@pytest.mark.parametrize("size", [(28, 28), (1, 1), (60, 30), (20, 90), (500, 499), (3, 400)], ids=str)
def test_views_are_the_image_fitted_and_cut(size: tuple[int, int], processor: ImageProcessor) -> None:
    image = noise(*size)
    (num_tokens,) = processor.num_tokens([image])
    inputs = processor.inputs([1, *[IMAGE] * num_tokens, 2], [image])
    ((columns, rows),) = inputs["tile_grid"].tolist()
    assert int(inputs["image_places"].sum()) == num_tokens == 4 * 5 + 1 + 4 * rows * (4 * columns + 1)
    whole = ImageOps.pad(image, (TILE, TILE), color=(127, 127, 127))
    fitted = ImageOps.pad(image, (TILE * columns, TILE * rows), color=(127, 127, 127))
    views = [whole] + [
        fitted.crop((TILE * x, TILE * y, TILE * (x + 1), TILE * (y + 1)))
        for y in range(rows)
        for x in range(columns)
    ]
    expected = np.stack([np.asarray(view).transpose(2, 0, 1) / 127.5 - 1 for view in views])
    np.testing.assert_allclose(inputs["pixel_values"].numpy(), expected, atol=1e-6)


def test_more_than_two_images_are_one_tile_each(processor: ImageProcessor) -> None:
    images = [noise(60, 30), noise(90, 90), noise(28, 56)]
    assert processor.inputs([], images[:2])["tile_grid"].tolist() == [[3, 2], [3, 3]]
    assert processor.inputs([], images)["tile_grid"].tolist() == [[1, 1]] * 3
    assert processor.num_tokens(images) == [41] * 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "processor_config.json: cannot be read .* Copy processor_config.json from"),
        ("[]", "is not a JSON object"),
        ("{}", "does not say how images are prepared .*candidate_resolutions"),
        ('{"candidate_resolutions": [28]}', "does not say how images are prepared"),
        ('{"sft_format": "plain"}', "sft_format is 'plain', which is not covered; covered is 'deepseek'"),
    ],
)
def test_a_spoilt_processor_config(text: str | None, message: str, folder: Path) -> None:
    file = folder / "processor_config.json"
    file.unlink() if text is None else file.write_text(text)
    with pytest.raises(CheckpointError, match=message):
        make_image_processor(folder, read_config(folder), load_tokenizer(folder))


def test_the_tokenizer_gets_the_tokens_that_it_lacks(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    assert len(tokenizer) == tiny_tokenizer.VOCAB_SIZE + NUM_ADDED
    assert image_token_id(read_config(folder), tokenizer) == IMAGE
    tokenizer.save_pretrained(folder)
    again = load_tokenizer(folder)
    assert again.get_vocab() == tokenizer.get_vocab()


def test_a_conversation(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    picture = {"type": "image", "image": noise(3, 3)}
    messages = [
        {"role": "system", "content": " Be brief. "},
        {"role": "user", "content": [picture, {"type": "text", "text": "What is this? "}]},
        {"role": "assistant", "content": " A cat. "},
        {"role": "user", "content": "Sure?"},
    ]
    assert tokenizer.decode(render_messages(tokenizer, messages)) == (
        "<|begin|>Be brief.<|User|>: <image>\nWhat is this?\n\n<|Assistant|>:A cat.<|end|>"
        "<|User|>: Sure?\n\n<|Assistant|>:"
    )


def test_a_system_message_comes_first(folder: Path) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]
    with pytest.raises(RequestError, match="system message out of place: system first, then user and assist"):
        render_messages(load_tokenizer(folder), messages)


def test_a_template_of_the_checkpoint_that_knows_images_is_kept(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("<image>{{ messages[0].content }}")
    tokenizer = load_tokenizer(folder)
    assert tokenizer.decode(render_messages(tokenizer, [{"role": "user", "content": "x"}])) == "<image>x"


def test_the_config_names_no_architecture_as_published(folder: Path) -> None:
    assert "architectures" not in json.loads((folder / "config.json").read_text())
    assert read_config(folder).get_text_config(decoder=True).num_hidden_layers == 3


def test_a_grid_is_columns_then_rows() -> None:
    assert choose_grid((2, 1), [(20, 10)], tile_size=10) == TileGrid(columns=2, rows=1)
