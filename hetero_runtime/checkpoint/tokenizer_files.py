"""Whether a model folder holds a tokenizer, as far as its files tell: long before transformers reads them."""

from __future__ import annotations

import json
from pathlib import Path

from hetero_runtime.errors import CheckpointError

COPY = "Copy tokenizer.json and tokenizer_config.json from where the model came from."
_ANY = ("tokenizer*", "vocab*", "tekken.json", "*.model", "*.spm", "*.tiktoken")
"""Names of what can be one, in any of the forms that transformers reads."""
_JSON = ("tokenizer.json", "tokenizer_config.json")


def check_tokenizer_files(path: Path) -> None:
    """Raise CheckpointError where no file of the folder `path` can be a tokenizer, or one is damaged."""
    if not any(found for pattern in _ANY for found in path.glob(pattern)):
        raise CheckpointError(f"{path}: holds no tokenizer: no file is named as one. {COPY}")
    for name in _JSON:
        file = path / name
        if not file.is_file():
            continue
        try:
            json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{path}: the tokenizer cannot be read ({name}: {error}). {COPY}"
            ) from error
