"""The model that ships with the package, so that the first run needs no download.

`model/MODEL_CARD.md` says what it is, what it was trained on and how well it does.
"""

from __future__ import annotations

from pathlib import Path


def model_path() -> Path:
    """The folder of the bundled model: a Hugging Face checkpoint with tokenizer and chat template."""
    return Path(__file__).resolve().parent / "model"
