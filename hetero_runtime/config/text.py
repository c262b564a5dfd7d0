"""YAML to plain values. A key that stands twice in one place is an error: which of both was meant?"""

from __future__ import annotations

from typing import Any

import yaml


class NotYamlError(ValueError):
    """Says what is wrong and where, on one line."""


def parse_yaml(text: str) -> Any:
    """What `text` says. Raises NotYamlError."""
    try:
        return yaml.load(text, _EachKeyOnce)
    except yaml.YAMLError as error:
        raise NotYamlError(_where(error)) from error


class _EachKeyOnce(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"{key.value} is given twice", problem_mark=key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _where(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or "cannot be parsed"
    return f"{problem}, line {mark.line + 1}, column {mark.column + 1}" if mark else str(problem)
