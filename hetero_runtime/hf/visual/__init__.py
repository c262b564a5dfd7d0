"""Images inside a vision-language model: which prompt tokens they are, and what an encoder attends to.

base             the contract, for one kind of model each
qwen3_vl_moe     Qwen3-VL, whose encoder also adds features between decoder layers
deepseek_vl2     tiles in a layout with marks, which stay
sizes            read by the host, so that a device is asked for nothing
patches          embedded by a product
attention        what the tokens of an encoder receive from its last attention

Another model plugs in with a module here and its line in `visual_part`.
"""

from __future__ import annotations

from typing import Any

from hetero_runtime.hf.visual.attention import listen_to_attention, received_attention
from hetero_runtime.hf.visual.base import Images, VisualPart, is_qwen3_vl
from hetero_runtime.hf.visual.patches import embed_by_product
from hetero_runtime.hf.visual.sizes import image_positions, images_on, read_sizes_on_host

__all__ = [
    "Images",
    "VisualPart",
    "embed_by_product",
    "image_positions",
    "images_on",
    "listen_to_attention",
    "read_sizes_on_host",
    "received_attention",
    "visual_part",
]


def visual_part(model: Any) -> VisualPart | None:
    """How `model` sees; None for a model that reads text alone. It may still be without weights."""
    if is_qwen3_vl(model):
        from hetero_runtime.hf.visual.qwen3_vl_moe import Qwen3VLMoePart

        return Qwen3VLMoePart(model)
    if type(model).__name__ == "DeepseekVL2ForConditionalGeneration":
        from hetero_runtime.hf.visual.deepseek_vl2 import DeepseekVL2Part

        return DeepseekVL2Part(model)
    return None
