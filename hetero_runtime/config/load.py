"""From YAML and `--set` to a checked Config. This is the edge: pydantic lives here and nowhere inside.

defaults of the tree  <  preset  <  beneath  <  file or dict  <  overrides
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from hetero_runtime.config.available import as_yaml, check_available
from hetero_runtime.config.combinations import check_combinations
from hetero_runtime.config.presets import PRESETS
from hetero_runtime.config.schema import allowed, check_keys, fields, section_class, sections, takes_bytes
from hetero_runtime.config.sizes import parse_size
from hetero_runtime.config.text import NotYamlError, parse_yaml
from hetero_runtime.config.tree import Config
from hetero_runtime.errors import ConfigError

Tree = dict[str, Any]


def load_config(
    source: str | Path | Mapping[str, Any] | None = None,
    *,
    overrides: Iterable[str] = (),
    beneath: Mapping[str, Any] | None = None,
) -> Config:
    """Read a YAML file or a dict (None: defaults), apply overrides such as `memory.slabs=64`, check.

    `beneath`: fields that win over the preset's, and nothing else.

    Raises ConfigError, naming the source, the YAML path and the fix, for an unknown key, a wrong value, an
    impossible combination, or a value whose mechanism is not in this version.
    """
    name, tree = _read(source)
    check_keys(tree, name)
    for override in overrides:
        changes = parse_override(override)
        check_keys(changes, f"--set {override}")
        tree = _merge(tree, changes)
    config = _validate(tree, name)
    check_available(config, source=name)
    config = _validate(_merge(_merge(PRESETS[config.preset], beneath or {}), tree), name)
    check_combinations(config, name)
    return config


def parse_override(text: str) -> Tree:
    """`memory.slabs=64` -> `{"memory": {"slabs": 64}}`. The value is read as YAML."""
    path, equals, value = text.partition("=")
    if not equals or not path.strip():
        raise ConfigError(f"--set {text}: write it as section.key=value, such as memory.slabs=64")
    try:
        parsed = parse_yaml(value)
    except NotYamlError as error:
        raise ConfigError(f"--set {text}: the value is not YAML ({error})") from error
    for key in reversed(path.strip().split(".")):
        parsed = {key: parsed}
    assert isinstance(parsed, dict), "splitting a string yields at least one key"
    return parsed


def _read(source: str | Path | Mapping[str, Any] | None) -> tuple[str, Tree]:
    """The name of the source for messages, and its tree."""
    if source is None:
        return "configuration", {}
    if isinstance(source, Mapping):
        return "configuration", _without_empty_sections(source)
    path = Path(source)
    try:
        tree = parse_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read ({error.strerror}); name a YAML file such as configs/lru.yaml"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text; name a YAML file") from error
    except NotYamlError as error:
        raise ConfigError(f"{path}: is not YAML ({error})") from error
    if tree is None:
        return str(path), {}
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{path}: holds {type(tree).__name__}, not keys such as `preset: lru`")
    return str(path), _without_empty_sections(tree)


def _without_empty_sections(tree: Mapping[str, Any]) -> Tree:
    """A section whose keys are all commented out reads as null: the same as an absent one."""
    return {key: value for key, value in tree.items() if not (key in sections() and value is None)}


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> Tree:
    """`above` over `below`, section by section."""
    merged = dict(below)
    for key, value in above.items():
        if isinstance(value, Mapping) and isinstance(merged.get(key), Mapping):
            merged[key] = {**merged[key], **value}
        else:
            merged[key] = value
    return merged


@cache
def _adapter(path: str) -> TypeAdapter[Any]:
    return TypeAdapter(fields()[path])


def _validate(tree: Tree, source: str) -> Config:
    """The frozen tree of known keys `tree`; every value is checked against its field."""
    built: Tree = {}
    for key, value in tree.items():
        if key in sections():
            checked = {name: _value(f"{key}.{name}", inner, source) for name, inner in value.items()}
            built[key] = section_class(key)(**checked)
        else:
            built[key] = _value(key, value, source)
    return Config(**built)


def _value(path: str, value: Any, source: str) -> Any:
    """`value` as the field at `path` keeps it: sizes such as 8GiB become numbers, nothing else changes."""
    size = parse_size(value) if isinstance(value, str) and takes_bytes(path) else None
    try:
        return _adapter(path).validate_python(value if size is None else size, strict=True)
    except ValidationError:
        shown = repr(value) if isinstance(value, str) else as_yaml(value)
        raise ConfigError(f"{source}: {path}: {shown} is not allowed; allowed: {allowed(path)}") from None
