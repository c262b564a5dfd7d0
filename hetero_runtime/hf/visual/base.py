"""The contract of a model's visual part, as far as dropping some of its tokens goes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hetero_runtime.hf.token_cut import TokenCut

Images = Mapping[str, torch.Tensor]
"""The model's own image inputs for one prompt."""


def is_qwen3_vl(model: Any) -> bool:
    """Whether `model` is transformers' Qwen3-VL with routed experts."""
    return type(model).__name__ == "Qwen3VLMoeForConditionalGeneration"


class VisualPart(ABC):
    """One model's."""

    @property
    @abstractmethod
    def attention(self) -> nn.Module:
        """The encoder's attention module whose attention says what is salient: its last."""

    @abstractmethod
    def positions(self, ids: torch.Tensor, images: Images) -> list[torch.Tensor]:
        """For each image of the prompt `ids` `[T]` where its tokens stand, int64 `[N]`, ascending.

        Only tokens that can be spared: separators and line ends that a model needs belong to none.
        """

    @abstractmethod
    def saliency(self, received: Sequence[torch.Tensor], images: Images) -> list[torch.Tensor]:
        """For each image how salient its tokens are, `[N]`, in the order of `positions`.

        `received`: `received_attention` of each call of `attention` while the encoder ran over `images`,
        `[batch, patches]`.
        """

    def follow(self, cut: TokenCut) -> None:  # noqa: B027 - most models show images once, to the first layer
        """Be cut as prompts are, where the model hands visual features to decoder layers itself."""
