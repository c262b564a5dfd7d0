"""Packing: the order of the file, interruptions, full disks, and what is left of them."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from hetero_runtime.cli import app
from hetero_runtime.errors import CheckpointError, ConfigError, DeviceError, RequestError
from hetero_runtime.expert_file import ExpertFile
from hetero_runtime.expert_file.header import read_expert_header
from hetero_runtime.expert_file.part import PartFile
from hetero_runtime.experts.store import load_store
from hetero_runtime.trace.file import write_trace
from hetero_scheduler.trace import Trace
from tests.architectures import build_checkpoint
from tests.runtime.expert_file.packing import flip, pack_to, records_of
from tests.runtime.experts.loading import split
from tests.runtime.trace.info import INFO

KILLED_AFTER = 20


def part_of(out: Path) -> Path:
    return out.with_name(out.name + ".part")


def interrupt(folder: Path, out: Path) -> None:
    """Pack in a process that is killed, by a signal that nothing can catch, when 20 records are written."""
    script = textwrap.dedent(
        f"""
        import os, signal, sys
        from pathlib import Path
        from tests.runtime.expert_file.packing import pack_to

        def kill(done, total):
            if done >= total * {KILLED_AFTER} // 48:
                os.kill(os.getpid(), signal.SIGKILL)
        pack_to(Path(sys.argv[1]), Path(sys.argv[2]), progress=kill)
        """
    )
    paths = os.pathsep.join([".", "gpu", "scheduler", "cpu_kernels"])
    result = subprocess.run(
        [sys.executable, "-c", script, str(folder), str(out)],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == -signal.SIGKILL, result.stderr


@pytest.fixture(scope="session")
def interrupted(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """What a killed run left."""
    out = tmp_path_factory.mktemp("killed") / "a.experts"
    interrupt(folder, out)
    assert not out.exists()
    return part_of(out).read_bytes()


@pytest.fixture
def left(interrupted: bytes, tmp_path: Path) -> Path:
    """The file whose part a killed run left."""
    out = tmp_path / "a.experts"
    part_of(out).write_bytes(interrupted)
    return out


def test_a_killed_run_is_gone_on_with(folder: Path, packed: Path, left: Path) -> None:
    result = pack_to(folder, left)
    assert KILLED_AFTER <= result.num_resumed < result.num_records == 48
    assert left.read_bytes() == packed.read_bytes()
    assert os.listdir(left.parent) == [left.name]


def test_what_was_damaged_meanwhile_is_written_anew(folder: Path, packed: Path, left: Path) -> None:
    part = part_of(left)
    at = read_expert_header(part).map()
    written = np.frombuffer(part.read_bytes()[at.checksums.offset : at.order.offset], dtype=np.int64) != 0
    flip(part, at.records.offset + int(np.flatnonzero(written)[3]) * at.records.shape[1] + 77)
    result = pack_to(folder, left)
    assert result.num_resumed == written.sum() - 1
    assert left.read_bytes() == packed.read_bytes()


def test_a_part_is_no_expert_file(left: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"is unfinished: \d+ of 48 records were never written; pack it"
    ):
        ExpertFile.open(part_of(left))


def test_a_part_of_another_state_of_the_model_is_refused(left: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = build_checkpoint("Qwen3Moe", tmp_path / "other", dtype=torch.bfloat16, seed=1)
    before = part_of(left).read_bytes()
    with pytest.raises(RequestError, match=r"a\.experts\.part: was begun from another model or state of it"):
        pack_to(other, left)
    assert part_of(left).read_bytes() == before


def test_a_process_killed_before_the_first_record_is_no_obstacle(
    folder: Path, packed: Path, left: Path
) -> None:
    part_of(left).write_bytes(b"")
    assert pack_to(folder, left).num_resumed == 0
    assert left.read_bytes() == packed.read_bytes()


def test_two_do_not_write_one_file(folder: Path, packed: Path, tmp_path: Path) -> None:
    header = read_expert_header(packed)
    out = tmp_path / "a.experts"
    first = PartFile(out, header, np.arange(48, dtype=np.int32))
    with pytest.raises(RequestError, match=r"a\.experts\.part: another process is writing it"):
        pack_to(folder, out)
    first.close()
    pack_to(folder, out)


def test_a_file_that_is_there_is_not_touched(folder: Path, own: Path) -> None:
    before = own.read_bytes()
    with pytest.raises(RequestError, match=r"own\.experts: exists already; remove it, or name another file"):
        pack_to(folder, own)
    assert own.read_bytes() == before


def test_a_full_disk_leaves_nothing(folder: Path, packed: Path, tmp_path: Path, monkeypatch) -> None:
    num_bytes = packed.stat().st_size
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=100, f_frsize=4096))
    with pytest.raises(
        DeviceError, match=rf"a\.experts: needs .* \({num_bytes:,} bytes\).*409,600 bytes; No space"
    ):
        pack_to(folder, tmp_path / "a.experts")
    assert os.listdir(tmp_path) == []


def test_a_limit_on_the_size_of_files_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
    try:
        with pytest.raises(DeviceError, match=r"a\.experts: needs .* free .*; File too large\).*ulimit -f"):
            pack_to(folder, tmp_path / "a.experts")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert os.listdir(tmp_path) == []


def test_a_disk_that_is_full_all_of_a_sudden_leaves_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a file system copies on write, and cannot keep what it promised."""
    pwrite = os.pwrite

    def fill(descriptor: int, data: memoryview, offset: int) -> int:
        if offset > 200_000 and len(data) > 10_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", fill)
    with pytest.raises(DeviceError, match=r"a\.experts: needs .*No space left on device"):
        pack_to(folder, tmp_path / "a.experts")
    assert os.listdir(tmp_path) == []


def test_a_folder_that_is_not_there_is_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match=r"a\.experts\.part: cannot be written \(No such file"):
        pack_to(folder, tmp_path / "none" / "a.experts")


def test_a_failing_read_keeps_what_is_written(
    folder: Path, packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "a.experts"

    def fail(done: int, total: int) -> None:
        if done * 2 > total:
            raise CheckpointError("the disk failed")

    with pytest.raises(CheckpointError, match="the disk failed"):
        pack_to(folder, out, progress=fail)
    assert pack_to(folder, out).num_resumed >= 24
    assert out.read_bytes() == packed.read_bytes()


def company_trace(path: Path, *, num_experts: int = 16) -> Path:
    """Experts e and e + 8 are always chosen together."""
    first = np.random.default_rng(0).integers(0, num_experts // 2, (200, 3, 1))
    topk = np.concatenate([first, first + num_experts // 2], axis=2)
    trace = Trace(
        logits=np.zeros((200, 3, num_experts), dtype=np.float16),
        topk=topk.astype(np.int16),
        tokens=np.zeros(200, dtype=np.int32),
        bounds=np.array([0, 200]),
    )
    write_trace(path, trace, INFO)
    return path


def test_experts_that_a_trace_uses_together_are_neighbours(
    folder: Path, packed: Path, tmp_path: Path
) -> None:
    out = tmp_path / "a.experts"
    pack_to(folder, out, trace=company_trace(tmp_path / "t.safetensors"))
    with ExpertFile.open(out) as file, ExpertFile.open(packed) as plain:
        order = [key.expert for key in file.keys_in_order()]
        assert sorted(order) == sorted(list(range(16)) * 3)
        assert {abs(a - b) for a, b in zip(order[::2], order[1::2], strict=True)} == {8}
        assert [file.position(key) for key in file.keys_in_order()] == list(range(48))
        assert np.array_equal(records_of(file), records_of(plain))
        file.verify()


def test_a_trace_of_another_model_is_refused(folder: Path, tmp_path: Path) -> None:
    trace = company_trace(tmp_path / "t.safetensors", num_experts=8)
    with pytest.raises(ConfigError, match="recorded from 3 layers × 8 experts, this model has 3 × 16"):
        pack_to(folder, tmp_path / "a.experts", trace=trace)


def test_the_command_reports_what_it_wrote(folder: Path, packed: Path, tmp_path: Path) -> None:
    out = tmp_path / "a.experts"
    result = CliRunner().invoke(
        app, ["pack", str(folder), "--out", str(out), "--set", "device=cpu", "--json"]
    )
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout.splitlines()[-1])
    assert (report["path"], report["num_bytes"]) == (str(out), packed.stat().st_size)
    assert (report["num_records"], report["num_resumed"], report["errors"]) == (48, 0, None)
    verify = ["pack", str(folder), "--out", str(out), "--set", "device=cpu", "--verify"]
    whole = CliRunner().invoke(app, [*verify, "--json"])
    assert json.loads(whole.stdout.splitlines()[-1])["is_whole"] is True
    assert "all 48 records are whole" in whole.stderr
    flip(out, read_expert_header(out).map().records.offset + 50_000)
    damaged = CliRunner().invoke(app, verify)
    assert damaged.exit_code == 2
    assert "1 of 48 records are damaged" in damaged.stderr
    again = CliRunner().invoke(app, ["pack", str(folder), "--out", str(out), "--set", "device=cpu"])
    assert again.exit_code == 2
    assert "exists already" in again.stderr


@pytest.mark.parametrize("experts", ["bf16", "fp8", "int8", "int4"])
def test_quantised_experts_are_those_of_an_engine_that_quantises(
    experts: str, folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "a.experts"
    result = pack_to(folder, out, f"model.experts={experts}")
    store = load_store(split(folder).experts, threads=2, experts=experts)  # type: ignore[arg-type]
    with ExpertFile.open(out) as file:
        assert file.header.experts == experts
        assert (file.table.layout, file.table.forms) == (store.layout, store.forms)
        assert np.array_equal(records_of(file).reshape(-1), store.records.numpy())
        assert result.errors == file.errors() == store.errors
        file.verify()
    store.close()


def test_a_part_of_another_format_is_refused(folder: Path, left: Path) -> None:
    with pytest.raises(RequestError, match=r"a\.experts\.part: was begun .*with other settings"):
        pack_to(folder, left, "model.experts=int8")
