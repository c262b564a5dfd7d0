"""A Chrome trace of a run, for chrome://tracing or ui.perfetto.dev.

    host      prefill ──────────────┤ decode ─┤ decode ─┤      ranges: `span`
              stalled 1.3 ms ┤                               known when a pass ends: `mark_stall`
    device    kernels and copies, a line each stream         also those inside a replayed CUDA graph

Without a CUDA device the trace has the host's operators instead of kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from hetero_runtime.errors import ConfigError


def trace_to(path: Path) -> AbstractContextManager[None]:
    """Record what runs inside and write it to `path` (`.json`, or compressed `.json.gz`), after an error too.

    Raises ConfigError at once, so before anything is loaded, when nothing can be written there.
    """
    if not path.name.endswith((".json", ".json.gz")):
        raise ConfigError(f"--profile {path}: a trace is a .json or a .json.gz file; name it so")
    _try_to_write(path)
    return _recording(path)


def span(name: str) -> AbstractContextManager[object]:
    """A named range of this thread in the trace; costs next to nothing while none is recorded."""
    is_recording = torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
    return record_function(name) if is_recording else nullcontext()


def mark_stall(stall_s: float) -> None:
    """Note in the trace that computation has waited `stall_s` seconds for copies in the pass that ends."""
    if stall_s > 0:
        with span(f"stalled {1e3 * stall_s:.2f} ms"):
            pass


@contextmanager
def _recording(path: Path) -> Iterator[None]:
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    profiler = profile(activities=activities)
    profiler.start()
    try:
        yield
    finally:
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # what was launched belongs to the run
        profiler.stop()
        profiler.export_chrome_trace(str(path))


def _try_to_write(path: Path) -> None:
    """Open the file, and leave no trace of that."""
    is_new = not path.exists()
    try:
        path.open("ab").close()
    except OSError as error:
        raise ConfigError(f"--profile {path}: {error.strerror}; name a file that can be written") from error
    if is_new:
        path.unlink()
