"""Text that the exact model writes of itself, at temperature 1 (PSR §6.1, *selfgen*).

Such tokens come from the model's own distribution, so what another configuration is more surprised by them
estimates the divergence between the two, whatever the text is about.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self

from hetero_runtime.errors import RequestError
from hetero_runtime.evaluation.base import TokenIds, TokensSeen
from hetero_runtime.whole_file import write_whole

if TYPE_CHECKING:
    from hetero_runtime.engine import Engine

FORMAT = "hetero-runtime samples of a model, 1"


class Sample(NamedTuple):
    """One window."""

    ids: TokenIds
    num_given: int
    """First tokens, 1 or more, that the model was given; it wrote the others."""


@dataclass(frozen=True)
class Samples:
    """Windows of one model."""

    windows: tuple[Sample, ...]
    config_sha256: str
    """Of the model's config.json: samples of another model estimate nothing."""
    dtype: str

    def write(self, path: Path) -> None:
        """All of it or nothing. Raises DeviceError where `path` cannot be written."""
        content = {"format": FORMAT, "config_sha256": self.config_sha256, "dtype": self.dtype}
        text = json.dumps({**content, "windows": [[each.num_given, each.ids] for each in self.windows]})
        write_whole(path, lambda file: file.write_text(text + "\n", encoding="utf-8"))

    @classmethod
    def read(cls, path: Path) -> Self:
        """Raises RequestError where `path` is not as `write` leaves it."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content["format"] != FORMAT:
                raise ValueError(f"its format is {content['format']!r}")
            windows = tuple(Sample(tuple(ids), int(given)) for given, ids in content["windows"])
            if not windows or not all(0 < each.num_given < len(each.ids) for each in windows):
                raise ValueError("a window has nothing that the model wrote")
            return cls(windows, str(content["config_sha256"]), str(content["dtype"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = "it is no text" if isinstance(error, UnicodeDecodeError) else repr(error)
            raise RequestError(
                f"{path}: holds no samples ({reason}); name a new file, and they are drawn into it"
            ) from error

    def check_model(self, config_sha256: str, dtype: str, path: Path) -> None:
        """Raises RequestError where they are of another model than the one described."""
        if (self.config_sha256, self.dtype) != (config_sha256, dtype):
            raise RequestError(
                f"{path}: its samples were drawn from another model or dtype; name another file for this one"
            )


def draw(
    engine: Engine,
    starts: Sequence[TokenIds],
    *,
    num_tokens: int,
    seed: int = 0,
    seen: TokensSeen | None = None,
) -> tuple[Sample, ...]:
    """`num_tokens` after each of `starts`, window i seeded with `seed + i`; past the end of a text as well.

    Raises RequestError for what the engine cannot serve.
    """
    windows = []
    for i, start in enumerate(starts):
        completion = engine.generate(
            list(start), max_tokens=num_tokens, temperature=1.0, seed=seed + i, ignore_eos=True
        )
        windows.append(Sample((*start, *completion.token_ids), len(start)))
        if seen is not None:
            seen((i + 1) * num_tokens, len(starts) * num_tokens)
    return tuple(windows)
