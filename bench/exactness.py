"""Every covered architecture against plain transformers: `python -m bench.exactness [--device cuda]`.

Tiny random checkpoints, greedy, 64 tokens of two prompts, at the smallest legal residency, 25 % and all. One
row an architecture: the largest difference of a logit over all of them (0: equal in every bit).
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.harness import RESULTS, ResultFile, Row
from hetero_runtime.config import load_config
from hetero_runtime.hf.console import keep_quiet
from hetero_runtime.planned import plan_for, three_residencies
from hetero_runtime.verify import Verification, verify
from tests.architectures import ARCHITECTURES, build_checkpoint

DEVICE = "cpu"

INCOMPARABLE = {"Qwen3MoeFp8Ragged"}
"""transformers alone cannot load it."""

CUDA_ERROR = 1e-5
"""Largest error allowed on a GPU, relative to the largest logit; on a CPU none is."""


def measure(name: str, device: str) -> list[Verification]:
    """Verify one architecture at its three residencies."""
    with tempfile.TemporaryDirectory() as folder:
        path = build_checkpoint(name, Path(folder))
        config = load_config(
            {
                "model": {"path": str(path)},
                "device": device,
                "execution": {"mode": "eager", "max_length": 256},
            }
        )
        return verify([plan_for(one) for one in three_residencies(config)])


def row_of(name: str, results: Sequence[Verification], device: str) -> Row:
    """The worst of the residencies. Raises AssertionError where tokens differ: no number says that."""
    assert all(result.tokens_equal for result in results), f"{name}: tokens differ, see hetero-runtime verify"
    allowed = 0.0 if device == "cpu" else CUDA_ERROR
    error = max(result.max_logit_error / result.max_logit for result in results)
    hits = ", ".join(f"{result.slabs} slabs {100 * result.hit_rate:.0f} %" for result in results)
    tokens = sum(result.num_tokens for result in results)
    return Row(
        id=f"exact.{name.lower()}_{device}",
        value=error,
        unit="of the largest logit",
        target=f"<={allowed:g}",
        reference="plain transformers, eager experts",
        note=f"{tokens} tokens equal; hits: {hits}",
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Verify, print, write `exactness.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*", help="architectures; all when absent")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result file")
    options = parser.parse_args(arguments)
    keep_quiet()
    names = options.names or [name for name in ARCHITECTURES if name not in INCOMPARABLE]
    rows = [row_of(name, measure(name, options.device), options.device) for name in names]
    ResultFile.write("exactness", rows, folder=options.results)


if __name__ == "__main__":
    main()
