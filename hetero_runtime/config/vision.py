"""Which keys of `vision` each method reads, and what goes together with fewer visual tokens."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING

from hetero_runtime.config.available import as_yaml
from hetero_runtime.config.forecasts import reads_whole_tokens
from hetero_runtime.config.tree import Config, ResolvedVision, VisionConfig
from hetero_runtime.errors import ConfigError

if TYPE_CHECKING:
    from hetero_runtime.plan.geometry import Geometry

READS: dict[str, tuple[str, ...]] = {
    "affinity": ("salient_ratio", "affinity"),
    "saliency": (),
    "random": ("seed",),
    "mix": ("salient_ratio", "seed"),
}
"""By vision.method."""
AUTO_RATIO = 0.5
"""What `auto` keeps where tokens can be dropped (VisMMOE §4.1.5)."""


def check_vision(config: Config, source: str) -> None:
    """Raise ConfigError, naming the keys, their values and the fix."""
    vision = config.vision
    ratio = AUTO_RATIO if vision.keep_ratio == "auto" else vision.keep_ratio
    _check_keys(vision, ratio, source)
    if ratio == 1:
        return
    if "salient_ratio" in READS[vision.method] and vision.salient_ratio > ratio:
        raise ConfigError(
            f"{source}: vision.salient_ratio: {vision.salient_ratio} is more than vision.keep_ratio: "
            f"{ratio}, of which it is a part; write {ratio / 2:g} or less"
        )
    if vision.keep_ratio == "auto":
        return
    named = f"vision.keep_ratio: {vision.keep_ratio}"
    if config.memory.pinned_prefix == 0:
        raise ConfigError(f"{source}: {_no_prefix(vision)}")
    for key, value, plain in (
        ("speculation.drafter", config.speculation.drafter, "none"),
        ("routing.policy", config.routing.policy, "exact"),
    ):
        if value != plain:
            raise ConfigError(
                f"{source}: {named} with {key}: {value} is not in this version; write {key}: {plain}, or "
                "vision.keep_ratio: 1"
            )


def resolve_vision(config: Config, geometry: Geometry, *, pinned_prefix: int) -> ResolvedVision:
    """`vision.keep_ratio: auto` decided; where it keeps all, the other keys say nothing. `pinned_prefix`: as
    decided. Raises ConfigError where tokens cannot be dropped as they are asked to be."""
    vision = config.vision
    if vision.keep_ratio == "auto":
        can_drop = (
            geometry.vision.float_elements > 0
            and 0 < pinned_prefix < geometry.num_moe_layers
            and config.speculation.drafter == "none"
            and config.routing.policy == "exact"
            and not reads_whole_tokens(config)
        )
        vision = replace(vision, keep_ratio=AUTO_RATIO) if can_drop else VisionConfig()
    resolved = ResolvedVision(**vars(vision))
    check_prefix(resolved, pinned_prefix, geometry)
    return resolved


def check_prefix(vision: ResolvedVision, pinned_prefix: int, geometry: Geometry) -> None:
    """Raise ConfigError unless tokens can be dropped between two MoE layers. `pinned_prefix`: as decided."""
    if vision.keep_ratio == 1:
        return
    if pinned_prefix == 0:
        raise ConfigError(_no_prefix(vision))
    if pinned_prefix == geometry.num_moe_layers:
        raise ConfigError(
            f"vision.keep_ratio: {vision.keep_ratio} acts behind the pinned prefix, and memory.pinned_prefix "
            f"pins all {pinned_prefix} MoE layers; write fewer, or vision.keep_ratio: 1"
        )


def _no_prefix(vision: VisionConfig | ResolvedVision) -> str:
    return (
        f"vision.keep_ratio: {vision.keep_ratio} acts behind the pinned prefix, whose routing says which "
        "tokens share experts, and memory.pinned_prefix is 0; write memory.pinned_prefix: 1 or more, or "
        "vision.keep_ratio: 1"
    )


def _check_keys(vision: VisionConfig, ratio: float, source: str) -> None:
    """No key is ignored; a default beside a method that does not read it says nothing."""
    read = READS[vision.method] if ratio < 1 else ()
    for field in fields(VisionConfig)[1:]:
        value = getattr(vision, field.name)
        if value == field.default or field.name in read or (field.name == "method" and ratio < 1):
            continue
        if ratio == 1:
            raise ConfigError(
                f"{source}: vision.{field.name}: {as_yaml(value)} says which visual tokens are kept, and "
                "vision.keep_ratio: 1 keeps all; write a vision.keep_ratio below 1, or leave it out"
            )
        readers = ", ".join(method for method, names in READS.items() if field.name in names)
        raise ConfigError(
            f"{source}: vision.{field.name}: {as_yaml(value)} is for vision.method: {readers}, and it is "
            f"{vision.method}; leave it out, or write such a method"
        )
