"""The expert store: every routed expert of a model as one record in one host bank.

checkpoint ──reads, sorted by file and offset──► threads ──► bank: layer 0: |rec 0|rec 1|...|
                                                                   layer 1: |rec 0|rec 1|...|

For a device behind a link the records may be packed once they are all there (`packing`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from hetero_gpu.packed import PackedLayout
from hetero_gpu.packed.reference import unpack_reference
from hetero_runtime.config.tree import ExpertsFormat
from hetero_runtime.experts.bank import HostBank
from hetero_runtime.experts.extent_reader import ReadPath
from hetero_runtime.experts.filling import make_filling
from hetero_runtime.experts.formats import WeightForm, materialize
from hetero_runtime.experts.packing import pack_bank, packing_of
from hetero_runtime.experts.quantize import make_quantizer
from hetero_runtime.experts.record import RecordLayout
from hetero_runtime.experts.sources import ExpertsModule, plan_experts
from hetero_runtime.experts.table import RecordTable
from hetero_runtime.no_room import no_room_for
from hetero_scheduler.keys import ExpertKey

if TYPE_CHECKING:
    from hetero_gpu.host_memory import Registration

log = logging.getLogger(__name__)

REGISTER_BYTES = 1 << 30
"""About how much is registered with CUDA in one call; rounded to whole records."""


class Progress(Protocol):
    """Called on the loading thread after every extent."""

    def __call__(self, bytes_done: int, bytes_total: int, /) -> None:
        """`bytes_total` is the same in every call."""


class ExpertStore:
    """All routed experts in host memory. Records never change, so any number of threads may read them.

    `packing`: how the bank has its records; None: plain, as `layout` says. `errors`: root mean square error
    of each layer's weights over that of the weights; None where they are those of the checkpoint.
    """

    def __init__(
        self,
        table: RecordTable,
        bank: HostBank,
        packing: PackedLayout | None = None,
        *,
        errors: list[float] | None = None,
    ) -> None:
        self._table, self._bank = table, bank
        self.packing, self.errors = packing, errors
        self.layout: RecordLayout = table.layout
        self.forms: dict[str, WeightForm] = table.forms
        self.num_layers, self.num_experts = table.num_layers, table.num_experts

    @property
    def bank_bytes(self) -> int:
        """Bytes of host memory that the records take."""
        return self._bank.num_bytes

    @property
    def stored_bytes(self) -> int:
        """Bytes that one record takes in the bank."""
        return self.layout.record_bytes if self.packing is None else self.packing.packed_bytes

    @property
    def is_registered(self) -> bool:
        """Whether CUDA can copy from the records without staging."""
        return self._bank.registration is not None and self._bank.registration.kind == "registered"

    @property
    def records(self) -> torch.Tensor:
        """All records in the order of their keys, uint8 `[bank_bytes]`: a view of the bank."""
        return self._bank.bytes

    def record(self, key: ExpertKey) -> torch.Tensor:
        """One expert as the bank has it: uint8 `[stored_bytes]`, a view."""
        start = self._table.row(key) * self.stored_bytes
        return self._bank.bytes[start : start + self.stored_bytes]

    def plain_record(self, key: ExpertKey) -> torch.Tensor:
        """One expert as a slab has it: uint8 `[record_bytes]`; a view, or of a packed record a copy."""
        if self.packing is None:
            return self.record(key)
        return torch.from_numpy(unpack_reference(self.record(key).numpy(), self.packing))

    def materialize(self, record: torch.Tensor, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Parameters of the expert whose plain record this is (`plain_record` or a slab), in `dtype`."""
        return materialize(self.layout.view(record), self.forms, dtype)

    def register(self) -> Registration:
        """Register the bank with CUDA; the answer says what the machine allowed."""
        records = max(1, REGISTER_BYTES // self.stored_bytes)
        return self._bank.register(chunk_bytes=records * self.stored_bytes)

    def close(self) -> None:
        """Unregister the bank and free it. No view of a record may be used after that."""
        self._bank.close()


def load_store(
    modules: Sequence[ExpertsModule],
    *,
    threads: int,
    progress: Progress | None = None,
    read_path: ReadPath | None = None,
    is_packed: bool = False,
    experts: ExpertsFormat = "checkpoint",
) -> ExpertStore:
    """Read all routed experts (see `hf.conversion.split_checkpoint`) with `threads` threads.

    `read_path`: None measures and chooses. `is_packed`: pack the records if they can be; if not, the log
    says so. `experts`: the format of the records. One expert is compared with what transformers' own
    operations make of it. Raises CheckpointError (bad checkpoint, failing read), ConfigError (experts that
    cannot be written so) or DeviceError (no room), and then leaves nothing behind.
    """
    plan = plan_experts(modules)
    filling = make_filling(plan, make_quantizer(plan, experts), read_path)
    packing = packing_of(filling.table.layout) if is_packed else None
    bank = HostBank(filling.table.num_bytes)
    work = _Work(progress, filling.read_bytes, bank.num_bytes if packing is not None else 0)
    try:
        filling.fill(bank, threads=threads, read=work.read)
        if packing is not None and not _is_packed(bank, packing, threads=threads, work=work):
            packing = None
        store = ExpertStore(filling.table, bank, packing, errors=filling.errors)
        filling.check(store.plain_record)
    except BaseException:
        bank.close()
        raise
    return store


def _is_packed(bank: HostBank, packing: PackedLayout, *, threads: int, work: _Work) -> bool:
    """Pack the bank, or say why it stays plain."""
    fix = "free memory, or write memory.packed: false"
    with no_room_for("packing the experts", torch.device("cpu"), fix=fix):
        if pack_bank(bank, packing, threads=threads, progress=work.packed):
            return True
    log.warning("experts stay plain: their exponents vary too much to be packed")
    work.packed(bank.num_bytes)
    return False


class _Work:
    """Bytes to read and then to pack, told to `progress` as one number."""

    def __init__(self, progress: Progress | None, read_bytes: int, pack_bytes: int) -> None:
        self._progress, self._read_bytes, self._total = progress, read_bytes, read_bytes + pack_bytes
        self._num_read = 0

    def read(self, num_bytes: int) -> None:
        """So many bytes more are read."""
        self._num_read += num_bytes
        self._tell(self._num_read)

    def packed(self, bytes_done: int) -> None:
        """All is read, and so many bytes are packed."""
        self._tell(self._read_bytes + bytes_done)

    def _tell(self, bytes_done: int) -> None:
        if self._progress is not None:
            self._progress(bytes_done, self._total)
