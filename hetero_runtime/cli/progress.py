"""A progress bar for long reads: bytes, GB/s, time left."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)


class BytesProgress:
    """A bar that is called with (bytes_done, bytes_total), as `experts.store.load_store` does.

    A context manager; draws on standard error, and nothing at all where that is not a terminal.
    """

    def __init__(self, description: str, *, console: Console | None = None) -> None:
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console or Console(stderr=True),
        )
        self._bar.disable = not self._bar.console.is_terminal
        self._task = self._bar.add_task(description, total=None)

    def __call__(self, bytes_done: int, bytes_total: int) -> None:
        """Draw the bar at `bytes_done` of `bytes_total`."""
        self._bar.update(self._task, completed=bytes_done, total=bytes_total)

    def __enter__(self) -> BytesProgress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
