"""Files of a model lie beside its folder, named like it: `model.predictor.safetensors` is of `model/`."""

from __future__ import annotations

from pathlib import Path


def beside(folder: Path, suffix: str) -> Path:
    """The one with `suffix` of the model in `folder`."""
    folder = folder.resolve()
    return folder.with_name(folder.name + suffix)


def named_or_beside(named: str, folder: Path, suffix: str) -> Path:
    """The file that a key of the configuration means: `named`, or for `auto` the one beside the model."""
    return beside(folder, suffix) if named == "auto" else Path(named).expanduser()
