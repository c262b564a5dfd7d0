"""Where a tensor belongs, told from its name: routed expert, shared expert, vision, backbone, or unused.

This counts bytes before anything is loaded; which tensor fills which field is decided later, by
transformers' own conversion tables. Hugging Face checkpoints keep experts in one of two forms:

    model.layers.3.mlp.experts.17.gate_proj.weight           one tensor an expert (w1, w2, w3 as well)
    model.layers.3.mlp.experts.gate_up_proj_blocks           one for all experts, first dimension E
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

Region = Literal["backbone", "shared", "vision", "mtp"]

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.(?:(\d+)\.)?(gate_up_proj|gate_proj|up_proj|down_proj|w[123])(\W.*|_.*|)$")
_SHARED = re.compile(r"\.shared_(?:experts?|mlp)(?:_gate)?\.")
_VISION = re.compile(r"(?:^|\.)(?:visual|vision\w*|image_\w+|(?:mm_)?projector|multi_modal_projector)\.")
_MTP = re.compile(r"(?:^|\.)mtp\.")
_PROJECTION = {
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
    "w1": "gate_up_proj",
    "w3": "gate_up_proj",
    "w2": "down_proj",
}


class ExpertTensor(NamedTuple):
    """A tensor of routed experts."""

    layer: int
    expert: int | None
    """None: all experts of the layer, along the first dimension."""
    field: str
    """Field of the record that it fills, such as `gate_up_proj.weight`."""


def parse_expert(name: str) -> ExpertTensor | None:
    """What a routed-expert tensor is for, None for any other tensor."""
    layer, expert = _LAYER.search(name), _EXPERT.search(name)
    if layer is None or expert is None or _VISION.search(name):
        return None
    index, projection, suffix = expert.groups()
    field = _PROJECTION.get(projection, projection) + suffix
    return ExpertTensor(int(layer[1]), None if index is None else int(index), field)


def region_of(name: str, num_layers: int) -> Region:
    """Where a tensor that is no routed expert belongs. `num_layers`: what config.json says.

    Layers beyond that number, and `mtp.*`, only predict further tokens: transformers does not load them.
    """
    layer = _LAYER.search(name)
    if _VISION.search(name):
        return "vision"
    if _MTP.search(name) or (layer is not None and int(layer[1]) >= num_layers):
        return "mtp"
    return "shared" if _SHARED.search(name) else "backbone"
