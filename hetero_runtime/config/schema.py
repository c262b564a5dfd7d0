"""The tree as a schema: which keys there are and which values each of them takes.

pydantic checks values; this module finds unknown keys (with the nearest known one) and says, for the
field that pydantic refused, what it would have taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from difflib import get_close_matches
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from hetero_runtime.config.tree import ByteSize, Config
from hetero_runtime.errors import ConfigError


@cache
def fields() -> dict[str, Any]:
    """Dotted path of every leaf of the tree -> its type hint, in the order of the tree."""
    return dict(_leaves(Config, ""))


@cache
def sections() -> frozenset[str]:
    """Names of the sections: the keys that hold a mapping."""
    return frozenset(path.partition(".")[0] for path in fields() if "." in path)


def section_class(section: str) -> type:
    """The dataclass of a section."""
    kind = get_type_hints(Config)[section]
    assert isinstance(kind, type), f"{section} is a section, so its type is a class"
    return kind


def takes_bytes(path: str) -> bool:
    """Whether the field at `path` takes sizes such as 8GiB."""
    return ByteSize in get_args(fields()[path])


def allowed(path: str) -> str:
    """What the field at `path` takes, for a message: `a whole number of 1 or more, auto`."""
    return ", ".join(_describe(fields()[path]))


def check_keys(tree: Mapping[Any, Any], source: str) -> None:
    """Raise ConfigError, naming the nearest key, where `tree` has a key that the schema has not."""
    for key, value in tree.items():
        if key in sections():
            if not isinstance(value, Mapping):
                raise ConfigError(f"{source}: {key}: {value!r} is not a mapping; it holds {_keys_of(key)}")
            for inner in value:
                if f"{key}.{inner}" not in fields():
                    raise _unknown(f"{key}.{inner}", source)
        elif key not in fields():
            raise _unknown(str(key), source)


def _unknown(path: str, source: str) -> ConfigError:
    nearest = _nearest(path)
    if nearest:
        return ConfigError(f"{source}: {path}: unknown key; did you mean {nearest}?")
    section = path.partition(".")[0]
    known = _keys_of(section) if section in sections() else ", ".join(_top_level())
    return ConfigError(f"{source}: {path}: unknown key; known here: {known}")


def _nearest(path: str) -> str | None:
    """The known key that `path` was most likely meant to be: near in spelling, or right but misplaced."""
    known = [*fields(), *sections()]
    section, _, name = path.rpartition(".")
    siblings = [other for other in known if other.rpartition(".")[0] == section]
    leaves = {other.rpartition(".")[2]: other for other in known}
    if name in leaves:
        return leaves[name]
    for candidates in (siblings, known):
        if match := get_close_matches(path, candidates, n=1, cutoff=0.6):
            return match[0]
    close = get_close_matches(name, leaves, n=1, cutoff=0.75)
    return leaves[close[0]] if close else None


def _top_level() -> list[str]:
    return list(dict.fromkeys(path.partition(".")[0] for path in fields()))


def _keys_of(section: str) -> str:
    return ", ".join(path.partition(".")[2] for path in fields() if path.startswith(f"{section}."))


def _leaves(node: type, prefix: str) -> Iterator[tuple[str, Any]]:
    for name, hint in get_type_hints(node, include_extras=True).items():
        if is_dataclass(hint) and isinstance(hint, type):
            yield from _leaves(hint, f"{prefix}{name}.")
        else:
            yield prefix + name, hint


def _describe(hint: Any) -> list[str]:
    origin = get_origin(hint)
    if origin is Annotated:
        return [note for note in get_args(hint) if isinstance(note, str)]
    if origin in (Union, UnionType):
        return [text for option in get_args(hint) for text in _describe(option)]
    if origin is Literal:
        return [str(choice) for choice in get_args(hint)]
    return [{bool: "true, false", str: "text", NoneType: "null"}[hint]]
