"""Writing an expert file: from a checkpoint, record by record, with little memory.

1  plan     which bytes make which record, from headers alone
2  part     room for the whole file, or the part of an interrupted run    part.py
3  records  read, encoded, written; several at once, in the order of the file
4  finish   the part becomes the file
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from hetero_runtime import __version__
from hetero_runtime.checkpoint import Checkpoint
from hetero_runtime.checkpoint.lazy_tensor import DTYPE_NAMES
from hetero_runtime.config import Config, ResolvedConfig
from hetero_runtime.errors import ConfigError
from hetero_runtime.expert_file.header import ExpertFileHeader, FieldEntry
from hetero_runtime.expert_file.part import PartFile
from hetero_runtime.expert_file.reader import ExpertFile
from hetero_runtime.expert_file.source import read_sources
from hetero_runtime.expert_file.stored import page_aligned
from hetero_runtime.experts.encodings import WORKERS_A_THREAD
from hetero_runtime.experts.in_parallel import run_all
from hetero_runtime.experts.maker import RecordMaker
from hetero_runtime.experts.quantize import make_quantizer
from hetero_runtime.experts.sources import ExpertPlan, plan_experts
from hetero_runtime.experts.table import RecordTable
from hetero_runtime.hf.conversion import split_checkpoint
from hetero_runtime.hf.loading import build_skeleton
from hetero_runtime.trace.file import read_trace
from hetero_scheduler.neighbours import order_by_company

Order = npt.NDArray[np.int32]


@dataclass(frozen=True)
class PackResult:
    """What was written."""

    path: Path
    num_bytes: int
    num_records: int
    num_resumed: int
    """Records that an earlier, interrupted run had written."""
    seconds: float
    written_bytes: int
    """Bytes of records that this run wrote."""
    errors: list[float] | None
    """Relative root mean square error of the weights, by layer; None: written as they came."""


def for_packing(config: Config) -> Config:
    """What of `config` matters here: a file may be packed on a machine that could not serve the model, for
    an engine that is to read this very file."""
    return Config(model=config.model, cpu=config.cpu, device="cpu")


def pack(
    config: ResolvedConfig,
    out: Path,
    *,
    trace: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> PackResult:
    """Write the routed experts of `config`'s model to `out`, or go on with what an earlier run left.

    `trace`: a recorded routing; experts of a layer that it shows together lie next to each other. `progress`
    is called with (bytes done, bytes in all). Raises RequestError (the file exists, or its part is of
    another kind), CheckpointError, ConfigError (a trace of another model), or DeviceError (no room: then
    nothing is left).
    """
    began = time.perf_counter()
    checkpoint = Checkpoint.open(config.model.path)
    plan, workers = _plan(config, checkpoint), WORKERS_A_THREAD * config.cpu.threads
    quantizer = make_quantizer(plan, config.model.experts)
    with closing(RecordMaker(plan, quantizer, workers=workers)) as maker:
        maker.check_source()
        order = _order(maker.table, trace)
        header = _header(config, checkpoint, table=maker.table, order=order)
        with closing(PartFile(out, header, order)) as part:
            missing = part.missing(threads=workers)
            _write(maker, part, order=order, missing=missing, workers=workers, progress=progress)
            part.finish()
    with ExpertFile.open(out) as file:
        return PackResult(
            path=out,
            num_bytes=out.stat().st_size,
            num_records=header.num_records,
            num_resumed=header.num_records - len(missing),
            seconds=time.perf_counter() - began,
            written_bytes=len(missing) * header.record_bytes,
            errors=file.errors(),
        )


def _plan(config: ResolvedConfig, checkpoint: Checkpoint) -> ExpertPlan:
    """How to build the records of `checkpoint` as it is."""
    skeleton = build_skeleton(checkpoint, dtype=config.model.dtype, device=torch.device("cpu"))
    return plan_experts(split_checkpoint(skeleton.model, checkpoint, skeleton.quantizer).experts)


def _write(
    maker: RecordMaker,
    part: PartFile,
    *,
    order: Order,
    missing: list[int],
    workers: int,
    progress: Callable[[int, int], None] | None,
) -> None:
    table = maker.table
    record_bytes = table.layout.record_bytes
    rows = page_aligned(workers, record_bytes)
    num_done = table.num_records - len(missing)

    def write(position: int, worker: int) -> None:
        squares = maker.make(table.key(int(order[position])), rows[worker], worker=worker)
        part.put(position, rows[worker], squares)

    def done(position: int) -> None:
        nonlocal num_done
        num_done += 1
        if progress is not None:
            progress(num_done * record_bytes, table.num_bytes)

    run_all(write, missing, threads=workers, done=done)


def _header(
    config: ResolvedConfig, checkpoint: Checkpoint, *, table: RecordTable, order: Order
) -> ExpertFileHeader:
    return ExpertFileHeader(
        model=checkpoint.path.name,
        experts=config.model.experts,
        num_layers=table.num_layers,
        num_experts=table.num_experts,
        record_bytes=table.layout.record_bytes,
        fields=tuple(FieldEntry(f.name, DTYPE_NAMES[f.dtype], f.shape) for f in table.layout.fields),
        forms={name: asdict(form) for name, form in table.forms.items()},
        order_crc32=zlib.crc32(order.data),
        sources=read_sources(checkpoint),
        tool_version=__version__,
    )


def _order(table: RecordTable, path: Path | None) -> Order:
    """Rows in the order of the file: layer by layer, by the trace's company where there is one."""
    if path is None:
        return np.arange(table.num_records, dtype=np.int32)
    trace, _ = read_trace(path)
    if (trace.num_layers, trace.num_experts) != (table.num_layers, table.num_experts):
        raise ConfigError(
            f"--order {path}: was recorded from {trace.num_layers} layers × {trace.num_experts} experts, "
            f"this model has {table.num_layers} × {table.num_experts}; record one with `hetero-runtime trace`"
        )
    first = np.arange(table.num_layers)[:, None] * table.num_experts
    return (first + order_by_company(trace)).reshape(-1).astype(np.int32)
