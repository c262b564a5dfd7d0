"""Numbers that add up, field by field."""

from __future__ import annotations

from operator import add, sub
from typing import Self


class Counters:
    """Sum and difference for dataclasses whose fields are all numbers."""

    def __add__(self, other: Self) -> Self:
        return type(self)(*map(add, vars(self).values(), vars(other).values()))

    def __sub__(self, other: Self) -> Self:
        return type(self)(*map(sub, vars(self).values(), vars(other).values()))
