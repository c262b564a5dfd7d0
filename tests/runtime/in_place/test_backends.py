"""One contract, every backend: the sum of a layer's experts, from the bank as it lies."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numba import cfunc

from hetero_cpu_kernels.ktransformers import is_installed
from hetero_runtime.config import load_config
from hetero_runtime.errors import ConfigError, DeviceError
from hetero_runtime.in_place import InPlaceExperts
from hetero_runtime.in_place import native as native_module
from hetero_runtime.in_place.build import check_in_place, make_in_place_experts
from hetero_runtime.in_place.ktransformers import KtExperts
from hetero_runtime.in_place.native import NativeExperts
from hetero_runtime.in_place.torch_loop import TorchExperts
from hetero_runtime.planned import decide
from tests.architectures import build_checkpoint
from tests.runtime.in_place.layers import Bank, make_work, relative_error

MOST_ERROR = {"float32": 2e-6, "bfloat16": 1e-2}
"""Of a layer's sum. bfloat16: torch rounds after each product, and the kernels of many tokens round what they
multiply."""

HAS_KT = is_installed() and len(os.sched_getaffinity(0)) > 1
BACKENDS = [
    "native",
    "torch",
    pytest.param(
        "ktransformers",
        marks=pytest.mark.skipif(not HAS_KT, reason="kt-kernel is not installed, or has no core to spin on"),
    ),
]
BANKS: dict[str, tuple[str, dict[str, Any]]] = {
    "f32": ("Qwen3Moe", {"dtype": "float32"}),
    "bf16": ("Qwen3Moe", {"dtype": "bfloat16"}),
    "packed": ("Qwen3Moe", {"dtype": "bfloat16", "is_packed": True}),
    "mxfp4, biases": ("GptOssMxfp4", {"dtype": "bfloat16"}),
    "transposed": ("GptOss", {"dtype": "float32"}),
    "transposed, int8": ("GptOss", {"dtype": "float32", "experts": "int8"}),
    "int4": ("Qwen3Moe", {"dtype": "float32", "experts": "int4"}),
    "fp8": ("Qwen3MoeFp8", {"dtype": "float32"}),
}
TORCH_COMPUTES_IT = r"cannot compute these experts: .*cpu.backend: torch"
REFUSED = {
    ("native", "transposed"): TORCH_COMPUTES_IT,
    ("native", "fp8"): TORCH_COMPUTES_IT,  # scale blocks of 16 columns, which no published model has
    ("ktransformers", "f32"): "it computes in bfloat16, and model.dtype is float32",
    ("ktransformers", "mxfp4, biases"): "cannot be: it has no kernels for fp4.*or write cpu.backend: native",
    ("ktransformers", "transposed"): TORCH_COMPUTES_IT,
    ("ktransformers", "transposed, int8"): "it computes in bfloat16",
    ("ktransformers", "int4"): "it computes in bfloat16",
    ("ktransformers", "fp8"): TORCH_COMPUTES_IT,
}
"""By backend and bank, with what is said."""
COUNTS = {
    "one token": ({3: 1, 5: 1, 6: 1}, 1),
    "seven tokens": ({0: 7, 2: 3, 7: 1}, 7),
    "many tokens": ({0: 1, 1: 40, 4: 9, 6: 33}, 40),
}
"""Tokens by expert, and of all."""

GetBank = Callable[[str], Bank]
Make = Callable[..., InPlaceExperts]


@pytest.fixture(scope="module")
def bank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GetBank]:
    made: list[Bank] = []

    @cache
    def load(name: str) -> Bank:
        model, settings = BANKS[name]
        made.append(Bank.load(model, tmp_path_factory.mktemp(model), **settings))
        return made[-1]

    yield load
    for each in made:
        each.store.close()


def configure(folder: Path, dtype: str, backend: str, **cpu: Any) -> Any:
    """Resolved; then with `cpu`, whatever this machine has."""
    tree = {
        "model": {"path": str(folder), "dtype": dtype},
        "device": "cpu",
        "misses": {"handler": "cpu"},
        "cpu": {"backend": backend, "threads": 2},
    }
    config = decide(load_config(tree)).config
    return replace(config, cpu=replace(config.cpu, **cpu))


@pytest.fixture
def make(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Make]:
    """`make(backend, bank, **cpu)`, closed afterwards, when no thread of it is left."""
    made: list[InPlaceExperts] = []
    folder = build_checkpoint("Qwen3Moe", tmp_path_factory.mktemp("any"))

    def build(backend: str, bank: Bank, **cpu: Any) -> InPlaceExperts:
        config = configure(folder, str(bank.routed.dtype).removeprefix("torch."), backend, **cpu)
        experts = make_in_place_experts(config, bank.routed, bank.store)
        assert experts is not None
        made.append(experts)
        return experts

    yield build
    for experts in made:
        experts.close()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("expert-")]


@pytest.mark.parametrize("name", BANKS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_sum_of_a_layer(backend: str, name: str, bank: GetBank, make: Make) -> None:
    if (backend, name) in REFUSED:
        with pytest.raises(ConfigError, match=REFUSED[backend, name]):
            make(backend, bank(name))
        return
    experts = make(backend, bank(name))
    for counts, num_tokens in COUNTS.values():
        work = make_work(bank(name), counts, num_tokens)
        experts.submit(work)
        done = experts.wait()
        error = relative_error(done.total, bank(name).reference(work))
        assert error < MOST_ERROR[BANKS[name][1]["dtype"]], f"{num_tokens} tokens: relative error {error:.1e}"
        assert 0 < done.seconds < 60


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_next_work_may_be_submitted_before_the_last_is_fetched(
    backend: str, bank: GetBank, make: Make
) -> None:
    experts, first = make(backend, bank("bf16")), make_work(bank("bf16"), {1: 4}, 4)
    second = make_work(bank("bf16"), {2: 1, 3: 1}, 1, layer=0, seed=5)
    experts.submit(first)
    experts.submit(second)
    assert relative_error(experts.wait().total, bank("bf16").reference(second)) < MOST_ERROR["bfloat16"]


@cfunc("int64(int64, int64, int64)")
def failing(plan: Any, index: Any, count: Any) -> Any:
    return 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_goes_wrong_is_raised_at_the_wait_and_the_next_work_is_computed(
    backend: str, bank: GetBank, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    experts, work = make(backend, bank("bf16")), make_work(bank("bf16"), {1: 1, 2: 1}, 1)
    if isinstance(experts, TorchExperts):
        monkeypatch.setattr(experts, "_parameters", lambda key: 1 / 0)
        error: type[Exception] = ZeroDivisionError
    elif isinstance(experts, KtExperts):
        monkeypatch.setattr(experts._pool, "wait", fail)
        error = DeviceError
    else:
        assert isinstance(experts, NativeExperts)
        monkeypatch.setattr(experts._experts, "_job", failing)
        error = DeviceError
    experts.submit(work)
    with pytest.raises(error, match=r"division by zero|left alone by another|kt-kernel failed: no"):
        experts.wait()
    monkeypatch.undo()
    experts.submit(work)
    assert relative_error(experts.wait().total, bank("bf16").reference(work)) < MOST_ERROR["bfloat16"]


def fail() -> None:
    raise RuntimeError("no")


# ---- one alone


@pytest.mark.skipif(HAS_KT, reason="kt-kernel is installed")
def test_kt_kernel_is_asked_for_before_anything_is_read(bank: GetBank, make: Make) -> None:
    with pytest.raises(
        ConfigError, match=r"ktransformers cannot be: kt-kernel is not installed; pip install"
    ):
        make("ktransformers", bank("bf16"))


@pytest.mark.skipif(not HAS_KT, reason="kt-kernel is not installed, or has no core to spin on")
def test_a_token_with_more_experts_than_a_row_of_kt_kernel_has(bank: GetBank, make: Make) -> None:
    experts = make("ktransformers", bank("bf16"))
    work = make_work(bank("bf16"), dict.fromkeys(range(12), 3), 3)
    experts.submit(work)
    assert relative_error(experts.wait().total, bank("bf16").reference(work)) < MOST_ERROR["bfloat16"]


@pytest.mark.skipif(not HAS_KT, reason="kt-kernel is not installed, or has no core to spin on")
def test_more_rows_than_a_call_of_kt_kernel_takes(bank: GetBank, make: Make) -> None:
    experts = make("ktransformers", bank("bf16"))
    work = make_work(bank("bf16"), {1: 300, 3: 200, 4: 1}, 300)
    experts.submit(work)
    assert relative_error(experts.wait().total, bank("bf16").reference(work)) < MOST_ERROR["bfloat16"]


@pytest.mark.parametrize("name", ["bf16", "packed", "mxfp4, biases"])
def test_bits_do_not_depend_on_the_number_of_workers(
    name: str, bank: GetBank, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hetero_runtime.in_place.build.place_workers", lambda _, number: (0,) * number)
    totals = []
    for threads in (2, 3, 5):
        experts = make("native", bank(name), threads=threads)
        assert experts.num_workers == threads - 1
        experts.submit(make_work(bank(name), {0: 1, 1: 40, 4: 9, 6: 33}, 40))
        totals.append(experts.wait().total)
    assert all(np.array_equal(total, totals[0]) for total in totals[1:])


def test_much_work_is_computed_in_several_calls(
    bank: GetBank, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = make_work(bank("f32"), {0: 1, 1: 40, 4: 9, 5: 10, 6: 33}, 40)
    calls: list[list[int]] = []
    for most_pairs in (1000, 50, 12):
        monkeypatch.setattr(native_module, "in_place_pairs", lambda *_, most=most_pairs: most)
        experts = make("native", bank("f32"))
        experts.submit(work)
        assert relative_error(experts.wait().total, bank("f32").reference(work)) < MOST_ERROR["float32"]
        calls.append([len(part.experts) for part in native_module._parts(work, most_pairs)])
    assert calls[0] == [5]
    for most_pairs, parts in ((50, calls[1]), (12, calls[2])):
        assert len(parts) > 1
        for part in native_module._parts(work, most_pairs):
            assert part.bounds[-1] - part.bounds[0] <= most_pairs


@pytest.mark.parametrize(
    ("cpu", "dtype", "message"),
    [
        ({"isa": "neon"}, "bfloat16", r"cpu.isa: neon does not execute on this machine; write cpu.isa: auto"),
        ({"threads": 500}, "bfloat16", r"cpu.threads: 500 leaves 499 that compute .*write cpu.thre"),
    ],
)
def test_what_this_machine_cannot_do_is_refused_before_anything_is_read(
    cpu: dict[str, Any], dtype: str, message: str, tmp_path: Path, bank: GetBank
) -> None:
    config = configure(build_checkpoint("Qwen3Moe", tmp_path), dtype, "native", **cpu)
    with pytest.raises(ConfigError, match=message):
        check_in_place(config, bank("bf16").routed, [])


@pytest.mark.parametrize(
    ("mode", "predictor", "num_workers"),
    [("eager", "pregate", 4), ("graph", "none", 3), ("graph", "pregate", 2)],
)
def test_threads_that_spin_beside_the_workers_have_cores_of_their_own(
    mode: str, predictor: str, num_workers: int, tmp_path: Path, bank: GetBank
) -> None:
    config = configure(build_checkpoint("Qwen3Moe", tmp_path), "float32", "torch", threads=5)
    config = replace(
        config,
        execution=replace(config.execution, mode=mode),
        prediction=replace(config.prediction, predictor=predictor),
    )
    experts = make_in_place_experts(config, bank("f32").routed, bank("f32").store)
    experts.close()
    assert experts.num_workers == num_workers


def test_a_float32_model_is_not_rounded_to_bfloat16(bank: GetBank, make: Make) -> None:
    experts = make("native", bank("f32"))
    assert isinstance(experts, NativeExperts)
    assert experts.target.many == "float32"
    assert bank("f32").routed.dtype == torch.float32
