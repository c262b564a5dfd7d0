"""What an expert file gives, and how it says that it is not what it should be."""

from __future__ import annotations

import errno
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from hetero_runtime.checkpoint import Checkpoint
from hetero_runtime.errors import CheckpointError
from hetero_runtime.expert_file import ExpertFile
from hetero_runtime.expert_file import header as header_module
from hetero_runtime.expert_file.header import read_expert_header
from hetero_runtime.expert_file.stored import page_aligned
from hetero_runtime.experts.record import RECORD_ALIGN
from hetero_runtime.experts.sources import plan_experts
from hetero_scheduler.keys import ExpertKey
from tests.architectures import build_checkpoint
from tests.runtime.expert_file.packing import flip, records_of
from tests.runtime.experts.loading import load, split


def test_records_are_those_of_the_store(folder: Path, packed: Path) -> None:
    store = load(folder)
    with ExpertFile.open(packed) as file:
        assert file.table == plan_experts(split(folder).experts).table
        assert np.array_equal(records_of(file).reshape(-1), store.records.numpy())
        assert file.errors() is None
    store.close()


def test_each_record_is_one_aligned_read(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[tuple[int, int]] = []
    preadv = os.preadv

    def spy(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        reads.append((offset, len(buffers[0])))
        return preadv(descriptor, buffers, offset)

    with ExpertFile.open(packed) as file:
        record_bytes = file.table.layout.record_bytes
        into = page_aligned(1, record_bytes)[0]
        monkeypatch.setattr(os, "preadv", spy)
        file.read(ExpertKey(1, 5), into)
    assert [size for _, size in reads] == [record_bytes]
    assert all(offset % RECORD_ALIGN == 0 for offset, _ in reads)


def test_memory_out_of_a_disks_reach_is_filled_by_way_of_a_buffer(
    packed: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    preadv, num_refused = os.preadv, 0
    with ExpertFile.open(packed) as file:
        expected = records_of(file)
        mapped = page_aligned(file.table.num_records, file.table.layout.record_bytes)

        def read(descriptor: int, buffers: list[memoryview], offset: int) -> int:
            nonlocal num_refused
            if np.shares_memory(np.frombuffer(buffers[0], np.uint8), mapped):
                num_refused += 1
                raise OSError(errno.EFAULT, os.strerror(errno.EFAULT))
            return preadv(descriptor, buffers, offset)

        monkeypatch.setattr(os, "preadv", read)
        for row, into in enumerate(mapped):
            file.read(file.table.key(row), into)
        assert np.array_equal(mapped, expected)
    assert num_refused == 1, "what was learned is not asked again"
    assert [record.message.partition(": ")[2] for record in caplog.records] == [
        "memory of the device is out of the disk's reach: copied there"
    ]


def test_where_direct_reads_are_refused_it_is_read_all_the_same(packed: Path) -> None:
    shared = Path("/dev/shm")
    if not os.access(shared, os.W_OK):
        pytest.skip("no tmpfs to write to")
    copy = Path(shutil.copy(packed, shared / f"hetero-test-{os.getpid()}.experts"))
    try:
        with ExpertFile.open(packed) as file, ExpertFile.open(copy) as other:
            assert np.array_equal(records_of(file), records_of(other))
            other.verify()
    finally:
        copy.unlink()


def test_many_threads_and_files_share_it(packed: Path) -> None:
    with ExpertFile.open(packed) as one, ExpertFile.open(packed) as two, ThreadPoolExecutor(8) as pool:
        expected = records_of(one)
        for found in pool.map(records_of, [one, two] * 4):
            assert np.array_equal(found, expected)


def test_anything_that_reads_safetensors_can_look_into_it(packed: Path) -> None:
    with ExpertFile.open(packed) as file, safe_open(packed, "numpy") as tensors:
        assert np.array_equal(tensors.get_tensor("records"), records_of(file))


def test_a_closed_file_may_be_closed_again(packed: Path) -> None:
    num_open = len(os.listdir("/proc/self/fd"))
    file = ExpertFile.open(packed)
    file.close()
    file.close()
    assert len(os.listdir("/proc/self/fd")) == num_open


def test_verify_tells_how_far_it_is(packed: Path) -> None:
    calls: list[tuple[int, int]] = []
    with ExpertFile.open(packed) as file:
        file.verify(threads=2, progress=lambda done, total: calls.append((done, total)))
        assert calls == sorted(calls) and calls[-1] == (file.table.num_bytes, file.table.num_bytes)


@pytest.mark.parametrize("part", ["records", "squares", "checksums"])
def test_a_flipped_bit_is_found_and_its_record_named(part: str, own: Path) -> None:
    with ExpertFile.open(own) as file:
        position, region = file.position(ExpertKey(1, 5)), getattr(file.header.map(), part)
    row_bytes = region.num_bytes // region.shape[0]
    flip(own, region.offset + position * row_bytes + row_bytes // 3)
    with ExpertFile.open(own) as file:
        into = page_aligned(1, file.table.layout.record_bytes)[0]
        file.read(ExpertKey(1, 4), into)
        with pytest.raises(
            CheckpointError, match=rf"own\.experts: record {position}, at byte \d+, is damaged"
        ):
            file.read(ExpertKey(1, 5), into)
        file.read(ExpertKey(1, 5), into, is_checked=False)
        with pytest.raises(CheckpointError, match="1 of 48 records are damaged: expert 5 of layer 1; check"):
            file.verify()


def test_a_flipped_bit_of_the_order_is_found(own: Path) -> None:
    flip(own, read_expert_header(own).map().order.offset + 9)
    with pytest.raises(CheckpointError, match=r"own\.experts: the order of its records was changed; pack it"):
        ExpertFile.open(own)


def test_any_flipped_bit_of_the_header_is_found(own: Path) -> None:
    for offset in range(0, read_expert_header(own).map().records.offset, 7):
        flip(own, offset)
        with pytest.raises(CheckpointError, match=r"own\.experts"):
            ExpertFile.open(own)
        flip(own, offset)
    ExpertFile.open(own).close()


@pytest.mark.parametrize("left", [0, 5, 5000, -100_000, -1])
def test_a_truncated_file_is_refused(left: int, own: Path) -> None:
    os.truncate(own, left if left >= 0 else own.stat().st_size + left)
    with pytest.raises(CheckpointError, match=r"own\.experts: .*(truncated|bytes)"):
        ExpertFile.open(own)


def test_a_file_with_more_behind_it_is_refused(own: Path) -> None:
    with own.open("ab") as file:
        file.write(b"more")
    with pytest.raises(
        CheckpointError, match=r"own\.experts: has \d+ bytes, its header says \d+; pack it again"
    ):
        ExpertFile.open(own)


def test_a_file_truncated_while_it_is_open_is_named(own: Path) -> None:
    with ExpertFile.open(own) as file:
        os.truncate(own, read_expert_header(own).map().records.offset + 40_000)
        with pytest.raises(CheckpointError, match=r"own\.experts: ends at byte \d+, inside record 47"):
            file.read(ExpertKey(2, 15), page_aligned(1, file.table.layout.record_bytes)[0])


def test_a_failing_disk_is_named(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(5, "Input/output error")

    with ExpertFile.open(packed) as file:
        into = page_aligned(1, file.table.layout.record_bytes)[0]
        monkeypatch.setattr(os, "preadv", fail)
        with pytest.raises(CheckpointError, match=r"record 3 at byte \d+ failed: Input/output error"):
            file.read(ExpertKey(0, 3), into)


def test_what_is_no_expert_file_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="none: cannot be read"):
        ExpertFile.open(tmp_path / "none")
    shard = next(folder.glob("*.safetensors"))
    with pytest.raises(
        CheckpointError, match=r"format is 'pt', this version reads 'hetero_runtime\.experts/1'"
    ):
        ExpertFile.open(shard)


def test_another_version_is_refused(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(header_module, "FORMAT", "hetero_runtime.experts/2")
    with pytest.raises(
        CheckpointError,
        match=r"format is 'hetero_runtime\.experts/1', this version reads '.*/2'; pack it again",
    ):
        ExpertFile.open(own)


def test_the_model_that_it_was_packed_from_is_accepted_wherever_it_lies(
    folder: Path, packed: Path, tmp_path: Path
) -> None:
    moved = Path(shutil.copytree(folder, tmp_path / "moved", copy_function=shutil.copyfile))
    with ExpertFile.open(packed) as file:
        for place in (folder, moved):
            file.check_model(Checkpoint.open(place), plan_experts(split(place).experts).table)


def test_another_model_is_refused(packed: Path, tmp_path: Path) -> None:
    other = build_checkpoint("Olmoe", tmp_path, dtype=torch.bfloat16)
    with ExpertFile.open(packed) as file:
        narrower = replace(file.table, num_experts=8)
        with pytest.raises(
            CheckpointError, match=r"holds 3 layers × 16 experts of .*has 3 layers × 8 experts"
        ):
            file.check_model(Checkpoint.open(other), narrower)
        with pytest.raises(CheckpointError, match=r"was packed from another model than .*: from 3 files of"):
            file.check_model(Checkpoint.open(other), file.table)


def test_a_changed_checkpoint_makes_it_stale(packed: Path, tmp_path: Path) -> None:
    changed = build_checkpoint("Qwen3Moe", tmp_path, dtype=torch.bfloat16)
    shards = sorted(changed.glob("*.safetensors"))
    table = plan_experts(split(changed).experts).table
    with ExpertFile.open(packed) as file:
        file.check_model(Checkpoint.open(changed), table)
        shards[1].write_bytes(shards[1].read_bytes()[:-2] + b"\x00\x3f")
        with pytest.raises(
            CheckpointError, match=rf"is stale: {shards[1].name} of .* changed since it was pack"
        ):
            file.check_model(Checkpoint.open(changed), table)
