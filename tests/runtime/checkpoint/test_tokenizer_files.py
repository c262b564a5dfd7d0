"""A tokenizer in any form is let through; none, or a damaged one, is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetero_runtime.checkpoint.tokenizer_files import check_tokenizer_files
from hetero_runtime.errors import CheckpointError


@pytest.mark.parametrize(
    "name",
    ["tokenizer.json", "tokenizer.model", "vocab.json", "qwen.tiktoken", "tekken.json", "spiece.model"],
)
def test_whatever_can_be_one_is_left_to_transformers(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("{}")
    check_tokenizer_files(tmp_path)


def test_a_folder_of_weights_has_none(tmp_path: Path) -> None:
    for name in ("config.json", "generation_config.json", "model.safetensors.index.json", "README.md"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(
        CheckpointError, match=r"holds no tokenizer: .* Copy tokenizer.json and tokenizer_config"
    ):
        check_tokenizer_files(tmp_path)


@pytest.mark.parametrize("content", [b"{", b"", b"\xff"], ids=["half", "empty", "no text"])
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_damaged_one_is_named(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"the tokenizer cannot be read \({name}: "):
        check_tokenizer_files(tmp_path)
