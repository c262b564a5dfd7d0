"""Reading config.json: one name for what model families call by different names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetero_runtime.errors import CheckpointError

NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k")
_TEXT_CONFIGS = ("text_config", "language_config", "llm_config")


@dataclass(frozen=True)
class TextConfig:
    """The language model's part of a config.json."""

    file: Path
    """Named in messages."""
    values: Mapping[str, Any]

    @classmethod
    def of(cls, file: Path, config: Mapping[str, Any]) -> TextConfig:
        """`config` itself, or its nested text config (vision-language models) over what is outside."""
        for key in _TEXT_CONFIGS:
            if isinstance(config.get(key), Mapping):
                return cls(file, {**config, **config[key]})
        return cls(file, config)

    def integer(self, *names: str) -> int:
        """The first of `names` that is there. CheckpointError when none is, or when it is no number."""
        value = self.optional(*names)
        if value is None:
            raise CheckpointError(
                f"{self.file}: has none of {', '.join(names)}; the memory plan needs one of them"
            )
        return value

    def optional(self, *names: str) -> int | None:
        """The first of `names` that is there and not null. CheckpointError when it is not 0 or more."""
        for name in names:
            value = self.values.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise CheckpointError(
                    f"{self.file}: {name} is {value!r}; it must be a whole number of 0 or more"
                )
            return value
        return None

    def strings(self, name: str, length: int) -> list[str] | None:
        """A list of `length` strings, one a layer; None when absent or of another form."""
        value = self.values.get(name)
        if not isinstance(value, list) or len(value) < length:
            return None
        return [str(item) for item in value[:length]]


def rope_types(parameters: Any) -> frozenset[str]:
    """Of rotary embeddings: `parameters` are one set, one for each kind of layer, or none."""
    sets = parameters if isinstance(parameters, Mapping) else {}
    nested = [value for value in sets.values() if isinstance(value, Mapping)]
    return frozenset(str(part.get("rope_type", part.get("type"))) for part in (nested or [sets]))
