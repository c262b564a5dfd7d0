"""Run benches, each in its own process: `python -m bench --device cpu` or `python -m bench NAME...`."""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent


def find_benches(folder: Path = FOLDER) -> dict[str, str]:
    """Name and device (`cpu` or `cuda`) of each bench: a module of `folder` with a constant DEVICE."""
    benches: dict[str, str] = {}
    for path in sorted(folder.glob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            match node:
                case ast.Assign(
                    targets=[ast.Name(id="DEVICE")], value=ast.Constant(value="cpu" | "cuda" as device)
                ):
                    benches[path.stem] = device
    return benches


def main() -> int:
    """Run the chosen benches and return how many failed."""
    benches = find_benches()
    parser = argparse.ArgumentParser(
        prog="python -m bench", description="Run benches and write their results."
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"which ones: {', '.join(benches) or 'none yet'}"
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="all that need no GPU (cpu), or only those that do"
    )
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.names if name not in benches]:
        parser.error(f"no bench named {', '.join(unknown)}; there are: {', '.join(benches)}")
    chosen = arguments.names or [n for n, device in benches.items() if arguments.device in (None, device)]
    failed = [name for name in chosen if subprocess.run([sys.executable, "-m", f"bench.{name}"]).returncode]
    print(
        f"bench: {len(chosen) - len(failed)} of {len(chosen)} done", *(f"failed: {name}" for name in failed)
    )
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
