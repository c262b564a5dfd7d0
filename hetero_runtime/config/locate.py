"""Where the model of a configuration lies."""

from __future__ import annotations

from pathlib import Path

from hetero_runtime.config.tree import Config


def model_dir(config: Config) -> Path:
    """The folder that `model.path` names; the bundled model's for null."""
    if config.model.path is not None:
        return Path(config.model.path).expanduser()
    from hetero_runtime.bundled import model_path

    return Path(model_path())
