"""The time of requests by the depth of the pinned prefix (VisMMOE's Fig. 12)."""

from __future__ import annotations

from pathlib import Path

from hetero_runtime.lookahead.profile import PrefixProfile
from hetero_runtime.picture import new_figure, save_picture


def draw_prefixes(profile: PrefixProfile, path: Path) -> None:
    """Draw `profile` into the PNG `path`.

    Raises ConfigError where matplotlib is missing, DeviceError where `path` cannot be written.
    """
    points = sorted(profile.points, key=lambda point: point.pinned)
    pinned = [point.pinned for point in points]
    figure = new_figure((6.0, 4.0))
    axes = figure.subplots()
    axes.plot(pinned, [point.seconds for point in points], "o-", color="#2f6fb0", label="prefill and decode")
    axes.plot(pinned, [point.decode_s for point in points], "s--", color="#d9822b", label="decode alone")
    axes.axvline(profile.best.pinned, color="#77838f", linestyle=":", label=f"fastest: {profile.best.pinned}")
    axes.set_xlabel("first MoE layers that are pinned")
    axes.set_ylabel("seconds")
    axes.set_ylim(bottom=0)
    axes.set_title(f"room for {profile.num_experts} experts on {profile.device}", fontsize=10)
    axes.grid(axis="y", color="#e4e7ea")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    save_picture(figure, path)
