"""Progress bars on standard error: bytes of a long read; things counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)


class BytesProgress:
    """A bar that is called with (bytes_done, bytes_total), as `experts.store.load_store` does.

    A context manager; draws on standard error, and nothing at all where that is not a terminal. `then`: a
    line for when all is read, about what goes on after that.
    """

    def __init__(self, description: str, *, then: str = "", console: Console | None = None) -> None:
        self._then = then
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
        if self._then and not self._bar.disable and bytes_done >= bytes_total:
            self._bar.console.print(self._then, highlight=False)
            self._then = ""

    def __enter__(self) -> BytesProgress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()


@contextmanager
def count_progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar that is called with (done, in all); nothing is drawn where standard error is no terminal.

    It appears with the first call, so that what is done before, such as loading, may have a bar of its own.
    """
    console = Console(stderr=True)
    columns = (
        TextColumn(what),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    bar = Progress(*columns, console=console, disable=not console.is_terminal, transient=True)
    task = bar.add_task(what, total=None)

    def draw(done: int, total: int) -> None:
        bar.start()
        bar.update(task, completed=done, total=total)

    try:
        yield draw
    finally:
        bar.stop()
