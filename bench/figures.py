"""What one engine gave at one residency, measured in a process of its own, which prints it as JSON.

A process each, because FreeToken wants a CUDA context that nobody has touched, all memory has to be free
again for the next engine, and an engine that fails must not take the others along.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass


class ChildError(Exception):
    """A process did not print its figures; says why."""


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Medians of one engine.

    `ttfts_ms` by prompt length. `slots` hold an expert each. `start_s`: the part of loading that capturing
    took, None where nothing was captured.
    """

    engine: str
    residency: float
    tok_s: float
    all_tok_s: tuple[float, ...]
    ttfts_ms: dict[int, float]
    hit_rate: float | None
    slots: int
    peak_vram_gib: float
    load_s: float
    start_s: float | None = None

    def print(self) -> None:
        """One line of JSON on standard output, for `read`."""
        print(json.dumps(asdict(self)), flush=True)

    @classmethod
    def read(cls, output: str) -> Figures:
        """The figures on the last line of `output` that begins like JSON. Raises ChildError without one."""
        for line in reversed(output.splitlines()):
            if line.startswith('{"engine"'):
                content = json.loads(line)
                content["all_tok_s"] = tuple(content["all_tok_s"])
                content["ttfts_ms"] = {int(length): ms for length, ms in content["ttfts_ms"].items()}
                return cls(**content)
        raise ChildError(f"it printed no figures; its last words: {output[-300:]!r}")


def measure_in_child(words: Sequence[str], *, environment: Mapping[str, str], limit_s: float) -> Figures:
    """Run `python -m *words` and read what it prints last. Its standard error is ours.

    Raises ChildError when it fails, takes longer than `limit_s`, or prints no figures.
    """
    with tempfile.TemporaryFile("w+") as output:  # no pipe: a grandchild could hold it open
        try:
            code = subprocess.run(
                [sys.executable, "-m", *words], stdout=output, env=dict(environment), timeout=limit_s
            ).returncode
        except subprocess.TimeoutExpired as error:
            raise ChildError(f"took longer than {limit_s:.0f} s") from error
        output.seek(0)
        text = output.read()
    if code:
        raise ChildError(f"exit status {code}; its last words: {text[-300:]!r}")
    return Figures.read(text)
