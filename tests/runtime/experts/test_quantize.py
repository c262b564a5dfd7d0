"""Experts loaded in another format: their weights, what the kernels are told of them, and what is refused."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from hetero_cpu_kernels.quantize import quantize
from hetero_gpu.experts.reference import dequantize, expert_reference
from hetero_runtime.checkpoint import Checkpoint
from hetero_runtime.config import load_config
from hetero_runtime.errors import CheckpointError, ConfigError
from hetero_runtime.experts.formats import PLAIN
from hetero_runtime.experts.kernel_format import expert_format
from hetero_runtime.experts.sources import plan_experts
from hetero_runtime.experts.store import ExpertStore, load_store
from hetero_runtime.hf.conversion import expert_modules
from hetero_runtime.hf.hooks import expert_mlp
from hetero_runtime.hf.loading import build_skeleton
from hetero_runtime.planned import decide
from hetero_scheduler.keys import ExpertKey
from tests.architectures import ARCHITECTURES, QUANTIZED, build_checkpoint, reference_model
from tests.runtime.experts.loading import rewrite, split

FORMATS = ("bf16", "fp8", "int8", "int4")
MOST = {"bf16": 0.003, "fp8": 0.032, "int8": 0.012, "int4": 0.12}
"""Relative root mean square error of a tiny model's weights, which are drawn from a normal distribution."""


def load(folder: Path, experts: str, threads: int = 2) -> ExpertStore:
    return load_store(split(folder).experts, threads=threads, experts=experts)  # type: ignore[arg-type]


def _assert_planned(folder: Path, experts: str, store: ExpertStore) -> None:
    """The plan, which reads headers alone, counts the bytes that were loaded."""
    settings = ("device=cpu", f"model.path={folder}", f"model.experts={experts}")
    geometry = decide(load_config(None, overrides=settings)).geometry
    assert (geometry.record_bytes, geometry.bank_bytes) == (store.layout.record_bytes, store.bank_bytes)
    assert geometry.source_record_bytes == plan_experts(split(folder).experts).layout.record_bytes


CASES = [
    *((name, "int4") for name in ARCHITECTURES if name not in QUANTIZED),
    *((name, experts) for name in ("Qwen3Moe", "GptOss", "Qwen3VLMoe") for experts in FORMATS[:-1]),
]


@pytest.mark.parametrize(("name", "experts"), CASES)
def test_weights_are_near_those_of_transformers(name: str, experts: str, tmp_path: Path) -> None:
    folder = build_checkpoint(name, tmp_path)
    store = load(folder, experts)
    _assert_planned(folder, experts, store)
    assert store.errors is not None and len(store.errors) == store.num_layers
    for layer, module in enumerate(expert_modules(reference_model(folder)).values()):
        error = size = 0.0
        for expert in range(store.num_experts):
            params = store.materialize(store.record(ExpertKey(layer, expert)), torch.float32)
            for parameter, expected in module.named_parameters(recurse=False):
                found, weight = params[parameter], expected[expert].detach()
                assert found.shape == weight.shape and found.is_contiguous()
                if weight.dim() == 1:
                    assert torch.equal(found, weight), "biases stay as they are"
                else:
                    error += float((found - weight).square().sum())
                    size += float(weight.square().sum())
        assert store.errors[layer] == pytest.approx((error / size) ** 0.5, rel=1e-3)
        assert store.errors[layer] < MOST[experts]
    store.close()


@pytest.mark.parametrize("experts", FORMATS)
@pytest.mark.parametrize("name", ["Qwen3Moe", "GptOss", "DeepseekV4"])
def test_the_kernels_are_told_where_everything_lies(name: str, experts: str, tmp_path: Path) -> None:
    """Gates, biases, clamps, transposed weights; by the reference that fused kernels are tested with."""
    folder = build_checkpoint(name, tmp_path)
    skeleton = build_skeleton(Checkpoint.open(folder), dtype="float32", device=torch.device("cpu"))
    module = next(iter(skeleton.experts.values()))
    store = load(folder, experts)
    form = expert_format(store.layout, store.forms, module)
    record = store.record(ExpertKey(0, 3))
    params = store.materialize(record, torch.float32)
    up, down = (params[f"{name}_proj"] for name in ("gate_up", "down"))
    if module.is_transposed:
        up, down = up.T, down.T
    assert torch.equal(dequantize(record, form.up), up)
    assert torch.equal(dequantize(record, form.down), down)
    x = torch.randn(5, form.hidden)
    torch.testing.assert_close(
        expert_reference(x, record, form), expert_mlp(module)(x, params), rtol=1e-4, atol=1e-4
    )
    store.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("experts", ["int8", "int4", "fp8"])
def test_half_precision_is_read_as_it_is(dtype: torch.dtype, experts: str, tmp_path: Path) -> None:
    folder = build_checkpoint("Qwen3Moe", tmp_path, dtype=dtype)
    store, plain = load(folder, experts), load(folder, "checkpoint")
    weight = plain.materialize(plain.record(ExpertKey(1, 2)), torch.float32)["down_proj"].numpy()
    field = store.layout.view(store.record(ExpertKey(1, 2)))
    values = np.empty(field["down_proj"].shape, np.uint8)
    scales = np.empty(field["down_proj.scale"][0].shape, np.uint16 if experts == "int4" else np.float32)
    quantize(weight, experts, values=values, scales=scales[:, 0] if experts == "int8" else scales)  # type: ignore[arg-type]
    assert np.array_equal(field["down_proj"].view(torch.uint8).numpy(), values)
    for each in (store, plain):
        each.close()


def test_bf16_of_bf16_changes_no_bit(tmp_path: Path) -> None:
    folder = build_checkpoint("GptOss", tmp_path, dtype=torch.bfloat16)
    store, plain = load(folder, "bf16"), load(folder, "checkpoint")
    assert torch.equal(store.records, plain.records)
    assert store.errors == [0.0] * store.num_layers and plain.errors is None
    for each in (store, plain):
        each.close()


def test_any_number_of_threads_gives_the_same_bytes(tmp_path: Path) -> None:
    folder = build_checkpoint("Mixtral", tmp_path)
    one, three = load(folder, "int4", threads=1), load(folder, "int4", threads=3)
    assert torch.equal(one.records, three.records)
    assert one.errors == three.errors
    for store in (one, three):
        store.close()


@pytest.mark.parametrize("experts", FORMATS)
@pytest.mark.parametrize("name", QUANTIZED)
def test_what_is_quantised_already_is_refused(name: str, experts: str, tmp_path: Path) -> None:
    folder = build_checkpoint(name, tmp_path)
    message = (
        rf"model\.experts: {experts} is for experts of F32, F16, BF16, and .* is quantised already; write"
    )
    with pytest.raises(ConfigError, match=message):
        load(folder, experts)
    settings = ("device=cpu", f"model.path={folder}", f"model.experts={experts}")
    with pytest.raises(ConfigError, match=message):
        decide(load_config(None, overrides=settings))


def _odd(folder: Path) -> Path:
    """Experts of 33 columns."""
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        hidden_size=32, moe_intermediate_size=33, num_experts=4, num_experts_per_tok=2, vocab_size=64,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, intermediate_size=64, num_hidden_layers=2,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def test_int4_refuses_an_odd_number_of_columns(tmp_path: Path) -> None:
    folder = _odd(tmp_path)
    message = (
        r"model\.experts: int4 packs two columns a byte, and down_proj has 33 columns; write model\.exp.*int8"
    )
    with pytest.raises(ConfigError, match=message):
        load(folder, "int4")
    with pytest.raises(ConfigError, match=message):
        decide(load_config(None, overrides=("device=cpu", f"model.path={folder}", "model.experts=int4")))
    for experts in ("int8", "fp8"):
        store = load(folder, experts)
        assert max(store.errors or [1.0]) < MOST[experts]
        store.close()


@pytest.mark.parametrize("experts", FORMATS)
def test_a_weight_that_is_no_number_is_named(experts: str, tmp_path: Path) -> None:
    folder = _odd(tmp_path) if experts != "int4" else build_checkpoint("Olmoe", tmp_path)

    def spoil(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        tensors["model.layers.1.mlp.experts.2.down_proj.weight"][3, 1] = torch.nan
        return tensors

    with pytest.raises(
        CheckpointError, match="expert 2 of MoE layer 1, down_proj: a weight is infinite or not"
    ):
        load(rewrite(folder, spoil), experts)


def test_forms_say_how_each_parameter_is_read(tmp_path: Path) -> None:
    store = load(build_checkpoint("GptOss", tmp_path), "int4")
    assert store.forms["gate_up_proj_bias"] == PLAIN
    assert (store.forms["down_proj"].kind, store.forms["down_proj"].is_transposed) == ("int4", True)
    assert store.layout.fields[0].shape == (64, 32)  # [2I, H / 2]
    store.close()


def test_peak_memory_is_the_smaller_bank_and_a_little(tmp_path: Path) -> None:
    """75 MB of bf16 experts as int4, in a process of its own: the bank, and what the plan has beside it."""
    script = textwrap.dedent(
        """
        import sys
        from pathlib import Path
        from tests.runtime.experts.loading import split
        from hetero_runtime.experts.store import load_store
        from hetero_runtime.plan.demand import Demand, fixed_rows
        from hetero_runtime.plan.quantized import quantized
        from hetero_runtime.plan import read_geometry

        modules = split(Path(sys.argv[1])).experts
        load_store(modules[:1], threads=2, experts="int4").close()  # what is compiled on first use
        def peak():
            status = Path("/proc/self/status").read_text()
            return int(status.partition("VmHWM:")[2].split()[0]) * 1024
        Path("/proc/self/clear_refs").write_text("5")
        before = peak()
        store = load_store(modules, threads=2, experts="int4")
        demand = Demand("cpu", "bfloat16", max_rows=1, max_length=64, pinned_prefix=0, threads=2)
        rows = {row.name: row for row in fixed_rows(quantized(read_geometry(sys.argv[1]), "int4"), demand)}
        print(peak() - before, rows["host bank"].load, rows["quantising"].load)
        """
    )
    config = transformers.Qwen3MoeConfig(
        hidden_size=256, moe_intermediate_size=128, num_experts=128, num_experts_per_tok=2, vocab_size=64,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, intermediate_size=64, num_hidden_layers=3,
        dtype=torch.bfloat16,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    paths = os.pathsep.join([".", "gpu", "scheduler", "cpu_kernels"])
    result = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    peak, bank, workspace = map(int, result.stdout.split())
    assert peak <= 1.1 * bank + workspace < 0.6 * 3.5 * bank, "the plain bank takes 3.5 times as much"
