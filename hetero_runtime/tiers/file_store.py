"""Experts in an expert file."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from hetero_runtime.checkpoint import Checkpoint
from hetero_runtime.config import ResolvedConfig
from hetero_runtime.expert_file import ExpertFile
from hetero_runtime.expert_file.of_model import open_expert_file
from hetero_runtime.experts.base import ExpertStore
from hetero_runtime.experts.sources import ExpertsModule
from hetero_runtime.tiers.base import RecordSource
from hetero_runtime.tiers.sources import CheckedRecords, DirectRecords, FilePages, PagedRecords

log = logging.getLogger(__name__)


class FileStore(ExpertStore):
    """All routed experts in one file; host memory holds none of them."""

    @property
    def bank_bytes(self) -> int:
        return 0

    def close(self) -> None:
        assert self.source is not None, "a file store reads"
        self.source.close()


def open_file_store(
    config: ResolvedConfig, checkpoint: Checkpoint, modules: Sequence[ExpertsModule]
) -> FileStore:
    """Open the expert file of `config`, packed from `checkpoint`; no record is read. `modules`: its experts,
    as `hf.conversion.split_checkpoint` gives them.

    Raises CheckpointError when the file is damaged, unfinished, stale or of another model.
    """
    file = open_expert_file(config, checkpoint, modules)
    try:
        records: RecordSource = DirectRecords(file)
        if config.memory.backing == "mmap":
            records = _mapped(file)
        elif not file.is_direct:
            log.warning("%s: its file system refuses direct reads; they go through the page cache", file.path)
        checked = CheckedRecords(records, file.check, file.table)
        return FileStore(file.table, source=checked, errors=file.errors())
    except BaseException:
        file.close()
        raise


def _mapped(file: ExpertFile) -> PagedRecords:
    """The file's records through a mapping, which needs the file itself no longer."""
    pages = FilePages(file)
    file.close()
    return PagedRecords(pages, file.table.layout.record_bytes, file.position)
