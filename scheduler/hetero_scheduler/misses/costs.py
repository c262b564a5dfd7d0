"""What experts cost: measured once by the number of tokens, then corrected while running."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

SMOOTHING = 0.05
"""Weight of the newest layer in the moving averages: some twenty layers, about one token."""
_MOST_CORRECTION = 4.0
"""One layer that the machine was busy with something else must not turn the averages over."""
_TABLE = 64
"""Tokens whose seconds are looked up."""


class CostCurve:
    """Seconds of one expert by its number of tokens: straight lines between what was measured."""

    def __init__(self, measured: Mapping[int, float]) -> None:
        """`measured`: seconds by tokens. The last line goes on behind the last point, the first value before
        the first. More tokens never take less, so what is above a later value was disturbed.

        Raises ValueError for none, or for one that is not above zero.
        """
        if not measured or min(measured.values()) <= 0 or min(measured) < 1:
            raise ValueError(f"seconds by tokens {dict(measured)}: some above zero are needed")
        self._tokens = sorted(measured)
        self._seconds = [measured[tokens] for tokens in self._tokens]
        for i in reversed(range(len(self._seconds) - 1)):
            self._seconds[i] = min(self._seconds[i], self._seconds[i + 1])
        self._table = [self._on_lines(tokens) for tokens in range(_TABLE + 1)]

    def seconds(self, tokens: Sequence[int]) -> list[float]:
        """Of one expert with so many tokens, for each of `tokens` `[n]`."""
        table = self._table
        return [table[count] if count <= _TABLE else self._on_lines(count) for count in tokens]

    def _on_lines(self, tokens: int) -> float:
        if tokens <= self._tokens[0] or len(self._tokens) == 1:
            return self._seconds[0]
        right = min(bisect_left(self._tokens, tokens), len(self._tokens) - 1)
        (begin, end), (low, high) = self._tokens[right - 1 : right + 1], self._seconds[right - 1 : right + 1]
        return low + (high - low) * (tokens - begin) / (end - begin)


class _Average:
    """A moving average."""

    def __init__(self, value: float) -> None:
        self.value = value

    def observe(self, newest: float) -> None:
        """`newest`, and what was said before, are above zero."""
        newest = min(max(newest, self.value / _MOST_CORRECTION), self.value * _MOST_CORRECTION)
        self.value += SMOOTHING * (newest - self.value)


@dataclass(frozen=True)
class DeviceSide:
    """Seconds of the device. `load_s`: one expert over the link. `compute`: one expert that is there.
    `overlaps`: whether loads run while experts are computed."""

    load_s: float
    compute: CostCurve
    overlaps: bool

    def seconds(self, num_loaded: int, hits_s: float, each_s: float) -> float:
        """When the device is done: hits in `hits_s`, and so many loads, each computed in `each_s`."""
        compute_s, link_s = hits_s + num_loaded * each_s, num_loaded * self.load_s
        return max(compute_s, link_s) if self.overlaps else compute_s + link_s


class Costs:
    """Both sides: what was measured at the start, times what running showed since. `call_s`: what the thread
    that drives the device does for a layer's work in place, whatever is in it."""

    def __init__(self, in_place: CostCurve, device: DeviceSide, *, call_s: float) -> None:
        self._in_place, self._device = in_place, device
        self._in_place_now, self._device_now = _Average(1.0), _Average(1.0)
        self._call = _Average(call_s)

    @property
    def call_s(self) -> float:
        """Seconds of one call, beside its experts."""
        return self._call.value

    def in_place_s(self, tokens: Sequence[int]) -> list[float]:
        """Seconds of each expert on the CPU. `[n]`"""
        factor = self._in_place_now.value
        return [factor * seconds for seconds in self._in_place.seconds(tokens)]

    def device_s(self, hit_tokens: Sequence[int], miss_tokens: Sequence[int]) -> list[float]:
        """Seconds of the device, by how many of the misses it loads. `[n + 1]`; a loaded expert counts with
        the mean of the misses' tokens."""
        hits_s, each_s = self._device_compute_s(hit_tokens, miss_tokens)
        factor, device = self._device_now.value, self._device
        return [factor * device.seconds(loaded, hits_s, each_s) for loaded in range(len(miss_tokens) + 1)]

    def load_s(self) -> float:
        """Seconds of one miss of one token that is loaded and computed, with nothing beside it."""
        return self.device_s((), (1,))[1]

    def observe_in_place(self, tokens: Sequence[int], taken_s: float) -> None:
        """One call computed experts of so many `tokens` in place."""
        self._in_place_now.observe(taken_s / sum(self._in_place.seconds(tokens)))

    def observe_call(self, taken_s: float) -> None:
        """So long one call kept the thread that drives the device."""
        self._call.observe(taken_s)

    def observe_device(self, hit_tokens: Sequence[int], loaded_tokens: Sequence[int], taken_s: float) -> None:
        """The device computed these hits, and loaded and computed these misses."""
        said_s = self._device.seconds(len(loaded_tokens), *self._device_compute_s(hit_tokens, loaded_tokens))
        self._device_now.observe(taken_s / said_s)

    def _device_compute_s(
        self, hit_tokens: Sequence[int], loaded_tokens: Sequence[int]
    ) -> tuple[float, float]:
        """Of all hits together, and of one expert that is loaded."""
        compute, number = self._device.compute, len(loaded_tokens)
        return sum(compute.seconds(hit_tokens)), sum(compute.seconds(loaded_tokens)) / max(1, number)
