"""What an expert file holds and where, without torch.

    file      |8 bytes: N|JSON, spaces to a whole page|record|record| ... |squares|checksums|order|
    records   U8  [num_records, record_bytes]   whole pages, so that one direct read brings one record
    squares   F64 [num_records, 2]              of each record: squared errors and squared weights, summed
    checksums I64 [num_records]                 crc32 of record and squares, plus WRITTEN; 0: not written yet
    order     I32 [num_records]                 the row (layer · num_experts + expert) of each record
    metadata  "format": FORMAT, "experts": JSON of ExpertFileHeader, "crc32": of that JSON

It is a safetensors file: whatever reads those can look into it. Beside the format's own rules the header must
be, byte for byte, what this module writes for its metadata, so a changed byte anywhere in it is noticed.
"""

from __future__ import annotations

import json
import math
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from hetero_runtime.checkpoint.safetensors_file import DTYPE_BYTES, LENGTH_BYTES, read_header, read_metadata
from hetero_runtime.errors import CheckpointError
from hetero_runtime.experts.record import RECORD_ALIGN

FORMAT = "hetero_runtime.experts/1"
WRITTEN = 1 << 32
"""Added to a checksum, so that none of a written record is 0."""
PACK_AGAIN = "pack it again with `hetero-runtime pack`"


class SourceFile(NamedTuple):
    """One file of the checkpoint that records come from: its name, size and digest (see `source`)."""

    name: str
    num_bytes: int
    digest: str


class FieldEntry(NamedTuple):
    """One field of the record; `dtype` in safetensors' words."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class Region(NamedTuple):
    """Part of the file: elements of `dtype`, from byte `offset` on."""

    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


class FileMap(NamedTuple):
    """Where the parts of an expert file lie."""

    records: Region
    squares: Region
    checksums: Region
    order: Region

    @property
    def file_bytes(self) -> int:
        """Bytes of the whole file."""
        return self.order.offset + self.order.num_bytes


@dataclass(frozen=True)
class ExpertFileHeader:
    """All that is known of an expert file before its first record is written."""

    model: str
    """Name of the checkpoint's folder."""
    experts: str
    """Format of the weights, in the words of `model.experts`."""
    num_layers: int
    num_experts: int
    record_bytes: int
    fields: tuple[FieldEntry, ...]
    forms: dict[str, dict[str, Any]]
    """`experts.formats.WeightForm` as a dict, by parameter."""
    order_crc32: int
    """Of the bytes of `order`."""
    sources: tuple[SourceFile, ...]
    tool_version: str
    """Of hetero_runtime."""

    @property
    def num_records(self) -> int:
        """Records of all layers."""
        return self.num_layers * self.num_experts

    def encode(self) -> bytes:
        """The header as it lies in the file, a whole number of pages."""
        described = json.dumps(asdict(self), sort_keys=True)
        tensors: dict[str, Any] = {
            "__metadata__": {
                "format": FORMAT,
                "experts": described,
                "crc32": str(zlib.crc32(described.encode())),
            }
        }
        for name, region in self._map(0)._asdict().items():
            offsets = [region.offset, region.offset + region.num_bytes]
            tensors[name] = {"dtype": region.dtype, "shape": region.shape, "data_offsets": offsets}
        text = json.dumps(tensors).encode()
        text += b" " * (-(LENGTH_BYTES + len(text)) % RECORD_ALIGN)
        return len(text).to_bytes(LENGTH_BYTES, "little") + text

    def map(self) -> FileMap:
        """Where everything lies in a file with this header."""
        return self._map(len(self.encode()))

    def _map(self, start: int) -> FileMap:
        """Part after part from byte `start` on."""
        count, regions = self.num_records, []
        for dtype, shape in (
            ("U8", (count, self.record_bytes)),
            ("F64", (count, 2)),
            ("I64", (count,)),
            ("I32", (count,)),
        ):
            region = Region(dtype, shape, start)
            regions.append(region)
            start += region.num_bytes
        return FileMap(*regions)


def read_expert_header(path: Path) -> ExpertFileHeader:
    """The header of the expert file `path`, held to the file's size.

    Raises CheckpointError: missing, no expert file, of another version, changed, or truncated.
    """
    read_header(path)
    metadata = read_metadata(path)
    if metadata.get("format") != FORMAT:
        raise CheckpointError(
            f"{path}: format is {metadata.get('format')!r}, this version reads {FORMAT!r}; {PACK_AGAIN}"
        )
    described = metadata.get("experts", "")
    if metadata.get("crc32") != str(zlib.crc32(described.encode())):
        raise CheckpointError(f"{path}: its header was changed after it was packed; {PACK_AGAIN}")
    header = _from_json(path, described)
    encoded = header.encode()
    with path.open("rb") as file:
        if file.read(len(encoded)) != encoded:
            raise CheckpointError(f"{path}: its header was changed after it was packed; {PACK_AGAIN}")
    found, expected = path.stat().st_size, header.map().file_bytes
    if found != expected:
        raise CheckpointError(f"{path}: has {found} bytes, its header says {expected}; {PACK_AGAIN}")
    return header


def _from_json(path: Path, text: str) -> ExpertFileHeader:
    try:
        values = json.loads(text)
        fields = tuple(FieldEntry(name, dtype, tuple(shape)) for name, dtype, shape in values.pop("fields"))
        sources = tuple(SourceFile(*source) for source in values.pop("sources"))
        return ExpertFileHeader(fields=fields, sources=sources, **values)
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{path}: its description cannot be read ({error}); {PACK_AGAIN}") from error
