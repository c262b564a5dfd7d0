"""Headers: what is read back, and the message for each way in which a file can be wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hetero_runtime.checkpoint import read_header
from hetero_runtime.errors import CheckpointError

GOOD = {
    "b": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]},
    "a": {"dtype": "F32", "shape": [], "data_offsets": [12, 16]},
    "__metadata__": {"format": "pt"},
}


def write(path: Path, header: Any, *, data_bytes: int = 16, header_bytes: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    length = len(text) if header_bytes is None else header_bytes
    path.write_bytes(length.to_bytes(8, "little") + text + bytes(data_bytes))
    return path


def test_entries_in_file_order_with_offsets_from_the_start_of_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "model.safetensors", GOOD)
    first, second = read_header(path)
    start = path.stat().st_size - 16
    assert (first.key, first.dtype, first.shape, first.offset, first.num_bytes) == (
        "b", "BF16", (2, 3), start, 12,
    )  # fmt: skip
    assert (second.key, second.shape, second.offset, second.num_bytes) == ("a", (), start + 12, 4)
    assert first.file == path


def entry(**changes: Any) -> dict[str, Any]:
    return {"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]} | changes}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"{not json", "header is not JSON"),
        (b"[1, 2]", "header is not a JSON object"),
        (entry(dtype="F4_E2M1"), "'w' has dtype F4_E2M1, which is not one of BOOL"),
        (entry(shape=[5]), r"'w' F32\[5\] takes 20 bytes but its offsets are 0..16"),
        (entry(shape=[-4]), r"'w' F32\[-4\] takes -16 bytes"),
        (entry(data_offsets=[-4, 12]), r"its offsets are -4..12"),
        (entry(data_offsets=[0]), "entry 'w' is malformed"),
        (entry(shape="4x"), "entry 'w' is malformed"),
        ({"w": None}, "entry 'w' is malformed"),
        (entry(data_offsets=[16, 32]), r"truncated: 'w' ends at byte \d+ of a file of \d+ bytes; download"),
        (
            entry() | {"v": {"dtype": "U8", "shape": [4], "data_offsets": [12, 16]}},
            r"'w' ends at byte \d+ but 'v' begins at \d+: their bytes overlap",
        ),
    ],
)
def test_a_wrong_header_is_one_clear_error(header: Any, message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "model.safetensors", header)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_header(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"1234567", (1 << 40).to_bytes(8, "little") + b"{}"])
def test_a_file_shorter_than_its_header_is_truncated(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"truncated: it has {len(content)} bytes"):
        read_header(path)


def test_a_missing_file_says_so(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"No such file.*check the path"):
        read_header(tmp_path / "none.safetensors")


def test_headers_are_read_without_torch() -> None:
    code = "import sys, hetero_runtime.checkpoint; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": "."}, check=False).returncode == 0
