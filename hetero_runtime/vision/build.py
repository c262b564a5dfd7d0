"""A compressor, from a resolved configuration."""

from __future__ import annotations

from typing import Any

from hetero_runtime.config import ResolvedConfig
from hetero_runtime.errors import ConfigError
from hetero_runtime.hf.visual import visual_part
from hetero_runtime.vision.compressor import Compressor
from hetero_scheduler.compression import make_selector


def make_compressor(config: ResolvedConfig, model: Any) -> Compressor | None:
    """The compressor of `config`; None where all visual tokens are kept, which then is plain computation.

    `model`: it may still be without weights. Raises ConfigError for a model that sees nothing.
    """
    vision = config.vision
    if vision.keep_ratio == 1:
        return None
    part = visual_part(model)
    if part is None:
        raise ConfigError(
            f"vision.keep_ratio: {vision.keep_ratio} is for images, and {type(model).__name__} reads text "
            "alone; leave it out, or load a vision-language model"
        )
    selector = make_selector(
        vision.method,
        keep_ratio=vision.keep_ratio,
        salient_ratio=vision.salient_ratio,
        affinity=vision.affinity,
        seed=vision.seed,
    )
    return Compressor(model, part, selector, prefix=config.memory.pinned_prefix)
