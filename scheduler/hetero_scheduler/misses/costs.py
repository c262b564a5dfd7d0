"""What experts cost: measured once by the number of tokens, then corrected while running."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from hetero_scheduler.misses.base import Floats, Integers

SMOOTHING = 0.05
"""Weight of the newest layer in the moving averages: some twenty layers, about one token."""
_MOST_CORRECTION = 4.0
"""One layer that the machine was busy with something else must not turn the averages over."""


class CostCurve:
    """Seconds of one expert by its number of tokens: straight lines between what was measured."""

    def __init__(self, measured: Mapping[int, float]) -> None:
        """`measured`: seconds by tokens. The last line goes on behind the last point, the first value before
        the first. More tokens never take less, so what is above a later value was disturbed.

        Raises ValueError for none, or for one that is not above zero.
        """
        if not measured or min(measured.values()) <= 0 or min(measured) < 1:
            raise ValueError(f"seconds by tokens {dict(measured)}: some above zero are needed")
        self._tokens = np.array(sorted(measured), dtype=np.float64)
        seconds = np.array([measured[int(tokens)] for tokens in self._tokens])
        self._seconds = np.minimum.accumulate(seconds[::-1])[::-1]

    def seconds(self, tokens: Integers) -> Floats:
        """Of one expert with so many tokens, for each of `tokens` `[n]`."""
        inside: Floats = np.interp(tokens, self._tokens, self._seconds)
        if len(self._tokens) == 1:
            return inside
        slope = (self._seconds[-1] - self._seconds[-2]) / (self._tokens[-1] - self._tokens[-2])
        behind: Floats = inside + slope * np.maximum(0.0, tokens - self._tokens[-1])
        return behind


class _Correction:
    """A moving average of what was taken over what was said."""

    def __init__(self) -> None:
        self.factor = 1.0

    def observe(self, taken_s: float, said_s: float) -> None:
        """`said_s`: by the curves alone, above zero."""
        ratio = taken_s / said_s
        ratio = min(max(ratio, self.factor / _MOST_CORRECTION), self.factor * _MOST_CORRECTION)
        self.factor += SMOOTHING * (ratio - self.factor)


@dataclass(frozen=True)
class DeviceSide:
    """Seconds of the device. `load_s`: one expert over the link. `compute`: one expert that is there.
    `overlaps`: whether loads run while experts are computed."""

    load_s: float
    compute: CostCurve
    overlaps: bool

    def seconds(self, hit_tokens: Integers, loaded: Floats, loaded_compute_s: float) -> Floats:
        """When the device is done, for each number of loads in `loaded`, at `loaded_compute_s` a loaded
        expert."""
        compute_s = float(self.compute.seconds(hit_tokens).sum()) + loaded * loaded_compute_s
        link_s = loaded * self.load_s
        return np.maximum(compute_s, link_s) if self.overlaps else compute_s + link_s


class Costs:
    """Both sides: what was measured at the start, times what running showed since."""

    def __init__(self, in_place: CostCurve, device: DeviceSide) -> None:
        self._in_place, self._device = in_place, device
        self._in_place_now, self._device_now = _Correction(), _Correction()

    def in_place_s(self, tokens: Integers) -> Floats:
        """Seconds of each expert on the CPU. `[n]`"""
        return self._in_place.seconds(tokens) * self._in_place_now.factor

    def device_s(self, hit_tokens: Integers, miss_tokens: Integers) -> Floats:
        """Seconds of the device, by how many of the misses it loads. `[n + 1]`; a loaded expert counts with
        the mean of the misses' tokens."""
        return self._device_s(hit_tokens, miss_tokens, np.arange(len(miss_tokens) + 1.0))

    def load_s(self) -> float:
        """Seconds of one miss of one token that is loaded and computed, with nothing beside it."""
        return float(self.device_s(np.zeros(0, np.int64), np.ones(1, np.int64))[1])

    def observe_in_place(self, tokens: Integers, taken_s: float) -> None:
        """One call computed experts of so many `tokens` in place."""
        self._in_place_now.observe(taken_s, float(self._in_place.seconds(tokens).sum()))

    def observe_device(self, hit_tokens: Integers, loaded_tokens: Integers, taken_s: float) -> None:
        """The device computed these hits, and loaded and computed these misses."""
        said = self._device_s(hit_tokens, loaded_tokens, np.array([float(len(loaded_tokens))]))
        self._device_now.observe(taken_s, float(said[0] / self._device_now.factor))

    def _device_s(self, hit_tokens: Integers, loaded_tokens: Integers, loaded: Floats) -> Floats:
        each_s = float(self._device.compute.seconds(loaded_tokens).mean()) if len(loaded_tokens) else 0.0
        return self._device.seconds(hit_tokens, loaded, each_s) * self._device_now.factor
