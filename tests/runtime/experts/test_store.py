"""The store against plain transformers, bit for bit; and what is left when loading fails: nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import torch
import transformers

from hetero_runtime.errors import CheckpointError
from hetero_runtime.experts import filling as filling_module
from hetero_runtime.experts import store as store_module
from hetero_runtime.experts.extent_reader import ExtentReader, ReadPath
from hetero_runtime.experts.reads import Extent
from hetero_runtime.experts.store import BankStore, load_store
from hetero_runtime.hf.conversion import expert_modules
from hetero_scheduler.keys import ExpertKey
from tests.architectures import ARCHITECTURES, build_checkpoint, reference_model
from tests.runtime.experts.loading import Tensors, load, rewrite, split

FLOAT = "Qwen3Moe"


def assert_equal_to_transformers(store: BankStore, model: torch.nn.Module) -> None:
    modules = list(expert_modules(model).values())
    assert (store.num_layers, store.num_experts) == (
        len(modules),
        modules[0].get_parameter("down_proj").shape[0],
    )
    for layer, module in enumerate(modules):
        for expert in range(store.num_experts):
            params = store.materialize(store.record(ExpertKey(layer, expert)), torch.float32)
            expected = dict(module.named_parameters(recurse=False))
            assert params.keys() == expected.keys()
            for name, tensor in params.items():
                assert torch.equal(tensor, expected[name][expert]), (layer, expert, name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_expert_is_what_transformers_loads(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    folder = build_checkpoint(name, tmp_path, dtype=dtype)
    store = load(folder)
    assert_equal_to_transformers(store, reference_model(folder))
    store.close()


def _tiny(config: transformers.PretrainedConfig, folder: Path) -> Path:
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def _gpt_oss() -> transformers.PretrainedConfig:
    return transformers.GptOssConfig(
        hidden_size=32, intermediate_size=24, num_local_experts=4, num_experts_per_tok=2, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, vocab_size=64, sliding_window=8,
    )  # fmt: skip


def test_transposed_parameters_of_no_square_shape(tmp_path: Path) -> None:
    folder = _tiny(_gpt_oss(), tmp_path)
    store = load(folder)
    assert store.layout.fields[0].shape == (32, 48)
    assert_equal_to_transformers(store, reference_model(folder))
    store.close()


@pytest.mark.parametrize("extent_bytes", [1 << 20, 1000])
@pytest.mark.parametrize("read_path", list(ReadPath))
def test_experts_that_are_transposed_on_disk(
    read_path: ReadPath, extent_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Qwen3-VL publishes them. The reference loads the same experts without the transposition."""
    group = filling_module.group_reads
    monkeypatch.setattr(filling_module, "group_reads", lambda reads: group(reads, extent_bytes))
    folder = build_checkpoint("Qwen3VLMoe", tmp_path)
    _narrow_experts(folder)
    reference = reference_model(folder)

    def transpose(tensors: Tensors) -> Tensors:
        return {k: t.transpose(1, 2) if _is_fused_expert(k) else t for k, t in tensors.items()}

    store = load(rewrite(folder, transpose), read_path=read_path)
    assert_equal_to_transformers(store, reference)
    store.close()


def _is_fused_expert(key: str) -> bool:
    return key.endswith(("experts.gate_up_proj", "experts.down_proj"))


def _narrow_experts(folder: Path) -> None:
    """Drop a quarter of each expert, so that no matrix is square."""
    config = folder / "config.json"
    text = config.read_text()
    assert '"moe_intermediate_size": 32' in text
    config.write_text(text.replace('"moe_intermediate_size": 32', '"moe_intermediate_size": 24'))

    def narrow(key: str, tensor: torch.Tensor) -> torch.Tensor:
        if key.endswith("experts.gate_up_proj"):
            return tensor[:, :48]
        return tensor[:, :, :24] if key.endswith("experts.down_proj") else tensor

    rewrite(folder, lambda tensors: {key: narrow(key, tensor) for key, tensor in tensors.items()})


def test_records_are_zero_copy_views_of_one_bank(tmp_path: Path) -> None:
    store = load(build_checkpoint(FLOAT, tmp_path))
    first, second = store.record(ExpertKey(0, 0)), store.record(ExpertKey(0, 1))
    assert second.data_ptr() - first.data_ptr() == store.layout.record_bytes
    assert store.bank_bytes == store.num_layers * store.num_experts * store.layout.record_bytes
    params = store.materialize(first, torch.float32)
    assert params["gate_up_proj"].data_ptr() == first.data_ptr()
    with pytest.raises(AssertionError, match="no expert for ExpertKey"):
        store.record(ExpertKey(0, store.num_experts))
    assert not store.is_registered
    store.close()


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("read_path", [*ReadPath, None])
def test_threads_and_ways_of_reading_give_the_same_bytes(
    threads: int, read_path: ReadPath | None, tmp_path: Path
) -> None:
    folder = build_checkpoint(FLOAT, tmp_path)
    store = load(folder, threads=threads, read_path=read_path)
    assert_equal_to_transformers(store, reference_model(folder))
    store.close()


def test_the_faster_way_is_chosen_on_the_fly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used = []
    read, group = ExtentReader.read, filling_module.group_reads

    def spy(self: ExtentReader, extent: Extent, path: ReadPath) -> None:
        used.append(path)
        read(self, extent, path)

    monkeypatch.setattr(ExtentReader, "read", spy)
    monkeypatch.setattr(filling_module, "group_reads", lambda reads: group(reads, 4096))
    folder = build_checkpoint(FLOAT, tmp_path)
    store = load(folder)
    assert set(used) == set(ReadPath)
    assert_equal_to_transformers(store, reference_model(folder))
    store.close()


def test_progress_ends_at_all_expert_bytes(tmp_path: Path) -> None:
    modules = split(build_checkpoint(FLOAT, tmp_path)).experts
    calls: list[tuple[int, int]] = []
    store = load_store(modules, threads=2, progress=lambda done, total: calls.append((done, total)))
    expected = sum(
        p.weights[n].entries[0].num_bytes * 16 for m in modules for p in m.parameters for n in p.weights
    )
    assert calls[-1] == (expected, expected)
    assert calls == sorted(calls)
    store.close()


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("read_path", list(ReadPath))
def test_a_failing_read_leaves_nothing_behind(
    read_path: ReadPath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = split(build_checkpoint(FLOAT, tmp_path)).experts
    num_threads, num_files = threading.active_count(), _open_files()
    closed = []
    close = store_module.HostBank.close
    monkeypatch.setattr(store_module.HostBank, "close", lambda bank: (closed.append(bank), close(bank)))
    file = next(iter(modules[-1].parameters[0].weights.values())).entries[-1].file
    os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(CheckpointError, match=rf"{file.name}: ends at byte \d+, \d+ bytes early"):
        load_store(modules, threads=3, read_path=read_path)
    assert len(closed) == 1
    assert (threading.active_count(), _open_files()) == (num_threads, num_files)


def test_a_failing_progress_bar_stops_the_load(tmp_path: Path) -> None:
    def fail(done: int, total: int) -> None:
        raise KeyboardInterrupt

    num_threads = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        load_store(split(build_checkpoint(FLOAT, tmp_path)).experts, threads=2, progress=fail)
    assert threading.active_count() == num_threads


def test_bytes_that_land_wrong_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = ExtentReader.read

    def corrupt(self: ExtentReader, extent: Extent, path: ReadPath) -> None:
        read(self, extent, path)
        for each in extent.reads:
            self._bank[each.target] ^= 1

    monkeypatch.setattr(ExtentReader, "read", corrupt)
    with pytest.raises(
        CheckpointError, match="expert 15: what was loaded differs from what transformers makes"
    ):
        load(build_checkpoint(FLOAT, tmp_path))


def test_peak_memory_is_the_bank_and_a_little(tmp_path: Path) -> None:
    """A bank of 200 MB, loaded both ways, in a process of its own."""
    script = textwrap.dedent(
        """
        import sys
        from pathlib import Path
        import torch, transformers
        from tests.runtime.experts.loading import split
        from hetero_runtime.experts.extent_reader import ReadPath
        from hetero_runtime.experts.store import load_store

        modules = split(Path(sys.argv[1])).experts
        load_store(modules[:1], threads=2).close()  # what is imported and cached on first use
        def peak():
            status = Path("/proc/self/status").read_text()
            return int(status.partition("VmHWM:")[2].split()[0]) * 1024
        Path("/proc/self/clear_refs").write_text("5")
        before = peak()
        store = load_store(modules, threads=2, read_path=ReadPath(sys.argv[2]))
        print((peak() - before) / store.bank_bytes)
        """
    )
    config = transformers.Qwen3MoeConfig(
        hidden_size=512, moe_intermediate_size=256, num_experts=64, num_experts_per_tok=2, vocab_size=64,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, intermediate_size=64, num_hidden_layers=4,
        dtype=torch.bfloat16,
    )  # fmt: skip
    folder = _tiny(config, tmp_path)
    for read_path in ReadPath:
        command = [sys.executable, "-c", script, str(folder), read_path.value]
        paths = os.pathsep.join([".", "gpu", "scheduler", "cpu_kernels"])
        result = subprocess.run(
            command, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, check=False
        )
        assert result.returncode == 0, result.stderr
        assert float(result.stdout) <= 1.1, f"{read_path}: peak {result.stdout.strip()} x bank"
