"""The expert store that a configuration names: a bank that is filled now, or a file that is read later."""

from __future__ import annotations

from collections.abc import Sequence

from hetero_runtime.checkpoint import Checkpoint
from hetero_runtime.config import ResolvedConfig
from hetero_runtime.expert_file.of_model import FileFilling, open_expert_file
from hetero_runtime.experts.base import ExpertStore
from hetero_runtime.experts.sources import ExpertsModule
from hetero_runtime.experts.store import BankForm, Progress, fill_store, load_store
from hetero_runtime.tiers.file_store import open_file_store


def open_store(
    config: ResolvedConfig,
    checkpoint: Checkpoint,
    *,
    modules: Sequence[ExpertsModule],
    progress: Progress | None,
) -> ExpertStore:
    """The routed experts where `memory.backing` says; only those that stay in memory are read now.

    `modules`: as `hf.conversion.split_checkpoint` gives them. Raises CheckpointError, ConfigError or
    DeviceError, and then leaves nothing behind.
    """
    if config.memory.backing in ("direct", "mmap"):
        return open_file_store(config, checkpoint, modules)
    form: BankForm = "packed" if config.memory.packed else "plain"
    if config.memory.backing == "swap":
        form = "swappable"
    elif config.slabs_are_bank:
        form = "mapped"
    if config.memory.expert_file != "auto":
        with open_expert_file(config, checkpoint, modules) as file:
            return fill_store(FileFilling(file), threads=config.cpu.threads, progress=progress, form=form)
    return load_store(
        modules,
        threads=config.cpu.threads,
        progress=progress,
        form=form,
        experts=config.model.experts,
    )
