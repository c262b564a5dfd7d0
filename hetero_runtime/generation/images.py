"""The images of chat messages, whatever form they come in, as PIL images in RGB."""

from __future__ import annotations

import base64
import binascii
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetero_runtime.errors import RequestError
from hetero_runtime.generation.base import Message
from hetero_runtime.generation.chat import check_messages, image_parts

if TYPE_CHECKING:
    from PIL import Image

FORMS = "a PIL image, a uint8 array or tensor [height, width, 3], a file path, a data: URL or base64 text"


def collect_images(messages: Sequence[Message], *, allow_files: bool = True) -> list[Image.Image]:
    """All images of a conversation, in order, upright and in RGB.

    A server sets `allow_files=False`, so that a caller cannot read the files of its host. Nothing is
    fetched from the network. Raises RequestError that names message and part.
    """
    check_messages(messages)
    return [_load(source, where, allow_files=allow_files) for where, source in image_parts(messages)]


def _load(source: Any, where: str, *, allow_files: bool) -> Image.Image:
    from PIL import Image

    if isinstance(source, Image.Image):
        return _upright_rgb(source, where)
    if hasattr(source, "__array__"):
        return _from_array(source, where)
    if isinstance(source, str | os.PathLike):
        return _from_bytes(_read(os.fsdecode(source), where, allow_files=allow_files), where)
    raise RequestError(f"{where} is a {type(source).__name__}, no image: give {FORMS}")


def _read(source: str, where: str, *, allow_files: bool) -> bytes:
    """The encoded image behind a data: URL, a file path or bare base64."""
    if source.startswith(("http://", "https://")):
        raise RequestError(
            f"{where} is a web address, and nothing is fetched here: download it, give {FORMS}"
        )
    if source.startswith("data:"):
        header, comma, data = source.partition(",")
        if not comma or not header.endswith(";base64"):
            raise RequestError(
                f"{where} is no data URL of the form data:image/png;base64,...: {source[:40]!r}"
            )
        return _from_base64(data, where)
    path = source.removeprefix("file://")
    if allow_files and os.path.isfile(path):
        try:
            return Path(path).read_bytes()
        except OSError as error:
            raise RequestError(f"{where}: image file {path} cannot be read: {error.strerror}") from error
    return _from_base64(source, where)


def _from_base64(data: str, where: str) -> bytes:
    try:
        return base64.b64decode("".join(data.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestError(
            f"{where} is no image: {data[:40]!r} is neither a readable file nor base64; give {FORMS}"
        ) from error


def _from_bytes(data: bytes, where: str) -> Image.Image:
    from PIL import Image, UnidentifiedImageError

    try:
        image = Image.open(io.BytesIO(data))
        image.load()  # decode now: a truncated file must fail here, not in the middle of a prefill
    except UnidentifiedImageError as error:
        raise RequestError(
            f"{where} is no image that can be read: its {len(data)} bytes are of no known image format"
        ) from error
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise RequestError(f"{where} is no image that can be read ({len(data)} bytes): {error}") from error
    return _upright_rgb(image, where)


def _from_array(array: Any, where: str) -> Image.Image:
    import numpy as np
    from PIL import Image

    try:
        # a tensor of torch may be on a GPU, or part of a graph
        pixels = np.asarray(array.detach().cpu() if hasattr(array, "detach") else array)
    except (TypeError, ValueError) as error:
        raise RequestError(f"{where} is no image: {error}; give {FORMS}") from error
    channels = pixels.shape[2] if pixels.ndim == 3 else 1
    if pixels.dtype != np.uint8 or pixels.ndim not in (2, 3) or channels not in (1, 3, 4) or not pixels.size:
        raise RequestError(
            f"{where} is an array {list(pixels.shape)} of {pixels.dtype}, no image: give uint8 "
            "[height, width], or [height, width, channels] with 1, 3 or 4 channels"
        )
    squeezed = pixels[:, :, 0] if pixels.ndim == 3 and channels == 1 else pixels
    return _upright_rgb(Image.fromarray(np.ascontiguousarray(squeezed)), where)


def _upright_rgb(image: Image.Image, where: str) -> Image.Image:
    """Turned as its EXIF data says and in RGB, as transformers' own loader does."""
    from PIL import ImageOps

    if image.width == 0 or image.height == 0:
        raise RequestError(f"{where} is an image of {image.width} x {image.height} pixels: it shows nothing")
    try:
        return ImageOps.exif_transpose(image).convert("RGB")
    except (OSError, ValueError, SyntaxError) as error:
        raise RequestError(f"{where} is no image that can be read: {error}") from error
