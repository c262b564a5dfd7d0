"""DeepSeek-VL2 (arXiv 2412.10302) from parts that transformers has, read without remote code.

config      config.json as published, split into transformers' own configurations
language    which of transformers' DeepSeek models the language part is
model       tiles to image tokens, image tokens among text, all to the language part
projector   patches of a tile to tokens; tokens of tiles to the tokens of an image
names       published tensor names to transformers'
tiles       how an image is cut, from its size alone
processor   an image to tiles
chat        special tokens and the form of a conversation

Importing this face makes transformers know the configuration; torch models come with `model`.
"""

from __future__ import annotations

from transformers import AutoConfig

from hetero_runtime.hf.deepseek_vl2.config import MODEL_TYPE, DeepseekVL2Config

AutoConfig.register(MODEL_TYPE, DeepseekVL2Config, exist_ok=True)

__all__ = ["MODEL_TYPE", "DeepseekVL2Config"]
