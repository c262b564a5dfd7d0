"""The expert store: every routed expert of a model as one record in one host bank.

checkpoint ──reads, sorted by file and offset──► threads ──► bank: layer 0: |rec 0|rec 1|...|
                                                                   layer 1: |rec 0|rec 1|...|

For a device behind a link the records may be packed once they are all there (`packing`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, Protocol

import torch

from hetero_gpu.packed import PackedLayout
from hetero_gpu.packed.reference import unpack_reference
from hetero_runtime.config.tree import ExpertsFormat
from hetero_runtime.experts.bank import HostBank
from hetero_runtime.experts.base import ExpertStore
from hetero_runtime.experts.extent_reader import ReadPath
from hetero_runtime.experts.filling import Filling, make_filling
from hetero_runtime.experts.mapped_bank import MappedBank
from hetero_runtime.experts.packing import pack_bank, packing_of
from hetero_runtime.experts.quantize import make_quantizer
from hetero_runtime.experts.sources import ExpertsModule, plan_experts
from hetero_runtime.experts.table import RecordTable
from hetero_runtime.no_room import no_room_for
from hetero_runtime.tiers.base import RecordSource
from hetero_runtime.tiers.sources import BankPages, PagedRecords
from hetero_scheduler.keys import ExpertKey

if TYPE_CHECKING:
    from hetero_gpu.host_memory import Registration

log = logging.getLogger(__name__)

REGISTER_BYTES = 1 << 30
"""About how much is registered with CUDA in one call; rounded to whole records."""


BankForm = Literal["plain", "packed", "swappable", "mapped"]
"""plain: as slabs have records. packed: see `packing`. swappable: plain, in small pages, and read one record
at a time, so that the system can swap out what is not read. mapped: plain, and slabs at the same time: the
device computes from them."""


class Progress(Protocol):
    """Called on the loading thread after every extent."""

    def __call__(self, bytes_done: int, bytes_total: int, /) -> None:
        """`bytes_total` is the same in every call."""


class BankStore(ExpertStore):
    """All routed experts in host memory, in the order of their keys."""

    def __init__(
        self,
        table: RecordTable,
        bank: HostBank | MappedBank,
        *,
        source: RecordSource | None = None,
        packing: PackedLayout | None = None,
        errors: list[float] | None = None,
    ) -> None:
        super().__init__(table, source=source, packing=packing, errors=errors)
        self._bank = bank

    @property
    def bank_bytes(self) -> int:
        return self._bank.num_bytes

    @property
    def is_registered(self) -> bool:
        """Whether CUDA can copy from the records without staging."""
        return self._bank.registration is not None and self._bank.registration.kind == "registered"

    @property
    def records(self) -> torch.Tensor:
        """All records in the order of their keys, uint8 `[bank_bytes]`: a view of the bank."""
        return self._bank.bytes

    @property
    def records_on_device(self) -> torch.Tensor:
        """A mapped bank as the device reads it: uint8 `[num_records, record_bytes]`, a view."""
        assert isinstance(self._bank, MappedBank), "the device reads only a mapped bank where it lies"
        return self._bank.device_bytes.view(self.table.num_records, -1)

    def record(self, key: ExpertKey) -> torch.Tensor:
        """One expert as the bank has it: uint8 `[stored_bytes]`, a view."""
        start = self.table.row(key) * self.stored_bytes
        return self._bank.bytes[start : start + self.stored_bytes]

    def plain_record(self, key: ExpertKey) -> torch.Tensor:
        """One expert as a slab has it: uint8 `[record_bytes]`; a view, or of a packed record a copy."""
        if self.packing is None:
            return self.record(key)
        return torch.from_numpy(unpack_reference(self.record(key).numpy(), self.packing))

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
    form: BankForm = "plain",
    experts: ExpertsFormat = "checkpoint",
) -> BankStore:
    """Read all routed experts (see `hf.conversion.split_checkpoint`) with `threads` threads.

    `read_path`: None measures and chooses. `form`: how they lie in memory; what cannot be packed stays plain,
    and the log says so. `experts`: the format of the records. One expert is compared with what transformers'
    own operations make of it. Raises CheckpointError (bad checkpoint, failing read), ConfigError (experts
    that cannot be written so) or DeviceError (no room), and then leaves nothing behind.
    """
    plan = plan_experts(modules)
    filling = make_filling(plan, make_quantizer(plan, experts), read_path)
    return fill_store(filling, threads=threads, progress=progress, form=form)


def fill_store(
    filling: Filling, *, threads: int, progress: Progress | None = None, form: BankForm = "plain"
) -> BankStore:
    """A store whose bank `filling` fills; otherwise as `load_store`."""
    table = filling.table
    packing = packing_of(table.layout) if form == "packed" else None
    bank = _make_bank(table, form)
    source = None
    if form == "swappable":
        assert isinstance(bank, HostBank), "a mapped bank is never swapped out"
        source = PagedRecords(BankPages(bank), table.layout.record_bytes, table.row)
    work = _Work(progress, filling.read_bytes, bank.num_bytes if packing is not None else 0)
    try:
        filling.fill(bank, threads=threads, read=work.read)
        if packing is not None and not _is_packed(bank, packing, threads=threads, work=work):
            packing = None
        store = BankStore(table, bank, source=source, packing=packing, errors=filling.errors)
        filling.check(store.plain_record)
    except BaseException:
        bank.close()
        raise
    return store


def _make_bank(table: RecordTable, form: BankForm) -> HostBank | MappedBank:
    if form == "mapped":
        return MappedBank(table.num_bytes)
    return HostBank(table.num_bytes, has_huge_pages=form != "swappable")


def _is_packed(bank: HostBank | MappedBank, packing: PackedLayout, *, threads: int, work: _Work) -> bool:
    """Pack the bank, or say why it stays plain."""
    assert isinstance(bank, HostBank), "what a device computes from is never packed"
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
