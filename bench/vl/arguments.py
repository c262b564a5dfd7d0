"""What the benches of the small vision-language model are told alike."""

from __future__ import annotations

import argparse
from pathlib import Path

from bench.harness import RESULTS
from bench.vl.held_out import MODEL


def parser_of(bench: str, *, num: int, num_of: str) -> argparse.ArgumentParser:
    """The command line of `bench`: a model, `--device`, `--out`, and `--num`: how many `num_of`, `num` unless
    told otherwise."""
    parser = argparse.ArgumentParser(prog=f"python -m bench.{bench}")
    parser.add_argument("model", type=Path, nargs="?", default=MODEL)
    parser.add_argument("--num", type=int, default=num, help=num_of)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser
