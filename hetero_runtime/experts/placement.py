"""Where the elements of a source tensor land, found by moving their numbers instead of their values.

transformers fuses, merges and transposes expert weights with operations of its own. Run once on element
numbers, they show the whole movement; if a source lands at fixed strides, its bytes can be read straight to
where they belong and the operations need not run again.

    gate  0 1 2       up  6 7 8       operations        gate: start 0, strides (3, 1)
          3 4 5           9 10 11     ──────────►       up:   start 6, strides (3, 1)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Placement:
    """Element (i, j, ...) of a source lands at `start + i * strides[0] + j * strides[1] + ...` of its field.

    All in elements. `shape` is the source's own.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int

    @property
    def is_contiguous(self) -> bool:
        """Whether the source lands in one run, in its own order."""
        return self.strides == contiguous_strides(self.shape)


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides, in elements."""
    return tuple(math.prod(shape[k + 1 :]) for k in range(len(shape)))


def find_placements(
    shapes: dict[str, tuple[int, ...]], move: Callable[[dict[str, torch.Tensor]], torch.Tensor]
) -> dict[str, Placement] | None:
    """Placements by source name, or None when `move` does more than permute at fixed strides.

    `move` takes tensors of `shapes` and returns one tensor; the numbers take four bytes an element.
    """
    total = sum(math.prod(shape) for shape in shapes.values())
    dtype = torch.int32 if total < 2**31 else torch.int64
    numbers: dict[str, torch.Tensor] = {}
    first: dict[str, int] = {}
    for name, shape in shapes.items():
        first[name] = sum(tensor.numel() for tensor in numbers.values())
        numbers[name] = torch.arange(first[name], first[name] + math.prod(shape), dtype=dtype).view(shape)
    moved = move(dict(numbers)).reshape(-1)
    if moved.numel() != total:
        return None
    placements = {}
    for name in shapes:
        placement = _fit(moved, numbers[name], first[name])
        if placement is None:
            return None
        placements[name] = placement
    return placements


def _fit(moved: torch.Tensor, numbers: torch.Tensor, first: int) -> Placement | None:
    """The strides at which `numbers` (from `first` on, row-major) lie in `moved`."""
    shape = tuple(numbers.shape)
    start = _position(moved, first)
    if start is None:
        return None
    strides = []
    for size, step in zip(shape, contiguous_strides(shape), strict=True):
        neighbour = _position(moved, first + step) if size > 1 else start + step
        if neighbour is None:
            return None
        strides.append(neighbour - start)
    last = start + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    if min((*strides, 0)) < 0 or last >= moved.numel():
        return None
    is_found = torch.equal(moved.as_strided(shape, strides, start), numbers)
    return Placement(shape, tuple(strides), start) if is_found else None


def _position(moved: torch.Tensor, number: int) -> int | None:
    positions = (moved == number).nonzero()
    return int(positions[0]) if len(positions) == 1 else None
