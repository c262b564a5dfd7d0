"""Which model's routers a file was made from: a predictor, a calibration."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hetero_runtime.errors import CheckpointError

if TYPE_CHECKING:
    from hetero_runtime.plan.geometry import Geometry
    from hetero_runtime.trace.file import TraceInfo
    from hetero_scheduler.trace import Trace


@dataclass(frozen=True)
class RouterFingerprint:
    """What must be alike for such a file to mean anything: the routers' sizes and the model's config.json."""

    num_layers: int
    num_experts: int
    top_k: int
    config_sha256: str
    """Of the bytes of config.json."""

    @classmethod
    def of_trace(cls, trace: Trace, info: TraceInfo) -> RouterFingerprint:
        """The model that a trace was recorded from."""
        return cls(trace.num_layers, trace.num_experts, trace.top_k, info.config_sha256)

    @classmethod
    def of_model(cls, geometry: Geometry) -> RouterFingerprint:
        """The model in a checkpoint folder."""
        return cls(
            geometry.num_moe_layers,
            geometry.num_experts,
            geometry.top_k,
            config_sha256(geometry.path),
        )

    def __str__(self) -> str:
        return (
            f"{self.num_layers} layers × {self.num_experts} experts, top-{self.top_k}, "
            f"config.json {self.config_sha256[:12]}"
        )

    def check(self, model: RouterFingerprint, name: str, *, remedy: str) -> None:
        """Raise CheckpointError, with the `remedy`, when `name`, a file of this model, shall serve another
        `model`."""
        if self != model:
            raise CheckpointError(
                f"{name}: was made for another model ({self}); this one has {model}. {remedy}"
            )


def config_sha256(folder: Path) -> str:
    """Of the bytes of the config.json in `folder`."""
    return hashlib.sha256((folder / "config.json").read_bytes()).hexdigest()
