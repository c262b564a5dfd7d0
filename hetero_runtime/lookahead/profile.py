"""What pinned prefixes cost on a machine: a file beside the model, written by `calibrate prefix`.

{"format": FORMAT, "fingerprint": {...}, "profiles": [Profile of one device and room each, ...]}
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hetero_runtime.errors import CheckpointError
from hetero_runtime.prediction.fingerprint import RouterFingerprint
from hetero_runtime.whole_file import write_whole

FORMAT = "hetero_runtime.prefix/1"
PREFIX_SUFFIX = ".prefix.json"
PROFILE = "profile anew with `hetero-runtime calibrate prefix MODEL --text FILE`"


@dataclass(frozen=True)
class PrefixPoint:
    """One prefix, measured. `seconds`: of all prompts and answers; `hit_rate`: of decode, prefix included."""

    pinned: int
    slabs: int
    seconds: float
    prefill_s: float
    decode_s: float
    hit_rate: float


@dataclass(frozen=True)
class PrefixProfile:
    """`device`: as it was resolved. `num_experts`: for how many there was room, prefix and slabs together."""

    device: str
    num_experts: int
    points: tuple[PrefixPoint, ...]

    @property
    def best(self) -> PrefixPoint:
        """The fastest, of equals the shallowest."""
        return min(self.points, key=lambda point: (point.seconds, point.pinned))


def write_profiles(path: Path, profiles: Sequence[PrefixProfile], *, fingerprint: RouterFingerprint) -> None:
    """Write atomically. Raises DeviceError."""
    content = {
        "format": FORMAT,
        "fingerprint": asdict(fingerprint),
        "profiles": [asdict(profile) for profile in profiles],
    }
    write_whole(path, lambda unfinished: unfinished.write_text(json.dumps(content, indent=1) + "\n"))


def read_profiles(path: Path, model: RouterFingerprint) -> tuple[PrefixProfile, ...]:
    """All profiles of `model`; none where there is no file. Raises CheckpointError for a file that is no
    profile, or another model's."""
    if not path.exists():
        return ()
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise ValueError(f"its format is {content['format']!r}")
        fingerprint = RouterFingerprint(**content["fingerprint"])
        profiles = tuple(_profile(described) for described in content["profiles"])
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: is no profile of prefixes ({error!r}); {PROFILE}") from error
    fingerprint.check(model, str(path), remedy=f"Remove it, or {PROFILE}")
    return profiles


def with_profile(profiles: Sequence[PrefixProfile], new: PrefixProfile) -> list[PrefixProfile]:
    """`profiles` with `new` in place of one of the same device and room."""
    others = [each for each in profiles if (each.device, each.num_experts) != (new.device, new.num_experts)]
    return [*others, new]


def _profile(described: dict[str, Any]) -> PrefixProfile:
    points = tuple(PrefixPoint(**point) for point in described["points"])
    if not points:
        raise ValueError("a profile without a point")
    return PrefixProfile(str(described["device"]), int(described["num_experts"]), points)
