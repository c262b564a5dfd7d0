"""Task files of one's own, as lm-eval finds them."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from lm_eval.tasks import TaskManager


class FolderTasks(TaskManager):  # type: ignore[misc]  # lm-eval carries no types
    """The tasks that `folder` defines and no others; relative paths in its files start there."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()
        super().__init__(include_path=str(self._folder), include_defaults=False)

    def load(self, *arguments: Any, **options: Any) -> Any:
        """As lm-eval's; questions are read here."""
        with contextlib.chdir(self._folder):
            return super().load(*arguments, **options)
