"""The tokenizer of a checkpoint and the tokens that end a text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from hetero_runtime.checkpoint.tokenizer_files import COPY, check_tokenizer_files
from hetero_runtime.errors import CheckpointError
from hetero_runtime.hf import deepseek_vl2
from hetero_runtime.hf.deepseek_vl2.chat import prepare_tokenizer

_PROBE = "a"


def load_tokenizer(path: Path) -> Any:
    """The checkpoint's own tokenizer, from local files alone. Raises CheckpointError when there is none."""
    check_tokenizer_files(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{path}: the tokenizer cannot be read ({reason}). {COPY}") from error
    if _model_type(path) == deepseek_vl2.MODEL_TYPE:
        prepare_tokenizer(tokenizer)
    # without its files, transformers makes some models a tokenizer of no words
    if set(tokenizer(_PROBE, add_special_tokens=False)["input_ids"]) <= {tokenizer.unk_token_id}:
        raise CheckpointError(f"{path}: holds no tokenizer: it has no token for {_PROBE!r}. {COPY}")
    return tokenizer


def eos_token_ids(path: Path, config: dict[str, Any], tokenizer: Any) -> frozenset[int]:
    """Tokens that end a text: generation_config.json's, else config.json's, else the tokenizer's."""
    generation = _json_object(path / "generation_config.json")
    candidates = [generation.get("eos_token_id"), config.get("eos_token_id"), tokenizer.eos_token_id]
    for ids in candidates:
        if ids is not None:
            return frozenset(ids if isinstance(ids, list) else [ids])
    return frozenset()


def _model_type(path: Path) -> Any:
    return _json_object(path / "config.json").get("model_type")


def _json_object(file: Path) -> dict[str, Any]:
    """Empty when there is no such file: a checkpoint may do without."""
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: cannot be read ({error}); download it again, or remove it") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: is not a JSON object; download it again, or remove it")
    return value
