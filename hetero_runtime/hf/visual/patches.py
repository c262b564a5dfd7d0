"""An encoder that gets its image cut into patches embeds each by one product.

transformers' module says it as a convolution of every patch by itself, with a kernel as large as the patch,
which convolution libraries do slowly, some versions by orders of magnitude (transformers issue 45750). As a
product of matrices it is the same sum. In float32 it is left alone: there a GPU's convolutions have digits
of their own, and which tokens of an image are kept may hang on them.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from hetero_runtime.hf.visual.base import is_qwen3_vl


def embed_by_product(model: Any) -> None:
    """From now on Qwen3-VL's encoder does, in half precision; another model is left alone."""
    if not is_qwen3_vl(model):
        return
    convolution: Any = model.model.visual.patch_embed.proj
    if convolution.weight.dtype != torch.float32:
        convolution.forward = partial(_product, convolution)


def _product(convolution: nn.Conv3d, patches: torch.Tensor) -> torch.Tensor:
    """`patches` `[n, channels, frames, height, width]`, as the kernel, to `[n, outputs, 1, 1, 1]`."""
    weight = convolution.weight
    assert patches.shape[1:] == weight.shape[1:], f"patches {list(patches.shape)} for {list(weight.shape)}"
    embedded = functional.linear(patches.flatten(1), weight.flatten(1), convolution.bias)
    return embedded[..., None, None, None]
