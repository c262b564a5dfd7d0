"""A trace in the making: one file a document, so that an interrupted recording goes on where it stopped.

    OUT.parts/00000.safetensors, 00001.safetensors, ...  ──join──►  OUT      (and the folder is removed)

Every part is a whole trace of one document. Documents may be added to the end of the prompts between two
runs; nothing else may change.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from hetero_runtime.errors import RequestError
from hetero_runtime.trace.documents import TokenIds
from hetero_runtime.trace.file import TraceInfo, read_trace, write_trace
from hetero_scheduler.trace import Trace


class PartFolder:
    """The parts of the trace `out`, all made with `info`."""

    def __init__(self, out: Path, info: TraceInfo, *, has_early: bool) -> None:
        """`has_early`: whether parts hold what routers say when they are asked early."""
        self.out, self._info, self._has_early = out, info, has_early
        self.folder = out.with_name(out.name + ".parts")

    def missing(self, documents: Sequence[TokenIds]) -> list[int]:
        """The documents that have no part yet, in order.

        Raises RequestError when `out` exists, or a part does not belong to `documents`.
        """
        if self.out.exists():
            raise RequestError(f"{self.out}: exists already; remove it, or name another file")
        stems = [path.stem for path in self.folder.glob("*.safetensors")]
        done = {int(stem) for stem in stems if stem.isdecimal()}
        for index in sorted(done):
            self._check(index, documents)
        return [index for index in range(len(documents)) if index not in done]

    def make(self) -> None:
        """Make the folder, unless it is there. Raises RequestError."""
        try:
            self.folder.mkdir(exist_ok=True)
        except OSError as error:
            raise RequestError(f"{self.folder}: cannot be made ({error}); name another file") from error

    def write(self, index: int, trace: Trace) -> None:
        """Keep the trace of one document."""
        write_trace(self._path(index), trace, self._info)

    def join(self, num_documents: int) -> Trace:
        """Write `out` from parts 0 to `num_documents` - 1 and remove them."""
        parts = [read_trace(self._path(index))[0] for index in range(num_documents)]
        trace = Trace.joined(parts)
        write_trace(self.out, trace, self._info)
        shutil.rmtree(self.folder)
        return trace

    def _path(self, index: int) -> Path:
        return self.folder / f"{index:05}.safetensors"

    def _check(self, index: int, documents: Sequence[TokenIds]) -> None:
        path = self._path(index)
        part, info = read_trace(path)
        was, now = asdict(info), asdict(self._info)
        for field, value in now.items():
            if was[field] != value:
                raise self._refusal(path, f"was made with {field} {was[field]!r}, now it is {value!r}")
        if (part.early is not None) != self._has_early:
            was_recorded = "with" if part.early is not None else "without"
            raise self._refusal(path, f"was made {was_recorded} --early, now it is the other way")
        if index >= len(documents):
            raise self._refusal(path, f"documents now: {len(documents)}")
        ids = documents[index]
        is_longer = part.num_tokens > len(ids) + self._info.max_tokens
        if is_longer or tuple(part.tokens[: len(ids)].tolist()) != ids:
            raise self._refusal(path, f"was made from another text than document {index + 1} is now")

    def _refusal(self, path: Path, reason: str) -> RequestError:
        return RequestError(f"{path}: {reason}; go on as it was begun, or remove {self.folder} to begin anew")
