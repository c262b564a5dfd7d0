"""What the decoder starts from where a prompt has images: embeddings of its tokens, the images' in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

HearEmbeddings = Callable[[torch.Tensor], None]
"""Told what the decoder starts from, `[tokens, hidden_size]`, image embeddings in their places."""


def listen_to_embeddings(model: Any, hear: HearEmbeddings) -> RemovableHandle:
    """From now on `hear` is told of every pass that begins with embeddings, as passes with images do."""

    def tell(_module: torch.nn.Module, _arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        embeddings = named.get("inputs_embeds")
        if embeddings is not None:
            hear(embeddings.reshape(-1, embeddings.shape[-1]))

    handle: RemovableHandle = model.get_decoder().register_forward_pre_hook(tell, with_kwargs=True)
    return handle
