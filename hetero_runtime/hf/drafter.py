"""A small model that drafts, as transformers loads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from hetero_runtime.errors import CheckpointError
from hetero_runtime.hf.loading import DTYPES
from hetero_runtime.hf.rewind import RewindableState, check_rewindable
from hetero_runtime.hf.tokens import load_tokenizer
from hetero_runtime.no_room import no_room_for


def load_drafter(path: str, tokenizer: Any, *, dtype: str, device: torch.device) -> Any:
    """The causal model in the folder `path`, whole on `device`, in `dtype`.

    Raises CheckpointError before a weight is read where its tokenizer has other words than `tokenizer`, and
    for a model that transformers cannot load or whose texts cannot go back.
    """
    folder = Path(path).expanduser()
    _check_same_words(folder, tokenizer)
    try:
        with no_room_for(
            "the drafter", device, fix="take a smaller one, or speculation.drafter: prompt_lookup"
        ):
            model = transformers.AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=DTYPES[dtype],
                device_map={"": device},
                local_files_only=True,
                use_safetensors=True,
            ).eval()
    except (OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{folder}: transformers cannot load the drafter ({reason})") from error
    probe = RewindableState(model)
    probe.extend(torch.zeros(1, dtype=torch.long, device=device))
    check_rewindable(probe.cache, str(folder))
    return model


def _check_same_words(folder: Path, tokenizer: Any) -> None:
    """Raise CheckpointError unless every id means the same to both."""
    ours, theirs = tokenizer.get_vocab(), load_tokenizer(folder).get_vocab()
    if ours == theirs:
        return
    differing = sorted(word for word in ours.keys() | theirs.keys() if ours.get(word) != theirs.get(word))
    raise CheckpointError(
        f"speculation.model: {folder} has another vocabulary than the model: {len(differing)} words differ, "
        f"such as {differing[0]!r}; take a drafter with the model's own tokenizer, or write "
        "speculation.drafter: prompt_lookup"
    )
