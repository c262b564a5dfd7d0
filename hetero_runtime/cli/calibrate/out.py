"""Where a calibration is kept: a file that is named, or the one beside the model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from hetero_runtime.config import Config

OutOption = Annotated[
    Path | None,
    typer.Option("--out", help="Safetensors file to write. None: beside the model, where it is found."),
]


def file_to_write(out: Path | None, config: Config, suffix: str) -> Path:
    """What `--out` means for the model of `config`. Raises DeviceError where its folder does not exist."""
    from hetero_runtime.beside_model import beside
    from hetero_runtime.config import model_dir
    from hetero_runtime.whole_file import check_folder

    path = out or beside(model_dir(config), suffix)
    check_folder(path)
    return path
