"""The shape of a model that drafts, from its config.json and safetensors headers alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hetero_runtime.beside_model import beside
from hetero_runtime.checkpoint import Checkpoint
from hetero_runtime.checkpoint.checkpoint import CONFIG_NAME
from hetero_runtime.config.tree import SpeculationConfig
from hetero_runtime.errors import ConfigError
from hetero_runtime.plan.geometry import Geometry, TensorGroup, tensor_group
from hetero_runtime.plan.kv import KvGeometry, read_kv
from hetero_runtime.plan.model_config import TextConfig

_SUFFIX = ".drafter"


@dataclass(frozen=True)
class DrafterGeometry:
    """What a drafter takes on the device: all of its weights, and a cache a row."""

    weights: TensorGroup
    kv: KvGeometry
    feature_elements: int = 0
    """What it hears of a token of the prompt, until it drafts."""

    def num_bytes(self, itemsize: int, *, rows: int, length: int) -> int:
        """Bytes at `itemsize` bytes an element, for `rows` texts of `length` tokens."""
        heard = length * self.feature_elements * itemsize
        return self.weights.num_bytes(itemsize) + rows * (self.kv.row_bytes(length, itemsize) + heard)


def read_drafter(config: SpeculationConfig, target: Geometry) -> DrafterGeometry | None:
    """The model that drafts for `target`; None where `config` names none.

    Raises ConfigError for a `target` that cannot check drafts and for a folder that is not there,
    CheckpointError for one that holds no model.
    """
    if config.drafter != "none":
        _check_target(config, target)
    folder = drafter_folder(config, target.path)
    if folder is None:
        return None
    if not folder.is_dir():
        raise ConfigError(_not_there(config, folder))
    checkpoint = Checkpoint.open(folder)
    shape = TextConfig.of(folder / CONFIG_NAME, checkpoint.config)
    heard = checkpoint.entries.get("fc.weight") if config.drafter == "block" else None
    return DrafterGeometry(
        tensor_group(checkpoint.entries.values()),
        read_kv(shape, shape.integer("num_hidden_layers")),
        feature_elements=heard.shape[-1] if heard else 0,
    )


def drafter_folder(config: SpeculationConfig, target: Path) -> Path | None:
    """The folder of what drafts for the model in `target`; None where that is no model.

    A block drafter without a name lies beside its target, named like it: `model.drafter/` is of `model/`.
    """
    if config.model is not None:
        return Path(config.model).expanduser()
    return beside(target, _SUFFIX) if config.drafter == "block" else None


def _not_there(config: SpeculationConfig, folder: Path) -> str:
    if config.model is not None:
        return f"speculation.model: {folder} is no folder; name that of a Hugging Face model"
    return (
        f"speculation.drafter: block needs a drafter trained for this model, and {folder} does not exist; "
        "name the folder of a DFlash checkpoint in speculation.model, or write speculation.drafter: "
        "prompt_lookup"
    )


def _check_target(config: SpeculationConfig, target: Geometry) -> None:
    if any(layer.compressed_elements for layer in target.kv.layers):
        raise ConfigError(
            f"speculation.drafter: {config.drafter} cannot serve {target.model_type}: its attention "
            "compresses tokens as they come, so several at once are read otherwise than one by one, and none "
            "can be taken back; write speculation.drafter: none"
        )
