"""Lazy tensors: the same values as safetensors' own reader, and never an alias of the file."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hetero_runtime.checkpoint import read_header
from hetero_runtime.checkpoint.lazy_tensor import map_tensors
from hetero_runtime.errors import CheckpointError

TENSORS = {
    "matrix": torch.arange(12, dtype=torch.bfloat16).view(3, 4),
    "scalar": torch.tensor(2.5),
    "empty": torch.zeros(0, 3),
    "fp8": torch.linspace(-3, 3, 7).to(torch.float8_e4m3fn),
}


def test_values_shapes_and_dtypes(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "m.safetensors")
    lazy = map_tensors(read_header(tmp_path / "m.safetensors"))
    for key, tensor in TENSORS.items():
        assert lazy[key].get_shape() == list(tensor.shape)
        assert lazy[key][...].dtype == tensor.dtype
        assert torch.equal(lazy[key][...].float(), tensor.float())
    assert lazy["matrix"].get_dtype() == "BF16"
    assert torch.equal(lazy["matrix"][1:, :2], TENSORS["matrix"][1:, :2])


def test_writing_to_what_was_read_changes_nothing_else(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "m.safetensors")
    lazy = map_tensors(read_header(tmp_path / "m.safetensors"))
    lazy["matrix"][...].zero_()
    assert torch.equal(lazy["matrix"][...], TENSORS["matrix"])


def test_elements_need_not_be_aligned(tmp_path: Path) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    header += b" " * (1 - len(header) % 2)  # an odd length
    values = torch.tensor([1.5, -2.0])
    path = tmp_path / "m.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + values.numpy().tobytes())
    (entry,) = read_header(path)
    assert entry.offset % 4 != 0
    assert torch.equal(map_tensors([entry])["w"][...], values)


def test_a_file_that_went_away(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "m.safetensors")
    entries = read_header(tmp_path / "m.safetensors")
    (tmp_path / "m.safetensors").unlink()
    with pytest.raises(CheckpointError, match="cannot be mapped"):
        map_tensors(entries)


def test_nothing_is_read_but_what_is_indexed(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    large = {name: torch.zeros(4 << 20, dtype=torch.uint8) for name in ("a", "c")}
    save_file({**large, "b": torch.ones(32 << 10, dtype=torch.uint8)}, path)
    entries = read_header(path)
    lazy = map_tensors(entries)
    _drop_from_page_cache(path)
    before = _num_cached_pages(path)
    if before:
        pytest.skip("this file system keeps its files in memory")
    assert lazy["b"][...].sum() == 32 << 10
    of_b = (32 << 10) // mmap.PAGESIZE
    assert of_b <= _num_cached_pages(path) <= of_b + 2


def test_what_was_read_is_not_held_twice(tmp_path: Path) -> None:
    values = torch.arange(4 << 20, dtype=torch.int32)
    save_file({"a": values, "b": torch.ones(1)}, tmp_path / "m.safetensors")
    lazy = map_tensors(read_header(tmp_path / "m.safetensors"))
    before = _mapped_bytes()
    first = lazy["a"][...]
    assert _mapped_bytes() - before < values.nbytes // 2
    assert torch.equal(first, values)
    assert torch.equal(lazy["a"][...], values)


def _mapped_bytes() -> int:
    """Pages of files that count as this process's memory."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if "RssFile" in line]
    return int(line.split()[1]) * 1024


def _drop_from_page_cache(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def _num_cached_pages(path: Path) -> int:
    num_bytes = path.stat().st_size
    answer = (ctypes.c_ubyte * -(-num_bytes // mmap.PAGESIZE))()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapping:
        address = ctypes.c_char.from_buffer(mapping)
        found = ctypes.CDLL(None, use_errno=True).mincore(
            ctypes.c_void_p(ctypes.addressof(address)), ctypes.c_size_t(num_bytes), answer
        )
        assert found == 0, os.strerror(ctypes.get_errno())
        del address
    return sum(page & 1 for page in answer)
