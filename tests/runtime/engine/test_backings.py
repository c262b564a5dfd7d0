"""Wherever experts live, the engine says the same; a disk that fails costs a request, not the engine."""

from __future__ import annotations

import io
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console

from hetero_runtime.cli.summary import summary_table
from hetero_runtime.config import load_config
from hetero_runtime.engine import Engine
from hetero_runtime.errors import BudgetError, CheckpointError, ConfigError, RequestError
from hetero_runtime.expert_file.pack import pack
from hetero_runtime.expert_file.stored import StoredRecords
from hetero_runtime.planned import decide
from hetero_runtime.tiers import reading
from hetero_runtime.tiers.governor import Governor
from hetero_runtime.tiers.pressure import Pressure
from tests.runtime.engine.conftest import MakeCheckpoint
from tests.runtime.engine.rest import assert_at_rest, engine_threads, num_open_files
from tests.runtime.engine.serving import OPTIONS, PROMPTS

MODEL = "Qwen3Moe"
BACKINGS = ("direct", "mmap", "swap")
TOP_K, NUM_ROUTED = 4, 48

Packed = Callable[[str], Path]


@pytest.fixture(scope="session")
def packed(checkpoint: MakeCheckpoint) -> Packed:
    """`packed(name)`: the folder of a tiny model with its expert file beside it."""

    @cache
    def build(name: str) -> Path:
        folder = checkpoint(name)
        pack(decide(load_config({"model": {"path": str(folder)}})).config, expert_file_of(folder))
        return folder

    return build


@pytest.fixture(autouse=True)
def _nothing_is_left(packed: Packed) -> Iterator[None]:
    """After a test no thread and no open file is left."""
    packed(MODEL)
    num_files = num_open_files()
    yield
    assert engine_threads() == []
    assert num_open_files() == num_files


@pytest.fixture(autouse=True)
def _much_swap(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without swap is refused; tests of what is said swap nothing out."""
    free = psutil.swap_memory()._replace(free=1 << 40)
    monkeypatch.setattr(psutil, "swap_memory", lambda: free)


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "RETRY_PAUSES_S", (0.0, 0.0, 0.0))


def expert_file_of(folder: Path) -> Path:
    return folder.with_name(folder.name + ".experts.safetensors")


def load(folder: Path, backing: str, **overrides: Any) -> Engine:
    memory = {"backing": backing, "residency": 0.25, **overrides.get("memory", {})}
    if "slabs" in memory:
        del memory["residency"]
    return Engine.load(folder, device="cpu", execution={"max_rows": 2}, **{**overrides, "memory": memory})


def say(engine: Engine, prompt: int = 0) -> tuple[int, ...]:
    return engine.generate(PROMPTS[prompt], **OPTIONS).token_ids


@pytest.fixture(scope="module")
def expected(checkpoint: MakeCheckpoint) -> Callable[[str, int], tuple[int, ...]]:
    """What an engine says that holds everything in memory."""

    @cache
    def ask(name: str, prompt: int) -> tuple[int, ...]:
        with load(checkpoint(name), "ram", memory={"slabs": "all"}) as engine:
            return say(engine, prompt)

    return ask


@pytest.mark.parametrize("slabs", [TOP_K, 12, "all"])
@pytest.mark.parametrize("backing", BACKINGS)
def test_every_backing_says_the_same(
    backing: str, slabs: int | str, packed: Packed, expected: Callable[[str, int], tuple[int, ...]]
) -> None:
    with load(packed(MODEL), backing, memory={"slabs": slabs}) as engine:
        for prompt in range(2):
            assert say(engine, prompt) == expected(MODEL, prompt)
        assert_at_rest(engine)


@pytest.mark.parametrize("name", ["GptOss", "DeepseekV3"])
@pytest.mark.parametrize("backing", ["direct", "mmap"])
def test_other_records_too(
    backing: str, name: str, packed: Packed, expected: Callable[[str, int], tuple[int, ...]]
) -> None:
    with load(packed(name), backing) as engine:
        assert say(engine) == expected(name, 0)


@pytest.mark.parametrize(
    "overrides",
    [
        {"memory": {"pool": "per_layer"}},
        {"memory": {"pinned_prefix": 1}},
        {"prefetch": {"schedule": "edf", "extra": 4}, "eviction": {"policy": "belady"}},
        {"prefetch": {"schedule": "none"}, "prediction": {"predictor": "none"}},
    ],
    ids=["per_layer", "pinned", "forecasts", "no prefetch"],
)
def test_policies_change_no_token(
    overrides: dict[str, Any], packed: Packed, expected: Callable[[str, int], tuple[int, ...]]
) -> None:
    with load(packed(MODEL), "direct", **overrides) as engine:
        assert say(engine) == expected(MODEL, 0)
        engine.check()
        if "extra" in overrides.get("prefetch", {}):
            assert engine.stats().decode.cache.prefetches > 0, "a disk overlaps, on device cpu too"


def test_the_start_reads_the_experts_used_and_nothing_else(packed: Packed) -> None:
    nothing_ahead = {"prefetch": {"schedule": "none"}, "prediction": {"predictor": "none"}}
    with load(packed(MODEL), "direct", memory={"slabs": "all"}, **nothing_ahead) as engine:
        assert engine.stats().disk.reads == 0
        engine.generate(PROMPTS[0], max_tokens=1, ignore_eos=True)
        stats = engine.stats()
        assert stats.disk.reads == stats.prefill.cache.required < NUM_ROUTED
        assert stats.disk.num_bytes == stats.disk.reads * engine._parts.store.stored_bytes
        assert stats.bank_bytes == 0
        say(engine)
        assert engine.stats().disk.reads <= NUM_ROUTED  # what is here is not read again


def test_serving_writes_nothing_and_locks_nothing(packed: Packed) -> None:
    with load(packed(MODEL), "direct") as engine:
        say(engine)
        before = psutil.Process().io_counters().write_bytes
        for prompt in range(3):
            say(engine, prompt)
        assert psutil.Process().io_counters().write_bytes == before, "an SSD wears out by writes"
        status = Path("/proc/self/status").read_text(encoding="ascii")
        assert re.search(r"^VmLck:\s+0 kB$", status, re.MULTILINE), "no memory is locked"


# ---- disks that fail


class Faults:
    """What reads of records do: `fail(n)` makes the next n raise, `spoil()` changes a byte of every one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._num_failing = 0
        self._guard = threading.Lock()
        self.is_spoiled, self.delay = False, threading.Event()
        read = StoredRecords.read

        def failing(stored: StoredRecords, position: int, into: Any, *, is_checked: bool = True) -> None:
            with self._guard:
                self._num_failing -= 1
                if self._num_failing >= 0:
                    raise CheckpointError(f"reading record {position} failed: Input/output error")
            read(stored, position, into, is_checked=is_checked)
            if self.is_spoiled:
                into[7] ^= 1

        monkeypatch.setattr(StoredRecords, "read", failing)

    def fail(self, num_reads: int) -> None:
        with self._guard:
            self._num_failing = num_reads


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    return Faults(monkeypatch)


def test_a_few_failing_reads_are_nobodys_business(
    faults: Faults, packed: Packed, expected: Callable[[str, int], tuple[int, ...]]
) -> None:
    with load(packed(MODEL), "direct") as engine:
        faults.fail(3)
        assert say(engine) == expected(MODEL, 0)
        assert engine.stats().disk.retries == 3


def test_a_broken_disk_fails_the_request_and_the_engine_serves_on(
    faults: Faults, packed: Packed, expected: Callable[[str, int], tuple[int, ...]]
) -> None:
    with load(packed(MODEL), "direct") as engine:
        assert say(engine) == expected(MODEL, 0)
        for _ in range(3):
            faults.fail(10_000)
            with pytest.raises(RequestError, match=r"expert \d+ of MoE layer \d .*Input/output error"):
                say(engine, 1)
            faults.fail(0)
            assert_at_rest(engine)
            assert say(engine, 1) == expected(MODEL, 1)
        assert_at_rest(engine)
        parts = engine._parts
    assert parts.slabs.memory.numel() == 0


def test_a_flipped_byte_is_no_answer(packed: Packed, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(packed(MODEL), folder)
    file = expert_file_of(folder)
    shutil.copy(expert_file_of(packed(MODEL)), file)
    with file.open("r+b") as opened:
        opened.seek(file.stat().st_size // 2)
        byte = opened.read(1)
        opened.seek(-1, 1)
        opened.write(bytes([byte[0] ^ 4]))
    for backing in ("direct", "mmap"):
        with load(folder, backing) as engine, pytest.raises(RequestError, match="is damaged: its checksum"):
            engine.generate(list(range(10, 200)), **OPTIONS)  # a prompt that takes all experts


def test_a_file_cut_while_it_is_read(packed: Packed, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(packed(MODEL), folder)
    file = expert_file_of(folder)
    shutil.copy(expert_file_of(packed(MODEL)), file)
    with load(folder, "direct") as engine:
        with file.open("r+b") as opened:
            opened.truncate(file.stat().st_size // 8)
        with pytest.raises(RequestError, match="truncated since it was opened"):
            say(engine)
        assert_at_rest(engine)


# ---- memory that runs short


def test_the_cache_gives_slabs_back_and_takes_them_again(
    packed: Packed, expected: Callable[[str, int], tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    free, now = [1 << 40], [0.0]
    with load(packed(MODEL), "direct", memory={"slabs": 24}) as engine:
        governor = engine._parts.orchestrator._governor
        assert isinstance(governor, Governor)
        monkeypatch.setattr(governor, "_read", lambda: Pressure(free[0], 0.0))
        monkeypatch.setattr(governor, "_clock", lambda: now[0])
        assert say(engine) == expected(MODEL, 0)
        free[0] = 0
        now[0] += 100
        assert say(engine, 1) == expected(MODEL, 1)
        assert governor.num_given_back == 24 - TOP_K
        assert engine._parts.cache.num_available(0) == TOP_K
        assert_at_rest(engine)
        free[0] = 1 << 40
        for _ in range(12):
            now[0] += 100
            assert say(engine, 2) == expected(MODEL, 2)
        assert governor.num_given_back == 0
        assert_at_rest(engine)


# ---- what is refused


def test_no_expert_file(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(checkpoint(MODEL), folder)
    with pytest.raises(ConfigError, match=r"does not exist; write it once with `hetero-runtime pack .*--out"):
        load(folder, "direct")


def test_an_expert_file_of_another_model(packed: Packed) -> None:
    other = str(expert_file_of(packed("GptOss")))
    with pytest.raises(CheckpointError, match="it was packed from another model"):
        load(packed(MODEL), "direct", memory={"expert_file": other})


def test_swap_that_is_not_there(packed: Packed, monkeypatch: pytest.MonkeyPatch) -> None:
    none = psutil.swap_memory()._replace(free=0)
    monkeypatch.setattr(psutil, "swap_memory", lambda: none)
    with pytest.raises(BudgetError, match=r"disk, load: needs .* of 0 B allowed.*free swap \(swapon\)"):
        load(packed(MODEL), "swap")


def test_quantised_experts_are_read_as_they_were_packed(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(checkpoint(MODEL), folder)
    int8: dict[str, Any] = {"model": {"path": str(folder), "experts": "int8"}}
    pack(decide(load_config(int8)).config, expert_file_of(folder))
    with pytest.raises(ConfigError, match=r"was packed with model.experts: int8, and here it is checkpoint"):
        load(folder, "direct")
    said = []
    for backing in ("ram", "direct", "mmap"):
        with load(folder, backing, model={"experts": "int8"}) as engine:
            said.append(say(engine))
            assert engine._parts.store.errors is not None
    assert said[0] == said[1] == said[2]


def test_the_table_after_a_run_tells_what_was_read(packed: Packed) -> None:
    with load(packed(MODEL), "direct") as engine:
        completion = engine.generate(PROMPTS[0], **OPTIONS)
        stats = engine.stats()
        written = io.StringIO()
        Console(file=written, width=120).print(summary_table(stats, completion.timings))
    found = re.search(r"records read, from below host memory +([\d,]+), [\d.]+ MB at", written.getvalue())
    assert found is not None
    assert found[1] == f"{stats.disk.reads:,}"
    assert "host bank" not in written.getvalue()
