"""How much host memory loading the expert bank takes at its worst, in a process that does nothing else.

`python -m bench.load_rss FOLDER --threads N` prints one JSON object: bytes of the bank, resident bytes before
loading (interpreter, libraries, the model's skeleton) and the most that were resident while it loaded.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from bench.machine import ROOT


class LoadMemory(NamedTuple):
    """Bytes. The backbone is not loaded here."""

    bank: int
    before: int
    peak: int

    @property
    def over_bank(self) -> float:
        """What loading added at its peak, over the bank."""
        return (self.peak - self.before) / self.bank


def measure_load_memory(folder: Path, *, threads: int) -> LoadMemory:
    """Load the experts of `folder` in a fresh process."""
    command = [sys.executable, "-m", "bench.load_rss", str(folder), "--threads", str(threads)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path or "." for path in sys.path)}
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return LoadMemory(**json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    """The fresh process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--threads", type=int, required=True)
    arguments = parser.parse_args()

    from bench.load_checkpoint import experts_of
    from hetero_runtime.experts.store import load_store
    from hetero_runtime.own_memory import status_bytes

    experts = experts_of(arguments.folder)
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak starts again from here
    before = status_bytes("VmRSS")
    store = load_store(experts, threads=arguments.threads)
    memory = LoadMemory(store.bank_bytes, before, status_bytes("VmHWM"))
    store.close()
    print(json.dumps(memory._asdict()))


if __name__ == "__main__":
    main()
