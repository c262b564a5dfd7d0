"""The expert file of a model: opened and held to the checkpoint, and read into a host bank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from hetero_runtime.checkpoint import Checkpoint
from hetero_runtime.config import ResolvedConfig
from hetero_runtime.expert_file.reader import ExpertFile
from hetero_runtime.experts.bank import Bank
from hetero_runtime.experts.encodings import WORKERS_A_THREAD
from hetero_runtime.experts.filling import Filling, Plain
from hetero_runtime.experts.in_parallel import run_all
from hetero_runtime.experts.quantize import make_quantizer
from hetero_runtime.experts.sources import ExpertsModule, plan_experts


def open_expert_file(
    config: ResolvedConfig, checkpoint: Checkpoint, modules: Sequence[ExpertsModule]
) -> ExpertFile:
    """Open `memory.expert_file`; no record is read. `modules`: the experts of `checkpoint`, as
    `hf.conversion.split_checkpoint` gives them.

    Raises CheckpointError when the file is damaged, unfinished, stale, of another model or another format.
    """
    plan = plan_experts(modules)
    quantizer = make_quantizer(plan, config.model.experts)
    file = ExpertFile.open(Path(config.memory.expert_file))
    try:
        file.check_model(checkpoint, plan.table if quantizer is None else quantizer.table)
    except BaseException:
        file.close()
        raise
    return file


class FileFilling(Filling):
    """The records of an expert file, each held to its checksum. The file stays the caller's."""

    def __init__(self, file: ExpertFile) -> None:
        self.table, self.errors, self._file = file.table, file.errors(), file
        self.read_bytes = file.table.num_bytes

    def fill(self, bank: Bank, *, threads: int, read: Callable[[int], None]) -> None:
        records, record_bytes = bank.bytes.numpy(), self.table.layout.record_bytes
        rows = records.reshape(self.table.num_records, record_bytes)
        run_all(
            lambda key, _: self._file.read(key, rows[self.table.row(key)]),
            self._file.keys_in_order(),
            threads=WORKERS_A_THREAD * threads,
            done=lambda key: read(record_bytes),
        )

    def check(self, plain: Plain) -> None:
        """Every record was held to the checksum of what `pack` made, and `pack` compared one expert."""
