"""Qwen3-VL by plain transformers, its visual tokens dropped by hand behind some layer.

Every module is called one by one, with nothing of the engine: embeddings, features of the encoder, decoder
layers over transformers' own cache, greedy tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import DynamicCache
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import apply_rotary_pos_emb_vision

from hetero_runtime.hf.forward import ForwardArguments
from hetero_scheduler.compression import ImageTokens
from tests.runtime.engine.answers import Answer

Choose = Callable[[list[ImageTokens]], list[list[int]]]
"""Tokens to keep, of each image."""


class Dropped(NamedTuple):
    """`experts_before`, `experts_after`: experts a layer, by the whole prompt (layers before the cut) and by
    what went on (all layers)."""

    answer: Answer
    num_visual: int
    num_kept: int
    experts_before: tuple[int, ...]
    experts_after: tuple[int, ...]


class _Spy:
    """What routers chose, layer by layer, and what the encoder's last attention was given."""

    def __init__(self, model: Any) -> None:
        self.chosen: list[torch.Tensor] = []
        self.attended: dict[str, Any] = {}
        for layer in model.model.language_model.layers:
            layer.mlp.gate.register_forward_hook(lambda _m, _a, output: self.chosen.append(output[2]))
        last = model.model.visual.blocks[-1].attn
        last.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, _module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.attended = {"hidden": args[0], **kwargs}


@torch.inference_mode()
def answer_dropping(
    model: Any, inputs: dict[str, torch.Tensor], *, prefix: int, choose: Choose, num_tokens: int
) -> Dropped:
    """`num_tokens` greedy tokens, visual tokens dropped in front of decoder layer `prefix`."""
    inputs = {name: tensor.to(model.device) for name, tensor in inputs.items()}
    inner, text, spy = model.model, model.model.language_model, _Spy(model)
    ids, grids = inputs["input_ids"], inputs["image_grid_thw"]
    features = inner.visual(inputs["pixel_values"].to(inner.visual.dtype), grid_thw=grids)
    is_visual = ids[0] == model.config.image_token_id
    hidden = text.embed_tokens(ids)
    hidden[0, is_visual] = features.pooler_output
    positions, offset = inner.get_rope_index(
        ids, image_grid_thw=grids, mm_token_type_ids=inputs["mm_token_type_ids"]
    )
    deepstack = features.deepstack_features
    kept = torch.arange(ids.shape[1])
    cache = DynamicCache(config=text.config)
    for number, layer in enumerate(text.layers):
        if number == prefix:
            images = _image_tokens(inner.visual, grids, is_visual, spy)
            kept = _kept(is_visual, choose([tokens for tokens, _ in images]), [at for _, at in images])
            hidden, positions = hidden[:, kept], positions[..., kept]
        hidden = _run(text, layer, hidden, positions, cache)
        if number < len(deepstack):
            visual_kept = torch.isin(is_visual.nonzero()[:, 0].cpu(), kept)
            hidden[0, is_visual[kept]] += deepstack[number][visual_kept]
    chosen = list(spy.chosen)
    return Dropped(
        _go_on(model, hidden, cache, first_position=ids.shape[1] + offset, num_tokens=num_tokens),
        num_visual=int(is_visual.sum()),
        num_kept=int(is_visual[kept].sum()),
        experts_before=tuple(len(each.unique()) for each in chosen[:prefix]),
        experts_after=tuple(
            len((each[kept] if number < prefix else each).unique()) for number, each in enumerate(chosen)
        ),
    )


def _go_on(
    model: Any, hidden: torch.Tensor, cache: Any, *, first_position: torch.Tensor, num_tokens: int
) -> Answer:
    """Greedy tokens from what the last layer says of the prompt, `[1, n, hidden_size]`."""
    text = model.model.language_model
    logits = [model.lm_head(text.norm(hidden)[:, -1])]
    for step in range(num_tokens - 1):
        hidden = text.embed_tokens(logits[-1].argmax(-1, keepdim=True))
        for layer in text.layers:
            hidden = _run(text, layer, hidden, (first_position + step).expand(3, 1, 1), cache)
        logits.append(model.lm_head(text.norm(hidden)[:, -1]))
    all_logits = torch.cat(logits).float().cpu()
    return Answer(all_logits.argmax(-1).tolist(), all_logits)


def _run(text: Any, layer: Any, hidden: torch.Tensor, positions: torch.Tensor, cache: Any) -> torch.Tensor:
    output: torch.Tensor = layer(
        hidden,
        attention_mask=None,
        position_embeddings=text.rotary_emb(hidden, positions),
        **{ForwardArguments.of(text).cache_name: cache},
    )
    return output


def _image_tokens(
    visual: Any, grids: torch.Tensor, is_visual: torch.Tensor, spy: _Spy
) -> list[tuple[ImageTokens, np.ndarray]]:
    """Of each image its tokens, and where they stand in the prompt."""
    module, given = visual.blocks[-1].attn, spy.attended
    qkv = module.qkv(given["hidden"]).reshape(len(given["hidden"]), 3, module.num_heads, -1)
    query, key = apply_rotary_pos_emb_vision(qkv[:, 0], qkv[:, 1], *given["position_embeddings"])
    experts = torch.stack(spy.chosen).cpu().numpy()
    places = is_visual.nonzero()[:, 0].cpu().numpy()
    images, first_patch, first = [], 0, 0
    for num_patches in grids.prod(-1).tolist():
        patches = slice(first_patch, first_patch + num_patches)
        scores = torch.einsum("qhd,khd->hqk", query[patches], key[patches]) * module.scaling
        received = scores.softmax(-1, dtype=torch.float32).mean(dim=(0, 1))
        saliency = received.view(-1, 4).mean(1).double().cpu().numpy()
        at = places[first : first + len(saliency)]
        images.append((ImageTokens(saliency, experts[:, at]), at))
        first_patch, first = first_patch + num_patches, first + len(saliency)
    return images


def _kept(is_visual: torch.Tensor, chosen: list[list[int]], places: list[np.ndarray]) -> torch.Tensor:
    kept = ~is_visual.cpu()
    for tokens, at in zip(chosen, places, strict=True):
        kept[torch.from_numpy(at[tokens])] = True
    kept[-1] = True  # its logits are the answer
    return kept.nonzero()[:, 0]
