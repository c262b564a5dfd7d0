"""Where elements land: every movement at fixed strides is found, and nothing else is claimed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from hetero_runtime.experts.placement import Placement, find_placements

Tensors = dict[str, torch.Tensor]


@pytest.mark.parametrize("names", [["gate", "up"], ["up", "gate"]])
def test_concatenated_parts_are_contiguous(names: list[str]) -> None:
    placements = find_placements(
        dict.fromkeys(names, (3, 5)), lambda t: torch.cat([t["gate"], t["up"]], dim=0)
    )
    assert placements == {"gate": Placement((3, 5), (5, 1), 0), "up": Placement((3, 5), (5, 1), 15)}
    assert all(placement.is_contiguous for placement in placements.values())


@pytest.mark.parametrize(
    ("move", "strides"),
    [
        (lambda t: t["w"].T.contiguous(), (1, 4)),
        (lambda t: torch.cat([t["w"].T], dim=1), (1, 4)),
        (lambda t: t["w"], (3, 1)),
    ],
)
def test_transposition_is_a_stride(move: Callable[[Tensors], torch.Tensor], strides: tuple[int, int]) -> None:
    assert find_placements({"w": (4, 3)}, move) == {"w": Placement((4, 3), strides, 0)}


def test_interleaved_columns_are_strides() -> None:
    placements = find_placements(
        {"gate": (4, 3), "up": (4, 3)}, lambda t: torch.stack([t["gate"], t["up"]], dim=-1).flatten(1)
    )
    assert placements == {"gate": Placement((4, 3), (6, 2), 0), "up": Placement((4, 3), (6, 2), 1)}


@pytest.mark.parametrize("shape", [(1,), (1, 1), (1, 7), (7, 1), ()])
def test_axes_of_length_one(shape: tuple[int, ...]) -> None:
    placements = find_placements({"w": shape}, lambda t: t["w"])
    assert placements is not None
    assert placements["w"].is_contiguous


@pytest.mark.parametrize(
    "move",
    [
        lambda t: (
            t["w"].view(2, 2, 3).transpose(0, 1).reshape(4, 3)
        ),  # rows interleaved: two strides in one axis
        lambda t: t["w"].flip(0),
        lambda t: t["w"][:3],
        lambda t: torch.cat([t["w"], t["w"]]),
        lambda t: torch.zeros_like(t["w"]),
    ],
    ids=["interleaved", "flipped", "cut", "repeated", "constant"],
)
def test_anything_else_is_none(move: Callable[[Tensors], torch.Tensor]) -> None:
    assert find_placements({"w": (4, 3)}, move) is None
