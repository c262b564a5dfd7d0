"""Routed experts of random weights, made in the host bank that engines serve from, and never written.

    checkpoint    headers, backbone      experts are holes        `random_checkpoint`, `has_experts=False`
    bank          record by record       windows of the pools     the bytes that the files would have had

So that a bench of many engines on one large geometry waits for no disk: 24 layers of Qwen3-30B-A3B are 29 GB.
Where the configuration asks for another format, each record is quantised as one that was read would be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import torch

from bench.models.random_checkpoint import numbers_of
from bench.models.random_geometry import ITEMSIZE, Spec, linear
from hetero_runtime.checkpoint import Checkpoint
from hetero_runtime.config import ResolvedConfig
from hetero_runtime.errors import CheckpointError
from hetero_runtime.experts.bank import Bank
from hetero_runtime.experts.encodings import WORKERS_A_THREAD
from hetero_runtime.experts.filling import Filling, Plain
from hetero_runtime.experts.in_parallel import run_all
from hetero_runtime.experts.quantize import Quantizer, errors_by_layer, make_quantizer
from hetero_runtime.experts.sources import ExpertPlan, plan_experts
from hetero_runtime.experts.store import BankForm, BankStore, fill_store
from hetero_runtime.hf.conversion import split_checkpoint
from hetero_runtime.hf.loading import build_skeleton
from hetero_scheduler.keys import ExpertKey

Bytes = npt.NDArray[np.uint8]


def random_store(config: ResolvedConfig) -> BankStore:
    """The experts of the random checkpoint that `config` names, in the format that it asks for.

    They are those of a checkpoint with experts, whether this one has them or not. Raises as `load_store`.
    """
    checkpoint = Checkpoint.open(config.model.path)
    skeleton = build_skeleton(checkpoint, dtype=config.model.dtype, device=torch.device("cpu"))
    plan = plan_experts(split_checkpoint(skeleton.model, checkpoint, skeleton.quantizer).experts)
    filling = RandomFilling(plan, make_quantizer(plan, config.model.experts))
    form: BankForm = "packed" if config.memory.packed else "plain"
    return fill_store(filling, threads=config.cpu.threads, form=form)


class RandomFilling(Filling):
    """Numbers of `random_checkpoint`, record by record. `quantizer`: what changes them; None keeps them."""

    def __init__(self, plan: ExpertPlan, quantizer: Quantizer | None) -> None:
        self.table = plan.table if quantizer is None else quantizer.table
        self.read_bytes = plan.table.num_bytes
        self._plan, self._quantizer = plan, quantizer

    def fill(self, bank: Bank, *, threads: int, read: Callable[[int], None]) -> None:
        records = bank.bytes.numpy().reshape(self.table.num_records, -1)
        record_bytes, workers = self._plan.layout.record_bytes, WORKERS_A_THREAD * threads
        squares = np.zeros((self.table.num_records, 2))
        plain = np.zeros((workers, record_bytes), dtype=np.uint8)

        def make(row: int, worker: int) -> None:
            key = self.table.key(row)
            if self._quantizer is None:
                self._make(key, records[row])
                return
            self._make(key, plain[worker])
            squares[row] = self._quantizer.write(key, torch.from_numpy(plain[worker]), records[row])

        run_all(make, range(len(records)), threads=workers, done=lambda _: read(record_bytes))
        if self._quantizer is not None:
            self.errors = errors_by_layer(squares, self.table.num_layers)

    def check(self, plain: Plain) -> None:
        """The last record, where it was not changed, is as it is made."""
        if self._quantizer is not None:
            return
        key = ExpertKey(self.table.num_layers - 1, self.table.num_experts - 1)
        expected = np.zeros(self._plan.layout.record_bytes, dtype=np.uint8)
        self._make(key, expected)
        if not np.array_equal(plain(key).numpy(), expected):
            raise CheckpointError(f"the bank does not give {key} back as it was made")

    def _make(self, key: ExpertKey, record: Bytes) -> None:
        """Write the plain record of `key` to `record`, uint8 `[record_bytes]`."""
        for spec, begin in self._tensors(key):
            for window in numbers_of(spec):
                record[begin : begin + len(window)] = np.frombuffer(window, dtype=np.uint8)
                begin += len(window)

    def _tensors(self, key: ExpertKey) -> Iterator[tuple[Spec, int]]:
        """What lies in the record of `key`, and where it begins."""
        sources = {source.name: source for source in self._plan.modules[key.layer].parameters}
        for field, placed in zip(self._plan.layout.fields, self._plan.fields, strict=True):
            for name, placement in placed.placements.items():
                assert placement.is_contiguous, (
                    f"{placed.parameter} is rearranged: not of a random checkpoint"
                )
                entry = sources[placed.parameter].weights[name].of(key.expert, self._plan.num_experts)
                yield linear(entry.key, *entry.shape), field.offset + placement.start * ITEMSIZE
