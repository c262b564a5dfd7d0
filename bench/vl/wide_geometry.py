"""How large the small vision-language model is made."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class WideGeometry:
    """Sizes; those of Qwen3-VL-30B-A3B but for the depth. Each is a multiple of the small model's, heads and
    inner widths at least as much."""

    layers: int = 10
    """The first ones of the small model's."""
    hidden: int = 2048
    heads: int = 32
    head_dim: int = 128
    experts: int = 128
    intermediate: int = 768
    vision_hidden: int = 1152
    vision_heads: int = 16
    vision_intermediate: int = 4304
    patch: int = 16
    max_length: int = 4096


def add_wide_geometry(parser: argparse.ArgumentParser) -> None:
    """An option for each size: `--layers`, `--hidden`, ..."""
    for name, default in asdict(WideGeometry()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default, metavar="N")


def wide_geometry_of(arguments: argparse.Namespace) -> WideGeometry:
    """The geometry that those options say."""
    return WideGeometry(**{name: getattr(arguments, name) for name in asdict(WideGeometry())})
