"""One engine in a process of its own, in a control group if one is named: what it says, how fast.

    python -m bench.tier_case MODEL --config '{"memory": {"backing": "direct"}}' --tokens 64

prints a JSON object, a `TierCase`, on the last line.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from bench.bundled_decode import PROMPTS
from bench.machine import ROOT
from bench.memory_limit import LimitedGroup, join

LONG_PROMPT = 256
"""Tokens whose experts are nearly all there are: they are loaded one after another as the disk gives them."""


class TierCase(NamedTuple):
    """What one engine did. `text`: the tokens of all answers. Rates are of decode but `prompt_read_gb_s`."""

    text: list[int]
    tok_s: float
    hit_rate: float
    read_bytes: int
    """In decode."""
    prompt_read_gb_s: float
    """While reads were under way, in a long prompt; 0 where nothing is read."""
    slabs: int

    @classmethod
    def run(
        cls, model: Path, config: Mapping[str, Any], *, tokens: int, group: LimitedGroup | None = None
    ) -> Self:
        """Run the case in a child, inside `group`. Raises CalledProcessError when it fails or is killed."""
        command = [sys.executable, "-m", "bench.tier_case", str(model), "--tokens", str(tokens)]
        command += ["--config", json.dumps(config)]
        if group is not None:
            command += ["--group", str(group.folder)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path or "." for path in sys.path)}
        done = subprocess.run(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True
        )
        return cls(**json.loads(done.stdout.splitlines()[-1]))

    @classmethod
    def measure(cls, model: Path, config: Mapping[str, Any], *, tokens: int) -> Self:
        """Load the engine here and let it answer."""
        from hetero_runtime import Engine

        with Engine.load({**config, "model": {"path": str(model)}}) as engine:
            engine.generate(list(range(100, 100 + LONG_PROMPT)), max_tokens=1)
            long = engine.stats()
            options: dict[str, Any] = {"temperature": 0.8, "ignore_eos": True, "max_tokens": tokens}
            answers = [engine.generate(prompt, seed=i, **options) for i, prompt in enumerate(PROMPTS)]
            engine.check()
            end = engine.stats()
        cache = end.decode.cache - long.decode.cache
        return cls(
            text=[token for answer in answers for token in answer.token_ids],
            tok_s=len(answers) * (tokens - 1) / (end.decode.seconds - long.decode.seconds),
            hit_rate=cache.hit_rate,
            read_bytes=cache.bytes_moved,
            prompt_read_gb_s=long.disk.num_bytes / long.disk.busy_s / 1e9 if long.disk.reads else 0.0,
            slabs=sum(end.slots),
        )


def main(arguments: Sequence[str] | None = None) -> None:
    """The child."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--config", type=json.loads, required=True, help="JSON")
    parser.add_argument("--tokens", type=int, required=True, help="of each answer")
    parser.add_argument("--group", type=Path, help="control group to join first")
    options = parser.parse_args(arguments)
    if options.group is not None:
        join(options.group)
    case = TierCase.measure(options.model, options.config, tokens=options.tokens)
    print(json.dumps(case._asdict()))


if __name__ == "__main__":
    main()
