"""Configuration: a YAML file or a dict, plus `--set` overrides, becomes one frozen tree.

    load_config(source, overrides=...) -> Config            what the user wrote, checked
    model_dir(config) -> Path                               its model folder
    settle_mode(config, hardware, geometry) -> Settled      captured steps or eager passes, and why
    resolve(config, hardware, geometry) -> ResolvedConfig   no `auto` left; nothing changes afterwards
    render(resolved) -> str                                 the resolved tree as YAML

Imports go one way: `tree` (imports nothing of ours) <- `hetero_runtime.plan` <- `resolution`. The face is
lazy, so that taking the tree does not also import pydantic, YAML and the planner.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hetero_runtime.config.load import load_config
    from hetero_runtime.config.locate import model_dir
    from hetero_runtime.config.mode import settle_mode
    from hetero_runtime.config.resolution import render, resolve
    from hetero_runtime.config.tree import Config, ResolvedConfig

__all__ = ["Config", "ResolvedConfig", "load_config", "model_dir", "render", "resolve", "settle_mode"]

_HOME = {
    "Config": "tree",
    "ResolvedConfig": "tree",
    "load_config": "load",
    "model_dir": "locate",
    "render": "resolution",
    "resolve": "resolution",
    "settle_mode": "mode",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
