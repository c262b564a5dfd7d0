"""The tokenizer of a checkpoint and the tokens that end a text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from hetero_runtime.errors import CheckpointError


def load_tokenizer(path: Path) -> Any:
    """The checkpoint's own tokenizer, from local files alone. Raises CheckpointError when there is none."""
    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{path}: the tokenizer cannot be read ({error}). Copy tokenizer.json and tokenizer_config.json "
            "from where the model came from."
        ) from error


def eos_token_ids(path: Path, config: dict[str, Any], tokenizer: Any) -> frozenset[int]:
    """Tokens that end a text: generation_config.json's, else config.json's, else the tokenizer's."""
    generation = path / "generation_config.json"
    candidates = [json.loads(generation.read_text()).get("eos_token_id")] if generation.is_file() else []
    candidates += [config.get("eos_token_id"), getattr(tokenizer, "eos_token_id", None)]
    for ids in candidates:
        if ids is not None:
            return frozenset(ids if isinstance(ids, list) else [ids])
    return frozenset()
