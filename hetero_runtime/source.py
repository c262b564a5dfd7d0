"""What a caller of Python gives as a configuration: a file, a folder, a dict, and keywords laid over it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from hetero_runtime.config import Config, load_config
from hetero_runtime.errors import ConfigError


def config_from(
    source: str | Path | Mapping[str, Any] | None,
    overrides: Mapping[str, Any],
    beneath: Mapping[str, Any] | None = None,
) -> Config:
    """The configuration that `Engine.load` means: a model folder stands for a file that only names it.

    `beneath`: as for `load_config`. Raises ConfigError.
    """
    flat = [f"{path}={_yaml(path, value)}" for path, value in _leaves(overrides)]
    if not isinstance(source, str | Path):
        return load_config(None if source is None else _plain(source), overrides=flat, beneath=beneath)
    path = Path(source).expanduser()
    if not path.exists():
        raise ConfigError(f"{path}: no such file or folder; give a YAML file, or the folder of a model")
    named = {"model": {"path": str(path)}} if path.is_dir() else path
    return load_config(named, overrides=flat, beneath=beneath)


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _plain(value: Any) -> Any:
    """`value` with paths as text, all the way down."""
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _yaml(path: str, value: Any) -> str:
    """`value` on one line, as `--set` takes it."""
    try:
        return yaml.safe_dump(_plain(value), default_flow_style=True, width=float("inf")).partition("\n")[0]
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: {value!r:.80} is not allowed; give text, a number or None") from error
