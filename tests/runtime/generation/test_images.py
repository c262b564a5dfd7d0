"""Images in every accepted form give the same pixels; what is no image is named."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from hetero_runtime.errors import RequestError
from hetero_runtime.generation import collect_images

PIXELS = np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3)


def png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()


PNG = png(Image.fromarray(PIXELS))
BASE64 = base64.b64encode(PNG).decode()


def ask(source: Any, kind: str = "image") -> list[dict[str, Any]]:
    image = {"type": kind, kind: source}
    return [
        {"role": "system", "content": "x"},
        {"role": "user", "content": [{"type": "text", "text": "?"}, image]},
    ]


@pytest.mark.parametrize(
    "form", ["pil", "array", "tensor", "path", "path text", "file url", "data url", "base64"]
)
def test_every_form_gives_the_same_pixels(form: str, tmp_path: Path) -> None:
    file = tmp_path / "image.png"
    file.write_bytes(PNG)
    source = {
        "pil": Image.fromarray(PIXELS),
        "array": PIXELS,
        "tensor": torch.from_numpy(PIXELS),
        "path": file,
        "path text": str(file),
        "file url": f"file://{file}",
        "data url": f"data:image/png;base64,{BASE64}",
        "base64": BASE64[:20] + "\n" + BASE64[20:],
    }[form]
    for messages in (ask(source), ask(source, "image_url"), ask({"url": source}, "image_url")):
        (image,) = collect_images(messages)
        assert image.mode == "RGB"
        assert np.array_equal(np.asarray(image), PIXELS)


def test_images_come_in_order() -> None:
    red, green = Image.new("RGB", (2, 2), "red"), Image.new("RGB", (3, 3), "green")
    messages = [*ask(red), *ask(green), {"role": "assistant", "content": "ok"}]
    assert [image.size for image in collect_images(messages)] == [(2, 2), (3, 3)]
    assert collect_images([{"role": "user", "content": "no image"}]) == []


@pytest.mark.parametrize("shape", [(4, 6), (4, 6, 1), (4, 6, 3), (4, 6, 4)], ids=str)
def test_array_shapes(shape: tuple[int, ...]) -> None:
    (image,) = collect_images(ask(np.full(shape, 200, dtype=np.uint8)))
    assert (image.mode, image.size) == ("RGB", (6, 4))


def test_photo_is_turned_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # orientation: turn by 90 degrees
    buffer = io.BytesIO()
    Image.fromarray(PIXELS).save(buffer, format="JPEG", exif=exif)
    (image,) = collect_images(ask(base64.b64encode(buffer.getvalue()).decode()))
    assert image.size == (4, 6)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("no/such/file.png", "neither a readable file nor base64"),
        ("https://example.org/a.png", "web address"),
        ("data:image/png,raw", "no data URL"),
        ("data:image/png;base64,@@@", "nor base64"),
        (base64.b64encode(b"plain text, no image").decode(), "its 20 bytes are of no known image format"),
        (base64.b64encode(PNG[:-30]).decode(), "no image that can be read"),
        ("", "its 0 bytes are of no known image format"),
        (3.5, "is a float, no image"),
        (PIXELS.astype(np.float32), r"array \[4, 6, 3\] of float32"),
        (PIXELS.transpose(2, 0, 1), r"array \[3, 4, 6\] of uint8"),
        (torch.zeros(4, 6, 3), r"array \[4, 6, 3\] of float32"),
        (torch.zeros(4, 6, 3, dtype=torch.bfloat16), "is no image: .*; give a PIL image"),
        (PIXELS[:0], r"array \[0, 6, 3\]"),
        (Image.new("RGB", (0, 5)), "0 x 5 pixels"),
    ],
    ids=lambda value: str(value)[:20] if isinstance(value, str) else type(value).__name__,
)
def test_what_is_no_image_is_named(source: Any, expected: str) -> None:
    with pytest.raises(RequestError, match=rf"messages\[1\]\.content\[1\].*{expected}"):
        collect_images(ask(source))


def test_text_file_is_no_image(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("hello")
    with pytest.raises(
        RequestError, match=r"messages\[1\]\.content\[1\] is no image that can be read: its 5 bytes are"
    ):
        collect_images(ask(file))


def test_a_server_keeps_its_files(tmp_path: Path) -> None:
    file = tmp_path / "secret.png"
    file.write_bytes(PNG)
    with pytest.raises(RequestError, match="no image"):
        collect_images(ask(str(file)), allow_files=False)
    assert collect_images(ask(BASE64), allow_files=False)
