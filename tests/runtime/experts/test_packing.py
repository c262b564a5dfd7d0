"""A bank packed in place: each record with any number of threads; memory given back; nothing half done."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
import transformers

from hetero_gpu.packed import PackedLayout
from hetero_gpu.packed.reference import pack_reference
from hetero_runtime.errors import DeviceError
from hetero_runtime.experts import packing as packing_module
from hetero_runtime.experts.bank import HostBank
from hetero_runtime.experts.packing import pack_bank, packing_of
from hetero_runtime.experts.record import RecordLayout
from hetero_runtime.experts.store import BankStore, load_store
from hetero_scheduler.keys import ExpertKey
from tests.gpu.packed.records import as_bytes, weights
from tests.runtime.experts.loading import rewrite, split

PACKING = PackedLayout(24576)


def filled(num_records: int, packing: PackedLayout = PACKING) -> HostBank:
    bank = HostBank(num_records * packing.plain_bytes)
    for i, row in enumerate(bank.bytes.view(num_records, packing.plain_bytes)):
        row.copy_(torch.from_numpy(as_bytes(weights(packing.num_elements, seed=i))))
    return bank


@pytest.mark.parametrize("threads", [1, 3, 8], ids=lambda n: f"threads{n}")
@pytest.mark.parametrize("num_records", [1, 2, 9, 40], ids=lambda n: f"records{n}")
def test_every_record_is_packed_where_it_belongs(num_records: int, threads: int) -> None:
    bank = filled(num_records)
    expected = [pack_reference(row, PACKING) for row in bank.bytes.numpy().reshape(num_records, -1).copy()]
    done: list[int] = []
    assert pack_bank(bank, PACKING, threads=threads, progress=done.append)
    assert bank.num_bytes == bank.bytes.numel() == num_records * PACKING.packed_bytes
    for row, reference in zip(bank.bytes.numpy().reshape(num_records, -1), expected, strict=True):
        assert reference is not None
        used = np.flatnonzero(reference)[-1] + 1  # what follows the escapes has no meaning
        assert np.array_equal(row[:used], reference[:used])
    assert done == sorted(done)
    assert done[-1] == num_records * PACKING.plain_bytes
    bank.close()


@pytest.mark.parametrize("bad", [0, 8], ids=["first", "last"])
def test_a_bank_with_one_record_that_does_not_fit_is_left_as_it_is(bad: int) -> None:
    bank = filled(9)
    noise = np.random.default_rng(0).integers(0, 1 << 16, PACKING.num_elements)
    bank.bytes.view(9, -1)[bad] = torch.from_numpy(as_bytes(noise.astype(np.uint16)))
    before, num_threads = bank.bytes.clone(), threading.active_count()
    assert not pack_bank(bank, PACKING, threads=3, progress=lambda _: pytest.fail("something was packed"))
    assert torch.equal(bank.bytes, before)
    assert threading.active_count() == num_threads
    bank.close()


def test_the_tail_goes_back_to_the_system() -> None:
    packing = PackedLayout.of(8 << 20)
    assert packing is not None
    process, bank = psutil.Process(), HostBank(16 * packing.plain_bytes)
    bank.bytes.view(16, -1)[:] = torch.from_numpy(as_bytes(weights(packing.num_elements)))
    filled = process.memory_info().rss
    assert pack_bank(bank, packing, threads=2, progress=lambda _: None)
    given_back = 16 * (packing.plain_bytes - packing.packed_bytes)
    assert filled - process.memory_info().rss > 0.8 * given_back
    bank.close()


def test_a_registered_bank_keeps_its_pages() -> None:
    bank = HostBank(1 << 20)
    bank.register(chunk_bytes=1 << 20)
    with pytest.raises(AssertionError, match="CUDA holds the pages"):
        bank.shrink(4096)
    bank.close()


@pytest.mark.parametrize(
    ("dtypes", "is_packed"),
    [(["bfloat16", "bfloat16"], True), (["bfloat16", "float32"], False), (["float16"], False)],
    ids=str,
)
def test_only_records_of_bf16_alone_are_packed(dtypes: list[str], is_packed: bool) -> None:
    layout = RecordLayout.of([(f"w{i}", getattr(torch, dtype), (256, 256)) for i, dtype in enumerate(dtypes)])
    assert (packing_of(layout) is not None) == is_packed


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bf16 model with experts large enough to gain by packing, a record of 96 KiB."""
    config = transformers.Qwen3MoeConfig(
        hidden_size=128, moe_intermediate_size=128, num_experts=8, num_experts_per_tok=2, vocab_size=64,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, intermediate_size=64, num_hidden_layers=3,
        dtype=torch.bfloat16,
    )  # fmt: skip
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("wide")
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


def all_records(store: BankStore) -> list[torch.Tensor]:
    keys = [ExpertKey(layer, e) for layer in range(store.num_layers) for e in range(store.num_experts)]
    return [store.plain_record(key).clone() for key in keys]


def test_a_packed_store_holds_the_same_experts(folder: Path) -> None:
    modules = split(folder).experts
    plain = load_store(modules, threads=2)
    calls: list[tuple[int, int]] = []
    packed = load_store(modules, threads=2, form="packed", progress=lambda *call: calls.append(call))
    assert packed.packing is not None
    assert packed.bank_bytes == 24 * packed.stored_bytes == packed.records.numel() < 0.85 * plain.bank_bytes
    assert all(torch.equal(a, b) for a, b in zip(all_records(packed), all_records(plain), strict=True))
    assert calls == sorted(calls)
    assert calls[-1] == (2 * plain.bank_bytes,) * 2  # all was read, and all was packed
    plain.close()
    packed.close()


def test_weights_that_do_not_fit_stay_plain_and_the_log_says_so(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def scramble(name: str, tensor: torch.Tensor) -> torch.Tensor:
        is_one = name.endswith("layers.1.mlp.experts.3.down_proj.weight")
        return torch.exp2(torch.randn(tensor.shape) * 40).bfloat16() if is_one else tensor

    copy = tmp_path / "scrambled"
    copy.mkdir()
    for file in folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    rewrite(copy, lambda tensors: {name: scramble(name, tensor) for name, tensor in tensors.items()})
    calls: list[tuple[int, int]] = []
    with caplog.at_level(logging.WARNING):
        store = load_store(
            split(copy).experts, threads=2, form="packed", progress=lambda *call: calls.append(call)
        )
    assert store.packing is None
    assert store.stored_bytes == store.layout.record_bytes
    assert [r.message for r in caplog.records] == [
        "experts stay plain: their exponents vary too much to be packed"
    ]
    assert calls[-1][0] == calls[-1][1]
    store.close()


def test_no_memory_for_scratch_is_a_clear_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(packing_module, "_pack_in_waves", refuse)
    with pytest.raises(DeviceError, match=r"no room for packing the experts \(MemoryError\); free memory"):
        load_store(split(folder).experts, threads=2, form="packed")


def test_a_failing_progress_bar_stops_packing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []
    close = HostBank.close
    monkeypatch.setattr(HostBank, "close", lambda bank: (closed.append(bank), close(bank)))

    def fail(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    num_threads = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        load_store(split(folder).experts, threads=2, form="packed", progress=fail)
    assert threading.active_count() == num_threads
    assert len(closed) == 1
