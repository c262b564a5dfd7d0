"""What works in this version. The tree names more than that: it is the shape of the finished product."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from hetero_runtime.config.tree import Config
from hetero_runtime.errors import ConfigError

AVAILABLE: Mapping[str, tuple[Any, ...]] = {
    "execution.mode": ("auto", "eager", "graph"),
    "execution.compile": (False,),
}
"""Fields whose values do not all work yet, with those that do. Other fields work as documented."""


def check_available(config: Config, *, source: str = "configuration") -> None:
    """Raise ConfigError for the first field whose mechanism is not in this version."""
    tree = asdict(config)
    for path, works in AVAILABLE.items():
        section, _, key = path.rpartition(".")
        value = tree[section][key] if section else tree[key]
        if value not in works:
            raise ConfigError(
                f"{source}: {path}: {as_yaml(value)} is not in this version; "
                f"what works now: {', '.join(as_yaml(choice) for choice in works)}"
            )


def as_yaml(value: object) -> str:
    """A scalar as one writes it in YAML: true, null, 4, name."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return "null" if value is None else str(value)
